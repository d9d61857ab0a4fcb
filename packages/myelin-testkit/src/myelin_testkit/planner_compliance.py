"""What every planner must do, as a test class: subclass :class:`PlannerCompliance` in a test module.

::

    class TestMyPlanner(PlannerCompliance):
        def plan(self, request: PlanRequest) -> RunPlan | None:
            return myelin_plan(request)

A planner may decline what it doesn't want to plan (None), though not everything; what it does plan must be whole, legal
and within the memory of the nodes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from myelin.model.architecture import Hyperparameters, describe, legal_cuts, stage_tensors
from myelin.model.facts import ModelFacts
from myelin.model.gguf import read_facts
from myelin.model.local import LocalFile
from myelin.plugin import EdgeKind, NodeCapacity, NodeId, PlanError, PlanRequest, RunPlan, StagePlan
from myelin_testkit.synthetic import Recipe, write_model

RECIPES = {
    "llama": Recipe("llama", n_layers=6),
    "llama-tied": Recipe("llama", n_layers=5, tied=True, rope_freqs=True),
    "gemma3": Recipe("gemma3", n_layers=6, n_kv_heads=1, sliding_window=9, window_pattern=2, tied=True),
}
"""Models to plan: with a separate output head; with a shared one and a tensor that every stage needs; with windows."""

ORCHESTRATOR = "orchestrator"


def nodes(*memory_bytes: int, bandwidths: Sequence[float] = ()) -> tuple[NodeCapacity, ...]:
    """Nodes of so much memory each; 0 is unknown."""
    speeds = tuple(bandwidths) or (1.0,) * len(memory_bytes)
    pairs = enumerate(zip(memory_bytes, speeds, strict=True))
    return tuple(NodeCapacity(NodeId(f"stage-{index}"), memory, speed) for index, (memory, speed) in pairs)


@cache
def described(recipe: str) -> tuple[ModelFacts, Hyperparameters]:
    """A model of :data:`RECIPES`, of which nothing but the header is needed."""
    with TemporaryDirectory() as folder:
        files = [LocalFile(path) for path in write_model(RECIPES[recipe], Path(folder) / "model.gguf")]
        facts = read_facts(files)
        for file in files:
            file.close()
    return facts, describe(facts)


class PlannerCompliance(ABC):
    """Subclass it as ``Test…`` and say how a plan is made."""

    @abstractmethod
    def plan(self, request: PlanRequest) -> RunPlan | None:
        """What the planner's hook answers."""

    @pytest.fixture(params=tuple(RECIPES))
    def model(self, request: pytest.FixtureRequest) -> tuple[ModelFacts, Hyperparameters]:
        """Each model of :data:`RECIPES` in turn."""
        return described(request.param)

    @pytest.fixture
    def ask(self, model: tuple[ModelFacts, Hyperparameters]) -> Any:
        """Makes a request for the model: ``ask(nodes(0, 0), split=(2, 4))``."""

        def request(some: tuple[NodeCapacity, ...], **more: Any) -> PlanRequest:
            limits = {"max_context": 128, "max_sequences": 2, "max_batch_tokens": 16}
            return PlanRequest(*model, model_uri="model.gguf", nodes=some, **(limits | more))

        return request

    def planned(self, request: PlanRequest) -> RunPlan:
        """The plan, or a skipped test where it is declined."""
        plan = self.plan(request)
        if plan is None:
            pytest.skip("the planner declines this request")
        return plan

    def test_a_simple_request_is_planned(self, ask: Any) -> None:
        plans = [self.plan(ask(nodes(*(0,) * count))) for count in (1, 2, 3)]
        assert any(plan is not None for plan in plans), "a planner that declines everything is none"

    @pytest.mark.parametrize("count", [1, 2, 3, 5])
    def test_every_layer_is_in_one_stage_in_order(self, ask: Any, count: int) -> None:
        request = ask(nodes(*(0,) * count))
        plan = self.planned(request)
        assert [stage.index for stage in plan.stages] == list(range(count))
        assert [stage.node for stage in plan.stages] == [node.node for node in request.nodes], "one stage a node"
        ends = [0]
        for stage in plan.stages:
            first, end = stage.layers
            assert first == ends[-1], "stages follow one another"
            assert end > first, "every stage has a layer"
            assert stage.slice.n_layers == request.parameters.n_layers
            ends.append(end)
        assert ends[-1] == request.parameters.n_layers
        assert set(ends[1:-1]) <= set(legal_cuts(request.parameters)), "cuts only where they are legal"

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_a_stage_counts_what_it_must_hold(self, ask: Any, count: int) -> None:
        request = ask(nodes(*(0,) * count))
        for stage in self.planned(request).stages:
            names = stage_tensors(request.facts, request.parameters, *stage.layers)
            assert stage.tensor_count == len(names)
            assert stage.weight_bytes == sum(request.facts.tensors[name].nbytes for name in names), (
                "the embedding and the output head are counted where they live"
            )
            assert stage.kv_bytes >= _kv_bytes(request, stage)
            assert stage.scratch_bytes > 0
            assert stage.memory_bytes == stage.weight_bytes + stage.kv_bytes + stage.scratch_bytes

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_edges_lead_from_the_orchestrator_through_all_stages_and_back(self, ask: Any, count: int) -> None:
        request = ask(nodes(*(0,) * count))
        plan = self.planned(request)
        names = [stage.node for stage in plan.stages]
        expected: list[tuple[EdgeKind, str, str]] = [(EdgeKind.TOKEN_IN, ORCHESTRATOR, names[0])]
        expected += [(EdgeKind.ACTIVATION, *pair) for pair in pairwise(names)]
        if count > 1:  # a lone stage hands its tokens over within itself
            expected.append((EdgeKind.TOKEN_OUT, names[-1], names[0]))
        assert [(edge.kind, edge.source, edge.target) for edge in plan.edges] == expected
        for edge in plan.edges:
            rows = 1
            if edge.kind is EdgeKind.ACTIVATION:
                assert edge.token_bytes == 4 * request.parameters.width, "the residual stream is float32"
                rows = request.max_batch_tokens
            assert edge.token_bytes > 0
            assert edge.record_bytes > rows * edge.token_bytes, "a record has a header besides its rows"

    def test_the_limits_are_those_of_the_request(self, ask: Any) -> None:
        request = ask(nodes(0, 0), max_context=77, max_sequences=3, max_batch_tokens=9)
        plan = self.planned(request)
        assert (plan.model_uri, plan.max_context, plan.max_sequences, plan.max_batch_tokens) == (
            "model.gguf",
            77,
            3,
            9,
        )
        assert plan.planner, "a plan says whose it is"

    def test_the_same_request_gives_the_same_plan(self, ask: Any) -> None:
        request = ask(nodes(0, 0, 0, bandwidths=(1.0, 2.0, 1.0)))
        tensors = dict(request.facts.tensors)
        plan = self.planned(request)
        assert self.plan(replace(request)) == plan
        assert dict(request.facts.tensors) == tensors, "planning changes nothing"

    def test_a_split_by_hand_is_kept(self, ask: Any) -> None:
        request = ask(nodes(0, 0, 0))
        cuts = legal_cuts(request.parameters)
        ends = (cuts[0], cuts[-1], request.parameters.n_layers)
        split = tuple(end - first for first, end in pairwise((0, *ends)))
        plan = self.planned(replace(request, split=split))
        assert tuple(end - first for first, end in (stage.layers for stage in plan.stages)) == split

    def test_memory_is_respected(self, ask: Any) -> None:
        """Of two nodes, one gets just the memory of a stage of one layer; it may be given no more."""
        free = self.planned(ask(nodes(0, 0)))
        smallest = min(self._of_split(ask, free), key=lambda stage: stage.memory_bytes)
        request = ask(nodes(0, smallest.memory_bytes))
        plan = self.planned(request)
        for stage, node in zip(plan.stages, request.nodes, strict=True):
            assert not node.memory_bytes or stage.memory_bytes <= node.memory_bytes

    @pytest.mark.parametrize(
        ("some", "more"),
        [
            pytest.param((1 << 10, 1 << 10), {}, id="too little memory"),
            pytest.param((0,) * 99, {}, id="more stages than layers"),
            pytest.param((0, 0), {"split": (1, 1)}, id="a split that does not add up"),
            pytest.param((0, 0), {"split": (1, 1, 1)}, id="a split of another length"),
            pytest.param((), {}, id="no node"),
        ],
    )
    def test_what_cannot_be_is_an_error_that_says_what_would_fit(
        self, ask: Any, some: tuple[int, ...], more: dict[str, Any]
    ) -> None:
        error: PlanError | None = None
        try:
            plan = self.plan(ask(nodes(*some), **more))
        except PlanError as raised:
            error, plan = raised, None
        assert plan is None, f"this can't be planned, and yet there is a plan: {plan}"
        if error is not None:  # else it was declined
            assert error.message
            assert error.hint, "the error says what would fit"
            assert error.reason

    def _of_split(self, ask: Any, plan: RunPlan) -> list[StagePlan]:
        """The last stage of the plan, and that of the split that gives it the fewest layers."""
        request = ask(nodes(0, 0))
        n_layers, last_cut = request.parameters.n_layers, legal_cuts(request.parameters)[-1]
        smallest = self.plan(replace(request, split=(last_cut, n_layers - last_cut)))
        return [plan.stages[-1], *([smallest.stages[-1]] if smallest else [])]


def _kv_bytes(request: PlanRequest, stage: StagePlan) -> int:
    """Keys and values of the whole context for every sequence and layer: engines keep them for windowed layers too."""
    first, end = stage.layers
    parameters = request.parameters
    values = parameters.n_kv_heads * (parameters.head_dim + parameters.value_dim)
    positions = request.max_context * request.max_sequences
    return math.ceil((end - first) * positions * values * request.kv_bytes_per_value)
