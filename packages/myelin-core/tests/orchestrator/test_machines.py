"""Stages over unequal machines: properties of the arrangements, plans that go around what is too small, whole runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.cluster.executor import Executor
from myelin.cluster.provider import Lease, Need, Offer
from myelin.cluster.spec import in_turn
from myelin.errors import PlanError, ProviderError
from myelin.orchestrator.bootstrap import planned, running
from myelin.orchestrator.machines import (
    MOST_ARRANGEMENTS,
    arrangements,
    capacities,
    node_names,
    plan_on,
    read_offers,
)
from myelin.orchestrator.planning import engine_of, open_model, planner_of
from myelin.planner.run_plan import NodeCapacity, RunPlan
from myelin.values import NodeId
from myelin_testkit.memory_provider import Fail

if TYPE_CHECKING:
    from conftest import Toy


def offer(name: str, memory: int = 0, **more: object) -> Offer:
    return Offer(name, "memory", name, memory, **more)  # type: ignore[arg-type]  # test helper


SOME = st.lists(
    st.tuples(st.sampled_from([0, 1_000, 5_000, 80_000]), st.integers(0, 3), st.booleans()), min_size=1, max_size=5
).map(lambda kinds: [offer(f"m{i}", memory, room=room, shared=own) for i, (memory, room, own) in enumerate(kinds)])


@settings(deadline=None)
@given(SOME, st.integers(1, 7), st.booleans())
def test_arrangements_keep_to_the_room_and_keep_neighbours_together(
    offers: list[Offer], stages: int, packed: bool
) -> None:
    found = list(arrangements(offers, stages, packed=packed))
    assert len({tuple(each.id for each in one) for one in found}) == len(found), "none comes twice"
    room = sum(each.room or stages for each in offers)
    assert bool(found) == (room >= stages), "there is one exactly where there is room"
    for arrangement in found:
        counts = Counter(each.id for each in arrangement)
        assert sum(counts.values()) == stages
        assert all(not each.room or counts[each.id] <= each.room for each in arrangement)
        changes = sum(a.id != b.id for a, b in pairwise(arrangement))
        assert changes == len(counts) - 1, "stages of one machine are neighbours"
    if found:
        sizes = [len({each.id for each in one}) for one in found]
        assert sizes == sorted(sizes, reverse=not packed), "many machines first, or few where packed"


@settings(deadline=None)
@given(SOME, st.integers(1, 6))
def test_no_machine_gives_more_memory_than_it_has(offers: list[Offer], stages: int) -> None:
    for arrangement in arrangements(offers, stages):
        nodes = capacities(arrangement)
        assert [node.node for node in nodes] == list(node_names(stages))
        for machine in {each.id: each for each in arrangement}.values():
            given = [n.memory_bytes for n, o in zip(nodes, arrangement, strict=True) if o.id == machine.id]
            if not machine.memory_bytes:
                assert set(given) == {0}, "unknown stays unknown"
            elif machine.shared:
                assert sum(given) <= machine.memory_bytes
            else:
                assert set(given) == {machine.memory_bytes}


@pytest.mark.parametrize(
    ("offers", "stages", "packed", "first"),
    [
        ([offer("a"), offer("b"), offer("c")], 3, False, "abc"),
        ([offer("a"), offer("b"), offer("c")], 2, False, "ab"),
        ([offer("a"), offer("b"), offer("c")], 2, True, "aa"),
        ([offer("a"), offer("b")], 5, False, "aaabb"),
        ([offer("a", room=1), offer("b"), offer("c", room=1)], 5, False, "abbbc"),
        ([offer("a", room=1), offer("b", room=2)], 3, True, "abb"),
        ([offer("here", 9)], 3, False, ("here", "here", "here")),
    ],
)
def test_what_is_tried_first(offers: list[Offer], stages: int, packed: bool, first: Sequence[str]) -> None:
    arrangement = next(arrangements(offers, stages, packed=packed))
    assert [each.id for each in arrangement] == list(first)


def test_memory_decides_how_many_stages_a_machine_gets() -> None:
    found = [[each.id for each in one] for one in arrangements([offer("a", 24), offer("b", 4)], 4)]
    assert found[0] == ["a", "a", "b", "b"]
    assert ["a", "a", "a", "b"] in found


def test_a_small_machine_is_tried_between_large_ones() -> None:
    found = [[each.id for each in one] for one in arrangements([offer("a", 9), offer("b", 8), offer("tiny", 1)], 3)]
    assert found[0] == ["a", "b", "tiny"]
    assert found[1] == ["a", "tiny", "b"]


def test_speeds_count_where_all_are_known() -> None:
    fast, slow, unknown = offer("f", bandwidth=9e11), offer("s", bandwidth=3e11), offer("u")
    assert [node.bandwidth for node in capacities([fast, slow])] == [9e11, 3e11]
    assert [node.bandwidth for node in capacities([fast, unknown])] == [1.0, 1.0]


class Toys:
    """The toy model's planner."""

    def __init__(self, toy: Toy, stages: int) -> None:
        model = open_model(toy.registry.model_source(toy.request.model_uri, toy.request.source_options))
        request = toy.ask(stages=stages)
        self.stages = stages
        self.engine = engine_of(request, model, toy.registry)
        self.plan = planner_of(request, model, toy.registry)
        self.even = self.plan(tuple(NodeCapacity(name) for name in node_names(stages)))
        self.largest = max(stage.memory_bytes for stage in self.even.stages)
        slow = (NodeCapacity(NodeId("x")), NodeCapacity(NodeId("y"), bandwidth=1e-9))
        self.one_layer = self.plan(slow).stages[1].memory_bytes
        """What the last stage needs with one layer."""
        self.asked = 0

    def counted(self, nodes: tuple[NodeCapacity, ...]) -> RunPlan:
        self.asked += 1
        return self.plan(nodes)


