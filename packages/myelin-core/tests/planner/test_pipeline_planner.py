"""The default planner: properties over unequal nodes, plans by hand, and errors that say what would fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.builtins import planner_pipeline
from myelin.engine.contract import Sample
from myelin.errors import PlanError
from myelin.model.architecture import Hyperparameters
from myelin.model.facts import ModelFacts
from myelin.planner import cost
from myelin.planner.pipeline import plan_pipeline
from myelin.planner.run_plan import EdgeKind, NodeCapacity, PlanRequest, RunPlan
from myelin.transport.contract import ORCHESTRATOR
from myelin.values import NodeId, SequenceId
from myelin.worker.segments import pack_samples

MakeModel = Callable[..., tuple[ModelFacts, Hyperparameters]]


def ask(model: tuple[ModelFacts, Hyperparameters], stages: int = 2, *, memory: int = 0, **more: object) -> PlanRequest:
    nodes = tuple(NodeCapacity(NodeId(f"stage-{index}"), memory_bytes=memory) for index in range(stages))
    return PlanRequest(*model, model_uri="toy.gguf", **({"nodes": nodes} | more))  # type: ignore[arg-type]  # test helper


def plan_or_error(request: PlanRequest) -> RunPlan | PlanError:
    try:
        return plan_pipeline(request)
    except PlanError as error:
        return error


nodes_of_any_kind = st.lists(
    st.tuples(st.sampled_from([0, 60_000, 90_000, 150_000, 300_000]), st.sampled_from([1.0, 2.0, 8.0])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=7), nodes_of_any_kind, st.booleans())
def test_no_other_split_is_better(
    make_model: MakeModel, rows: list[int], kinds: list[tuple[int, float]], tied: bool
) -> None:
    nodes = tuple(NodeCapacity(NodeId(f"n{i}"), memory, speed) for i, (memory, speed) in enumerate(kinds))
    request = PlanRequest(*make_model(rows, tied=tied), "toy.gguf", nodes, max_context=16, max_batch_tokens=8)

    def bottleneck(split: tuple[int, ...]) -> float | None:
        try:
            plan = plan_pipeline(PlanRequest(*make_model(rows, tied=tied), "toy.gguf", nodes, split, 16, 4, 8))
        except PlanError:
            return None
        layout = cost.weight_layout(request.facts, request.parameters)
        return max(
            cost.bytes_read_per_token(layout, *s.layers) / n.bandwidth for s, n in zip(plan.stages, nodes, strict=True)
        )

    splits = [
        tuple(b - a for a, b in zip((0, *cuts), (*cuts, len(rows)), strict=True))
        for cuts in combinations(range(1, len(rows)), len(nodes) - 1)
    ]
    possible = [value for value in map(bottleneck, splits) if value is not None]
    plan = plan_or_error(request)
    if isinstance(plan, PlanError):
        assert not possible
        assert plan.reason in ("too-little-memory", "too-many-stages")
        assert plan.hint
        return
    assert bottleneck(tuple(end - first for first, end in (stage.layers for stage in plan.stages))) == min(possible)
    assert all(not n.memory_bytes or s.memory_bytes <= n.memory_bytes for s, n in zip(plan.stages, nodes, strict=True))
    assert [stage.layers[0] for stage in plan.stages[1:]] == [stage.layers[1] for stage in plan.stages[:-1]]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.integers(20_000, 200_000))
def test_the_hint_of_too_little_memory_holds(make_model: MakeModel, layers: int, stages: int, memory: int) -> None:
    """Whatever the error recommends really fits."""
    stages = min(stages, layers)
    model = make_model([40] * layers)
    request = ask(model, stages, memory=memory, max_context=128, max_batch_tokens=8)
    error = plan_or_error(request)
    if not isinstance(error, PlanError):
        return
    assert error.reason == "too-little-memory"
    if more := re.search(r"use (\d+) nodes? of", error.hint):
        plan_pipeline(ask(model, int(more[1]), memory=memory, max_context=128, max_batch_tokens=8))
    if smaller := re.search(r"context of at most ([\d,]+)", error.hint):
        context = int(smaller[1].replace(",", ""))
        plan_pipeline(ask(model, stages, memory=memory, max_context=context, max_batch_tokens=8))
        with pytest.raises(PlanError):
            plan_pipeline(ask(model, stages, memory=memory, max_context=context + 1, max_batch_tokens=8))


def test_a_heavy_output_head_leaves_the_tail_fewer_layers(make_model: MakeModel) -> None:
    plan = plan_pipeline(ask(make_model([16] * 12, vocab=64)))  # the head's matrix weighs as much as 4 layers
    assert [stage.layers for stage in plan.stages] == [(0, 8), (8, 12)]


def test_a_fast_node_gets_more(make_model: MakeModel) -> None:
    nodes = (NodeCapacity(NodeId("slow"), bandwidth=1.0), NodeCapacity(NodeId("fast"), bandwidth=3.0))
    plan = plan_pipeline(ask(make_model([16] * 12, vocab=1), nodes=nodes))
    assert plan.stages[0].layers == (0, 3)


def test_edges_and_record_sizes(make_model: MakeModel) -> None:
    plan = plan_pipeline(ask(make_model(), 3, max_context=100, max_sequences=2, max_batch_tokens=10))
    assert [(edge.kind, edge.source, edge.target) for edge in plan.edges] == [
        (EdgeKind.TOKEN_IN, str(ORCHESTRATOR), "stage-0"),
        (EdgeKind.ACTIVATION, "stage-0", "stage-1"),
        (EdgeKind.ACTIVATION, "stage-1", "stage-2"),
        (EdgeKind.TOKEN_OUT, "stage-2", "stage-0"),
    ]
    assert plan.edges[1].token_bytes == 128
    assert plan.edges[1].record_bytes == cost.record_bytes(10, 128, segments=2)
    assert plan.edges[3].token_bytes == len(pack_samples([Sample(SequenceId(1), 2, 3, -0.5)])) - len(pack_samples([]))
    assert [edge.kind for edge in plan_pipeline(ask(make_model(), 1)).edges] == [EdgeKind.TOKEN_IN]


def test_a_split_by_hand_is_kept(make_model: MakeModel) -> None:
    plan = plan_pipeline(ask(make_model(), 2, split=(1, 3)))
    assert [stage.layers for stage in plan.stages] == [(0, 1), (1, 4)]
    assert plan.planner == "pipeline"


def test_the_builtin_plans(make_model: MakeModel) -> None:
    request = ask(make_model(), 2)
    assert planner_pipeline.myelin_plan(request) == plan_pipeline(request)


@pytest.mark.parametrize(
    ("stages", "more", "reason", "words"),
    [
        (0, {}, "no-stages", r"0 stages"),
        (5, {}, "too-many-stages", r"5 stages .* 4 layers"),
        (2, {"split": (1, 2)}, "bad-split", r"adds up to 3 layers.* 4"),
        (2, {"split": (4, 0)}, "bad-split", r"stage of 0"),
        (2, {"split": (5, -1)}, "bad-split", r"stage of -1"),
        (2, {"split": (1, 1, 2)}, "bad-split", r"names 3 stages, but there are 2"),
        (2, {"max_context": 0}, "bad-limit", r"context of 0"),
        (2, {"memory": 1000}, "too-little-memory", r"stage-\d needs .* has 1000 B"),
        (2, {"memory": 1000, "split": (2, 2)}, "too-little-memory", r"layers 0 to 1 need"),
    ],
)
def test_errors_say_what_is_wrong_and_what_would_do(
    make_model: MakeModel, stages: int, more: dict[str, object], reason: str, words: str
) -> None:
    with pytest.raises(PlanError, match=words) as raised:
        plan_pipeline(ask(make_model(), stages, **more))  # type: ignore[arg-type]  # a table of keyword arguments
    assert raised.value.reason == reason
    assert raised.value.hint


def test_an_illegal_cut_is_named(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myelin.planner.pipeline.legal_cuts", lambda parameters: (2,))
    with pytest.raises(PlanError, match="before layer 1") as raised:
        plan_pipeline(ask(make_model(), 2, split=(1, 3)))
    assert raised.value.reason == "illegal-cut"
    assert "2" in raised.value.hint
    with pytest.raises(PlanError, match="1 place"):
        plan_pipeline(ask(make_model(), 3))


def test_a_context_beyond_the_models_is_noted(make_model: MakeModel) -> None:
    assert "2048" in plan_pipeline(ask(make_model(), 2, max_context=5000)).notes[0]
    assert plan_pipeline(ask(make_model(), 2, max_context=2048)).notes == ()
