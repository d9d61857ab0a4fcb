"""`myelin` over a real Ray cluster of three nodes on this machine, which share its address and its cores."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from end_to_end_support import SMOLLM2, ask, wait_for_rpc
from ray_cluster_support import STORE_BYTES, ThreeNodes, end_shared, lent

QUESTION = "Explain in one sentence what a neuron does."
WORDS = ("-N", "3", "--model", SMOLLM2, "--threads", "1", "--max-context", "512")
ROOMY, SMALL = 2_000_000_000, 435_000_000
HALF = ("--set", "ray.cpus=0.5")
"""With which a node has room for two stages."""


@pytest.fixture
def cluster() -> Iterator[ThreeNodes]:
    """Three nodes of one CPU each, which a run of three stages fills; the second one has memory for few layers."""
    yield from lent((ROOMY, SMALL, ROOMY), cpus=1)


@pytest.fixture(autouse=True, scope="module")
def _ended() -> Iterator[None]:
    yield
    end_shared()


def on(cluster: ThreeNodes, *more: str) -> list[str]:
    return ["prompt", *WORDS, "--max-tokens", "12", *place(cluster), *more, "--json", QUESTION]


def place(cluster: ThreeNodes) -> list[str]:
    return ["--provider", "ray", "--set", f"ray.address={cluster.address}", "--log-level", "debug"]


def clean(cluster: ThreeNodes) -> bool:
    """The cluster is as it was: no actor, no placement group, no worker."""
    return not (cluster.actors() or cluster.groups() or cluster.workers("--boot-stdin"))


def placed(log: str) -> dict[str, str]:
    """The cluster node of each stage, by what is told of launches."""
    return dict(re.findall(r"(stage-\d) is placed on ([0-9a-f]{56})", log))


@pytest.mark.slow
def test_three_stages_on_three_nodes_say_what_local_processes_say(myelin, cluster):
    local = myelin.run("prompt", *WORDS, "--max-tokens", "12", "--json", QUESTION)
    assert local.code == 0, local.err
    done = myelin.run(*on(cluster))
    assert done.code == 0, done.err
    document = done.json()
    assert document["tokens"] == local.json()["tokens"]
    assert [stage["provider"] for stage in document["stages"]] == ["ray"] * 3
    assert len(set(placed(done.err).values())) == 3, "one stage on each node"
    assert clean(cluster)


@pytest.mark.slow
def test_a_small_node_gets_less_one_too_small_nothing_and_what_never_fits_is_explained(myelin, cluster):
    small = cluster.nodes[1].node_id
    less = myelin.run(*on(cluster))
    assert less.code == 0, less.err
    (stage,) = [stage for stage, node in placed(less.err).items() if node == small]
    layers = {each["node"]: each["layers"][1] - each["layers"][0] for each in less.json()["stages"]}
    assert layers[stage] < min(count for node, count in layers.items() if node != stage)

    around = myelin.run(*on(cluster, *HALF, "--set", f"ray.overhead_mb={SMALL // 10**6 - 1}"))
    assert around.code == 0, around.err
    nodes = Counter(placed(around.err).values())
    assert small not in nodes
    assert sorted(nodes.values()) == [1, 2]
    assert around.json()["tokens"] == less.json()["tokens"]

    never = myelin.run(*on(cluster, "--set", "ray.cpus=3"))
    assert never.code == 1
    assert "it takes a node with 3 CPUs" in never.err
    assert "of the cluster's 3 nodes" in never.err
    assert clean(cluster)


@pytest.fixture
def roomiest(cluster: ThreeNodes) -> Iterator[Any]:
    """A fourth node, which can be killed. It has the most memory, so that each run has a stage on it."""
    node = cluster.cluster.add_node(num_cpus=1, memory=2 * ROOMY, object_store_memory=STORE_BYTES)
    yield node
    if node in cluster.cluster.worker_nodes:
        cluster.cluster.remove_node(node)


@pytest.mark.slow
def test_a_raylet_that_is_killed_costs_a_pause_and_the_stage_comes_back_on_another_node(myelin, cluster, roomiest):
    serving = myelin.start("serve", *WORDS, *place(cluster), *HALF, "--rpc-bind", "127.0.0.1:0")
    address = wait_for_rpc(serving)
    before = ask(address, QUESTION, 12)
    places = cluster.places()
    assert len(set(places.values())) == 3
    lost = roomiest.node_id
    (stage,) = [stage for stage, node in places.items() if node == lost]
    roomiest.kill_raylet()
    # The actor dies a moment after its raylet: the first answer may well be quicker, the second one can't be.
    answers = [ask(address, QUESTION, 12)]
    deadline = time.monotonic() + 60
    while cluster.places().get(stage, lost) == lost and time.monotonic() < deadline:
        time.sleep(0.1)
    answers.append(ask(address, QUESTION, 12))
    assert {each["kind"] for each in (before, *answers)} == {"Done"}
    assert [each["deltas"] for each in answers] == [before["deltas"]] * 2
    moved = cluster.places()
    assert moved[stage] != lost
    assert {each: node for each, node in moved.items() if each != stage} == {
        each: node for each, node in places.items() if each != stage
    }, "the others stay where they are"
    serving.send_signal(signal.SIGINT)
    serving.wait(90)
    assert clean(cluster)


@pytest.mark.slow
def test_when_the_orchestrator_is_killed_nothing_stays_on_the_cluster_for_long(myelin, cluster):
    impatient = {"MYELIN_NODE_DEAD_MAN_S": "2"}
    serving = myelin.start(
        *("serve", *WORDS, *place(cluster), "--rpc-bind", "127.0.0.1:0", "--set", "ray.linger_s=2"), **impatient
    )
    wait_for_rpc(serving)
    assert len(cluster.places()) == 3
    serving.kill()
    deadline = time.monotonic() + 60
    while not clean(cluster) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert clean(cluster)


def asked(serving: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """How an answer of this orchestrator ends, and its words."""
    answer = ask(wait_for_rpc(serving), QUESTION, 12)
    return answer["kind"], answer["deltas"]


@pytest.mark.slow
def test_an_orchestrator_that_is_killed_and_restarted_adopts_the_actors(myelin, cluster):
    # Each node is full with its stage: what is adopted must not need its place a second time.
    words = ("serve", *WORDS, *place(cluster), "--rpc-bind", "127.0.0.1:0", "--run-id", "taken-up")
    first = myelin.start(*words)
    before = asked(first)
    actors, groups, workers = cluster.actor_ids(), cluster.groups(), cluster.workers("--boot-stdin")
    assert before[0] == "Done"
    assert len(actors) == len(groups) == len(workers) == 3
    first.kill()
    first.wait(60)
    second = myelin.start(*words)
    assert asked(second) == before
    assert cluster.actor_ids() == actors, "the same actors, and no other"
    assert cluster.groups() == groups
    assert cluster.workers("--boot-stdin") == workers, "the same processes"

    down = myelin.run("down", "taken-up")  # the ledger knows where
    assert down.code == 0, down.err
    assert "taken-up: ended by its orchestrator" in down.out
    assert clean(cluster), "as soon as it has said so"
    assert not any(map(psutil.pid_exists, workers)), "not even as orphans"
    assert second.wait(90) == 0


@pytest.mark.slow
def test_one_that_is_killed_while_it_starts_stages_is_restarted_with_what_has_begun(myelin, cluster):
    words = ("serve", *WORDS, *place(cluster), "--rpc-bind", "127.0.0.1:0", "--run-id", "early")
    first = myelin.start(*words)
    deadline = time.monotonic() + 60
    while not cluster.groups() and time.monotonic() < deadline:
        time.sleep(0.01)
    first.kill()
    first.wait(60)
    assert cluster.groups()
    second = myelin.start(*words)
    assert asked(second)[0] == "Done"
    assert len(cluster.actors()) == len(cluster.groups()) == len(cluster.workers("--boot-stdin")) == 3
    second.send_signal(signal.SIGINT)
    second.wait(90)
    assert clean(cluster)


@pytest.mark.slow
def test_down_without_an_orchestrator_leaves_no_actor_and_no_placement_group(myelin, cluster):
    serving = myelin.start("serve", *WORDS, *place(cluster), "--rpc-bind", "127.0.0.1:0", "--run-id", "orphan")
    assert asked(serving)[0] == "Done"
    serving.kill()
    serving.wait(60)
    workers = cluster.workers("--boot-stdin")
    left = len(cluster.actors()), len(cluster.groups()), len(workers)
    assert left == (3, 3, 3), "stages outlive their orchestrator for a while"
    down = myelin.run("down", "orphan")  # the ledger knows where
    assert down.code == 0, down.err
    assert "(3 nodes)" in down.out
    assert clean(cluster), "as soon as it has said so"
    assert not any(map(psutil.pid_exists, workers)), "not even as orphans"