def layers(plan: RunPlan) -> list[int]:
    return [end - first for first, end in (stage.layers for stage in plan.stages)]


def test_a_smaller_machine_gets_fewer_layers(toy: Toy) -> None:
    toys = Toys(toy, 2)
    offers = [offer("big", 100 * toys.largest), offer("small", toys.one_layer)]
    plan, placement = plan_on(offers, 2, toys.plan, packed=False)
    assert [each.id for each in placement] == ["big", "small"]
    assert layers(plan)[1] == 1
    assert plan.stages[1].memory_bytes <= toys.one_layer


def test_a_machine_that_holds_nothing_is_gone_around(toy: Toy) -> None:
    toys = Toys(toy, 3)
    offers = [offer("a", 10 * toys.largest), offer("tiny", 1_000), offer("c", 20 * toys.largest)]
    _, placement = plan_on(offers, 3, toys.plan, packed=False)
    assert Counter(each.id for each in placement) in (Counter(a=1, c=2), Counter(a=2, c=1))


def test_what_fits_nowhere_says_what_is_offered(toy: Toy) -> None:
    toys = Toys(toy, 2)
    with pytest.raises(PlanError, match="does not fit 2 stages") as caught:
        plan_on([offer("a", 2_000), offer("b", 1_000)], 2, toys.counted, packed=False)
    assert caught.value.reason == "too-little-memory"
    assert "offered: 1.95 KiB, 1000 B" in caught.value.hint
    assert toys.asked <= MOST_ARRANGEMENTS


def test_a_request_that_is_wrong_in_itself_is_not_tried_again(toy: Toy) -> None:
    toys = Toys(toy, 2)
    with pytest.raises(PlanError, match="5 stages"):
        plan_on([offer(str(number), 1 << 30) for number in range(9)], 5, toys.counted, packed=False)
    assert toys.asked == 1


def test_too_little_room_leaves_it_to_what_is_offered_later(toy: Toy) -> None:
    toys = Toys(toy, 3)
    plan, placement = plan_on([offer("a", 1, room=1)], 3, toys.plan, packed=False)
    assert placement == ()
    assert layers(plan) == layers(toys.even)


class Shop:
    """A provider whose machines cost something; notes what it was asked."""

    def __init__(self, *offers: Offer) -> None:
        self.stock = offers
        self.asked: list[Need] = []

    async def offers(self, need: Need) -> Sequence[Offer]:
        self.asked.append(need)
        return [each for each in self.stock if each.memory_bytes >= need.memory_bytes]


async def test_what_costs_money_is_sought_at_the_size_of_an_even_split(toy: Toy) -> None:
    toys = Toys(toy, 2)
    cheap = offer("cheap", toys.largest - 1, dollars_per_hour=0.1, room=1)
    better = [offer(name, 2 * toys.largest, dollars_per_hour=1.0, room=1) for name in "ab"]
    shop = Shop(cheap, *better)
    assert await read_offers(shop, "cpu", toys.plan, 2) == tuple(better)  # type: ignore[arg-type]  # as far as it goes
    assert [need.memory_bytes for need in shop.asked] == [0, toys.largest]
    few = Shop(cheap, better[0])
    assert await read_offers(few, "cpu", toys.plan, 2) == (cheap, better[0])


