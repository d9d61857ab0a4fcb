"""The pure parts: names, places, what is lacking, what became of a launch and why. No Ray is needed."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.plugin import Attempt, Endpoint, LaunchKey, LeaseState, Need, NodeId, ProviderContext, RunId
from myelin_provider_ray import placement
from myelin_provider_ray.driver import refusal
from myelin_provider_ray.endings import actor_death, draining, exit_reason, node_death
from myelin_provider_ray.environment import node_environment
from myelin_provider_ray.names import read_name, write_name
from myelin_provider_ray.plugin import myelin_config_section, myelin_provider
from myelin_provider_ray.provider import RayProvider
from myelin_provider_ray.section import RaySection, Strategy
from myelin_provider_ray.states import Stand, after_death, after_looking, before_looking
from myelin_provider_ray.view import ClusterNode, ClusterView, Group, autoscales, read_view

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9-]{0,20}", fullmatch=True)
KEY = LaunchKey(RunId("run"), NodeId("stage-0"), Attempt(1))
GB = 10**9


def node(id: str = "a", *, cpu: float = 4, memory: int = 8 * GB, gpu: float = 0, **more: Any) -> ClusterNode:
    total = {"CPU": cpu, "memory": float(memory)} | ({"GPU": gpu} if gpu else {})
    return ClusterNode(id, f"10.0.0.{ord(id[0])}", total=total, **({"free": total} | more))


def need(memory: int = GB, engine: str = "cpu", stage: str = "stage-0", **more: Any) -> Need:
    return Need(NodeId(stage), memory, engine, **more)


def group(state: str = "CREATED", scheduling: str = "FINISHED", where: str = "a", key: LaunchKey = KEY) -> Group:
    return Group("f00", key, state, scheduling, where, {"CPU": 1.0, "memory": 1.4 * GB})


# Names.


@given(NAMES, NAMES, st.integers(1, 10**9))
def test_a_name_is_read_back(run: str, stage: str, attempt: int) -> None:
    key = LaunchKey(RunId(run), NodeId(stage), Attempt(attempt))
    assert read_name(write_name(key)) == key


@given(st.text(alphabet=string.ascii_letters + ".-/ 019", max_size=30))
def test_what_is_no_name_is_nobodys(text: str) -> None:
    key = read_name(text)
    assert key is None or write_name(key) == text


@pytest.mark.parametrize("run", ["", "a.b", "-a", "a b"])
def test_what_cannot_be_a_name_is_refused(run: str) -> None:
    with pytest.raises(ValueError, match="can't be a name"):
        write_name(replace(KEY, run=RunId(run)))


# Places.


@pytest.mark.parametrize(
    ("settings", "engine", "expected"),
    [
        ({}, "cpu", {"CPU": 1.0, "memory": 1.4 * GB}),
        ({"cpus": 3, "overhead_mb": 0}, "reference", {"CPU": 3.0, "memory": 1.0 * GB}),
        ({"memory_mb": 5000}, "cpu", {"CPU": 1.0, "memory": 5.0 * GB}),
        ({}, "triton", {"CPU": 1.0, "GPU": 1.0, "memory": 0.4 * GB}),
        ({"gpus": 0.5}, "triton", {"CPU": 1.0, "GPU": 0.5, "memory": 0.4 * GB}),
    ],
)
def test_what_a_stage_reserves(settings: dict[str, Any], engine: str, expected: dict[str, float]) -> None:
    assert placement.reserved(need(engine=engine), RaySection(**settings)) == pytest.approx(expected)


nodes_of_any_kind = st.lists(
    st.builds(
        lambda id, cpu, memory, alive, drained: node(
            id, cpu=cpu, memory=memory * GB, alive=alive, drained_in_s=5.0 if drained else None
        ),
        st.sampled_from("abcdef"),
        st.integers(0, 8),
        st.integers(0, 20),
        st.booleans(),
        st.booleans(),
    ),
    max_size=6,
    unique_by=lambda made: made.id,
)


@given(nodes_of_any_kind, st.integers(0, 12), st.sampled_from(Strategy), st.booleans(), st.sets(st.sampled_from("abc")))
def test_offers_are_nodes_that_hold_the_stage(
    nodes: list[ClusterNode], memory: int, strategy: Strategy, autoscaling: bool, exclude: set[str]
) -> None:
    section = RaySection(strategy=strategy, cpus=2)
    wanted = need(memory * GB, exclude=frozenset(exclude))
    offers = placement.offers(ClusterView(tuple(nodes), autoscaling=autoscaling), wanted, section)
    by_id = {each.id: each for each in nodes}
    for offer in offers:
        assert offer.id not in exclude
        if offer.id == placement.AUTOSCALER:
            assert autoscaling
            continue
        held = by_id[offer.id]
        assert held.usable
        assert held.free["CPU"] >= 2
        assert held.free["memory"] >= wanted.memory_bytes + 400e6
        assert offer.memory_bytes + 400e6 <= held.free["memory"]
        assert 1 <= offer.room <= max(1, held.free["CPU"] // 2)
    left_out = {each.id for each in nodes} - {offer.id for offer in offers}
    for id in left_out - exclude:
        held = by_id[id]
        assert not held.usable or held.free["CPU"] < 2 or held.free["memory"] < wanted.memory_bytes + 400e6


@pytest.mark.parametrize(
    ("strategy", "order"),
    [(Strategy.SPREAD, ["c", "b", "a"]), (Strategy.STRICT_SPREAD, ["c", "b"]), (Strategy.PACK, ["a", "c", "b"])],
)
def test_the_order_of_offers(strategy: Strategy, order: list[str]) -> None:
    nodes = (node("a", memory=90 * GB), node("b", memory=5 * GB), node("c", memory=6 * GB))
    taken = group(where="a", key=replace(KEY, node=NodeId("stage-1")))
    offers = placement.offers(ClusterView(nodes), need(), RaySection(strategy=strategy), (taken,))
    assert [offer.id for offer in offers] == order


def test_what_is_promised_is_not_offered_again() -> None:
    view, section = ClusterView((node("a", cpu=1), node("b", cpu=1))), RaySection()
    claims = {"a": [{"CPU": 1.0}]}
    assert [offer.id for offer in placement.offers(view, need(), section, (), claims)] == ["b"]


def test_a_run_that_is_planned_anew_has_its_own_places() -> None:
    held = node("a", cpu=2, free={"CPU": 1.0, "memory": 6.6 * GB})
    (freed,) = placement.as_if_released(ClusterView((held,)), (group(where="a"), group(where="b"))).nodes
    assert freed.free == pytest.approx({"CPU": 2.0, "memory": 8.0 * GB})


def test_labels_and_types_of_gpus() -> None:
    plain, fast = node("a", gpu=2), node("b", gpu=2, labels={"ray.io/accelerator-type": "A100", "zone": "x"})
    view = ClusterView((plain, fast))
    unknown, known = sorted(placement.offers(view, need(engine="triton"), RaySection()), key=lambda each: each.id)
    assert (unknown.memory_bytes, unknown.bandwidth) == (0, 0.0)
    assert (known.memory_bytes, known.bandwidth, known.shared, known.room) == (40 * GB, 1555e9, False, 2)
    assert "A100" in known.description
    assert "zone=x" in known.description
    (only,) = placement.offers(view, need(), RaySection(labels={"zone": "x"}))
    assert only.id == "b"
    assert placement.offers(view, need(41 * GB, "triton"), RaySection(labels={"zone": "x"})) == ()


def test_the_place_of_a_stage_is_held_to_its_node_and_labels() -> None:
    section = RaySection(labels={"zone": "x"})
    assert placement.selector("abc", section) == {"zone": "x", "ray.io/node-id": "abc"}
    assert placement.selector(placement.AUTOSCALER, section) == {"zone": "x"}


def test_what_is_lacking_is_said_with_what_there_is() -> None:
    view = ClusterView((node("a", cpu=1), node("b", cpu=4, memory=GB), node("c", alive=False)))
    told = placement.lacking(view, need(2 * GB), RaySection(cpus=2), 3)
    assert told == (
        "it takes a node with 2 CPUs and 2.4 GB free; of the cluster's 2 nodes, 10.0.0.97 has 1 CPU and 8.0 GB; "
        "10.0.0.98 has 4 CPUs and 1.0 GB"
    )
    strict = RaySection(strategy=Strategy.STRICT_SPREAD, labels={"zone": "x"})
    assert placement.lacking(view, need(), strict, 3).startswith("it takes 3 nodes with 1 CPU and 1.4 GB free labelled")
    assert placement.lacking(ClusterView(()), need(), RaySection(), 1).endswith("the cluster has no node")


# The cluster's answers.


def answer(**more: Any) -> dict[str, Any]:
    raw = {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 4.0}, "Labels": {}}
    base: dict[str, Any] = {"nodes": [raw], "free": {"a": {"CPU": 4.0}}, "groups": [], "actors": [], "answering": {}}
    return base | {"actors_before": [], "draining": {}, "autoscaling": False} | more


def listed(name: str, state: str = "CREATED") -> dict[str, Any]:
    place = {"bundles": {"0": {"CPU": 3.0}}, "bundles_to_node_id": {"0": "a"}}
    return {"placement_group_id": "f00", "name": name, "state": state, "stats": {}} | place


def test_an_actor_without_a_place_is_a_stray_unless_it_has_just_been_made() -> None:
    names = [write_name(replace(KEY, attempt=Attempt(number))) for number in (1, 2, 3)]
    before = ["somebody.elses", *names[:2], "myelin.gone.stage-0.1"]
    view = read_view(answer(actors=["somebody.elses", *names], actors_before=before, groups=[listed(names[0])]))
    assert view.strays == {replace(KEY, attempt=Attempt(2))}


def test_groups_of_others_and_those_that_are_gone_are_left_out() -> None:
    groups = [listed("myelin.run.stage-0.1"), listed("somebody's"), listed("myelin.run.stage-1.1", "REMOVED")]
    view = read_view(answer(groups=groups, draining={"a": 0.0}, answering={"a": False}), True)
    assert [each.key for each in view.groups] == [KEY]
    assert view.autoscaling
    assert not view.nodes[0].usable
    assert view.of_run(RunId("other")) == ()


def test_what_our_own_groups_hold_is_not_free_however_late_ray_says_so() -> None:
    assert read_view(answer(groups=[listed("myelin.run.stage-0.1")])).nodes[0].free == {"CPU": 1.0}
    assert read_view(answer(free={"a": {"CPU": 0.5}})).nodes[0].free == {"CPU": 0.5}
    assert read_view(answer(free={})).nodes[0].free == {"CPU": 0.0}


def test_an_autoscaler_that_only_watches_adds_nothing() -> None:
    assert not autoscales({"node_type_mapping": {"08f1": "node_08f1"}})
    assert not autoscales({})
    assert autoscales({"node_type_mapping": {"ffff": "ray.head.default"}})


class Full:
    """A cluster of one node, which one stage of the run ``run`` fills."""

    async def call(self, name: str, /, *, timeout_s: float = 0.0, **arguments: Any) -> Any:
        assert name == "snapshot"
        whole = {"CPU": 1.0, "memory": 2.0 * GB}
        held = listed("myelin.run.stage-0.1") | {"bundles": {"0": whole}}
        (raw,) = answer()["nodes"]
        return answer(nodes=[raw | {"Resources": whole}], free={"a": {}}, groups=[held])

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("run", "wanted", "found"),
    [
        ("run", need(0), ["a"]),  # the plan of a run that is taken up again
        ("run", need(stage="stage-0"), ["a"]),  # the stage that is there already
        ("run", need(stage="stage-1"), []),
        ("other", need(0), []),
        ("other", need(stage="stage-0"), []),
    ],
)
async def test_a_run_that_is_taken_up_again_is_offered_what_it_has(run: str, wanted: Need, found: list[str]) -> None:
    provider = RayProvider(ProviderContext(RunId(run), RaySection(), nodes=2), driver=Full())
    assert [offer.id for offer in await provider.offers(wanted)] == found


# What became of a launch.


def before(of: Group, nodes: tuple[ClusterNode, ...] = (node("a"),), **more: Any) -> Stand | None:
    settings: dict[str, Any] = {"has_actor": True, "waited_s": 1.0, "patience_s": 60.0, "pinned": ""}
    autoscaling = more.pop("autoscaling", False)
    return before_looking(of, ClusterView(nodes, autoscaling=autoscaling), **(settings | more))


@pytest.mark.parametrize(
    ("stand", "state", "words"),
    [
        (before(group()), None, ""),
        (before(group(), has_actor=False), None, ""),
        (
            before(group("PENDING", "NO_RESOURCES", "")),
            LeaseState.STARTING,
            "a node to have room with 1 CPU and 1.4 GB",
        ),
        (before(group("PENDING", "INFEASIBLE", ""), autoscaling=True), LeaseState.STARTING, "the autoscaler to add a"),
        (before(group("PENDING", "INFEASIBLE", "")), LeaseState.EXITED, "no node of the cluster has 1 CPU and 1.4 GB"),
        (
            before(group("PENDING", "", ""), waited_s=61.0),
            LeaseState.EXITED,
            "no place within 60 s: it waited for 1 CPU",
        ),
        (before(group("RESCHEDULING", "", "")), LeaseState.EXITED, "the raylet of its node died"),
        (before(group(), (node("a", answers=False),)), LeaseState.EXITED, "raylet of node 10.0.0.97 died (nobody"),
        (before(group(), (node("a", alive=False, death_reason=2, death_text="hb"),)), LeaseState.EXITED, "died (hb)"),
        (before(group(), (node("a", alive=False, death_reason=3),)), LeaseState.EXITED, "was pre-empted"),
        (before(group(), (node("a", drained_in_s=30.0),)), LeaseState.EXITED, "is being pre-empted, within 30 s"),
        (before(group("PENDING", "", ""), (node("a", answers=False),), pinned="a"), LeaseState.EXITED, "died"),
    ],
)
def test_what_is_told_without_asking(stand: Stand | None, state: LeaseState | None, words: str) -> None:
    if state is None:
        assert stand is None
        return
    assert stand is not None
    assert stand.state is state
    assert words in stand.reason + stand.detail


def worker(**more: Any) -> dict[str, Any]:
    quiet = {"booted": True, "endpoint": [], "ended": False, "status": None, "failure": "", "last": "", "kills": 0}
    return {"worker": quiet | more}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (worker(), Stand(LeaseState.STARTING, detail="its worker starts")),
        (worker(endpoint=["h:1"]), Stand(LeaseState.RUNNING, endpoint=Endpoint(("h:1",)))),
        (
            worker(endpoint=["h:1"], ended=True, status=-9, kills=1),
            Stand(LeaseState.EXITED, reason="was killed for memory (OOM): its machine ran out of it"),
        ),
        (
            worker(ended=True, failure="python: No such file"),
            Stand(LeaseState.EXITED, reason="its worker could not be started: python: No such file"),
        ),
        ({"silent": True}, Stand(LeaseState.STARTING, detail="its actor starts")),
        ({"absent": True}, None),
        ({"died": "…"}, None),
    ],
)
def test_what_the_actor_tells(told: Mapping[str, Any], expected: Stand | None) -> None:
    assert after_looking(told, None) == expected


def test_an_actor_that_is_silent_is_as_it_was() -> None:
    running = Stand(LeaseState.RUNNING, endpoint=Endpoint(("h:1",)))
    assert after_looking({"silent": True}, running) is running


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (
            {"kind": "oom_context", "text": "Memory on the node was 95 %"},
            "its actor was killed for memory (OOM) (Memory",
        ),
        ({"kind": "actor_died_error_context", "reason": "OUT_OF_MEMORY"}, "killed for memory (OOM)"),
        (
            {"reason": "NODE_DIED", "address": "10.0.0.1", "node_reason": 2, "node_text": "missed heartbeats"},
            "the raylet of node 10.0.0.1 died (missed heartbeats)",
        ),
        ({"reason": "NODE_DIED", "address": "10.0.0.1", "node_reason": 3, "node_text": ""}, "10.0.0.1 was pre-empted"),
        ({"kind": "runtime_env_failed_context", "text": "pip said no"}, "runtime environment could not be set up (pip"),
        ({"kind": "creation_task_failure_context", "text": "boom"}, "its actor could not be made (boom)"),
        ({"kind": "actor_unschedulable_context", "text": "no"}, "can't be placed"),
        ({"reason": "RAY_KILL"}, "its actor was killed by ray.kill"),
        (
            {"text": "Worker exit type: SYSTEM_ERROR\nand more."},
            "its actor died (Worker exit type: SYSTEM_ERROR and more)",
        ),
    ],
)
def test_what_an_actor_died_of(cause: dict[str, Any], words: str) -> None:
    told = actor_death(cause)
    assert words in told
    assert "\n" not in told


def test_a_death_of_which_ray_knows_nothing_is_a_death_all_the_same() -> None:
    assert after_death(None).reason == "its actor is gone"
    assert after_death(None, "lost it").reason == "its actor died (lost it)"
    assert after_death({"reason": "RAY_KILL"}, "lost it").reason == "its actor was killed by ray.kill"


@pytest.mark.parametrize(
    ("status", "last", "kills", "words"),
    [
        (0, "", 0, "ended by itself (status 0)"),
        (1, "no such transport", 0, "exited with status 1: no such transport"),
        (3, " ", 0, "exited with status 3"),
        (-9, "", 0, "was killed (SIGKILL): by hand, or by its machine for want of memory (OOM)"),
        (-9, "", 1, "was killed for memory (OOM): its machine ran out of it"),
        (-11, "", 0, "crashed (SIGSEGV)"),
        (-15, "", 0, "was ended by SIGTERM"),
        (-250, "", 0, "was ended by signal 250"),
    ],
)
def test_why_a_worker_ended(status: int, last: str, kills: int, words: str) -> None:
    assert exit_reason(status, last, memory_kills=kills) == words


def test_nodes_that_go() -> None:
    assert node_death("h", 3, "spot") == "node h was pre-empted (spot)"
    assert node_death("h", 1, "") == "the raylet of node h died"
    assert draining("h", 0) == "node h is being pre-empted"


# The rest.


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("ConnectionError", "no-cluster"),
        ("ModuleNotFoundError", "no-ray"),
        ("TimeoutError", "ray-timeout"),
        ("X", "ray-refused"),
    ],
)
def test_what_ray_refuses_is_one_line_for_people(kind: str, reason: str) -> None:
    error = refusal(kind, "first line\n" + "x" * 999)
    assert error.reason == reason
    assert "\n" not in error.message
    assert len(error.message) < 400
    assert error.hint


def test_a_worker_gets_neither_our_settings_nor_keys() -> None:
    parent = {
        "PATH": "/bin",
        "MYELIN_X": "1",
        "HF_TOKEN": "s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    made = node_environment(parent, {"MYELIN_NODE_CORES": "2"})
    assert {name: made[name] for name in made if not name.startswith("PYTHON")} == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
        "MYELIN_NODE_CORES": "2",
    }


def test_it_answers_for_its_own_name_only() -> None:
    assert myelin_provider("another", ProviderContext(RunId("r"))) is None
    section = myelin_config_section()
    assert section.name == "ray"
    assert section.model() == RaySection()