async def test_what_is_free_is_taken_as_it_is(toy: Toy) -> None:
    toys = Toys(toy, 2)
    shop = Shop(offer("small", 5), offer("big", 1 << 40))
    assert await read_offers(shop, "cpu", toys.plan, 2) == shop.stock
    assert len(shop.asked) == 1


async def test_each_stage_goes_to_the_machine_that_it_was_planned_for(toy: Toy) -> None:
    toy.provider.cloud.offers = [offer("small", Toys(toy, 2).one_layer), offer("large", 10_000_000)]
    async with running(toy.request, toy.registry, toy.recorder) as pipeline:
        counts = {stage.node: stage.layers[1] - stage.layers[0] for stage in pipeline.stages}
        leases = {lease.key.node: lease.offer for lease in await toy.provider.leases()}
    small = [node for node, machine in leases.items() if machine == "small"]
    assert sorted(leases.values()) == ["large", "small"]
    assert counts[small[0]] < max(counts.values()), "the smaller machine has fewer layers"


async def test_one_machine_is_shared_by_all_stages(toy: Toy) -> None:
    toys = Toys(toy, 2)
    toy.provider.cloud.offers = [offer("here", 2 * toys.largest)]
    async with running(toy.request, toy.registry, toy.recorder) as pipeline:
        assert len(pipeline.stages) == 2
    toy.provider.cloud.offers = [offer("here", toys.largest)]
    with pytest.raises(PlanError, match="does not fit"):
        async with running(toy.request, toy.registry, toy.recorder):
            pytest.fail("it must not come up")
    assert len(toy.provider.started) == 2, "nothing was started the second time"
    assert toy.provider.closed


async def test_a_plan_alone_may_be_larger_than_what_is_offered(toy: Toy) -> None:
    toy.provider.cloud.offers = [offer("here", 5_000)]
    run = await planned(toy.request, toy.registry, toy.recorder)
    assert len(run.plan.stages) == 2
    assert any("could not start it now" in note for note in run.plan.notes)
    assert toy.provider.closed
    assert toy.provider.started == []


async def test_offers_that_cannot_be_read_do_not_hinder_planning(toy: Toy) -> None:
    toy.provider.cloud.faults.next("offers", Fail(ProviderError("not now", "later")))
    async with running(toy.request, toy.registry, toy.recorder) as pipeline:
        assert len(pipeline.stages) == 2


async def test_a_provider_that_cannot_be_made_is_told_of_in_its_own_phase(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ProviderError("no key", "give one", reason="no-key")

    monkeypatch.setattr(toy.registry, "provider", broken)
    with pytest.raises(ProviderError, match="no key"):
        async with running(toy.request, toy.registry, toy.recorder):
            pytest.fail("it must not come up")
    assert "run_plan" in toy.recorder.ended()
    assert toy.recorder.ended("failed") == ["provisioner"]


@given(st.lists(st.sampled_from("abcd"), unique=True), st.sampled_from(["", "a", "d", "x"]))
def test_the_offer_that_was_planned_for_comes_first(names: list[str], wanted: str) -> None:
    offers = [offer(name) for name in names]
    turned = in_turn(offers, Need(NodeId("n"), 0, "cpu", offer=wanted))
    if wanted in names:
        assert turned[0].id == wanted
    assert [each.id for each in turned if each.id != wanted] == [name for name in names if name != wanted]


class Bare:
    """A provider that has nothing, and may say what is lacking."""

    async def offers(self, need: Need) -> Sequence[Offer]:
        return ()

    async def leases(self) -> Sequence[Lease]:
        return ()


async def test_what_is_lacking_is_said(toy: Toy, tmp_path: Path) -> None:
    from pydantic import SecretStr

    from myelin.cluster.spec import NodeSpec

    spec = NodeSpec(toy.request.run, NodeId("stage-0"), 5 << 20, "cpu", "memory", SecretStr("s"))
    with pytest.raises(ProviderError, match=r"nothing for stage-0, which needs 5 MiB$"):
        await Executor(Bare(), "bare").launch(spec)  # type: ignore[arg-type]  # it is asked for offers alone
    telling = Bare()
    telling.lacking = lambda need: f"it takes a moon for {need.node}"
    with pytest.raises(ProviderError, match=r"5 MiB: it takes a moon for stage-0$"):
        await Executor(telling, "bare").launch(replace(spec, offer="moon"))
