"""The default planner: one stage a node, in order, so that every stage takes about as long as any other.

The time of a stage is what it must stream from memory for a token, over its node's bandwidth. Memory limits are kept
exactly. Where the request can't be met, the error says what would fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from myelin.errors import PlanError
from myelin.model.architecture import legal_cuts, stage_tensors
from myelin.model.shard import StageSlice
from myelin.planner import cost
from myelin.planner.partition import balanced_partition, smallest_bottleneck
from myelin.planner.run_plan import EdgeKind, EdgePlan, NodeCapacity, PlanRequest, RunPlan, StagePlan
from myelin.planner.texts import count, readable_bytes

PLANNER_NAME = "pipeline"
_ORCHESTRATOR = "orchestrator"
"""The orchestrator's name on an edge; the same as :data:`myelin.transport.contract.ORCHESTRATOR`, which tests hold it
to."""


def plan_pipeline(request: PlanRequest) -> RunPlan:
    """Plan a chain of stages, one for each node of ``request``. Pure: the same request gives the same plan.

    Raises:
        PlanError: No node, too many stages, a split that doesn't add up or cuts where it may not, too little memory.
    """
    arithmetic = _Arithmetic(request, cost.weight_layout(request.facts, request.parameters))
    _check_counts(request)
    sizes = _checked_split(request) if request.split else _balanced_split(request, arithmetic)
    stages = _stages(request, arithmetic, sizes)
    return RunPlan(
        model_uri=request.model_uri,
        stages=stages,
        edges=_edges(request, stages),
        max_context=request.max_context,
        max_sequences=request.max_sequences,
        max_batch_tokens=request.max_batch_tokens,
        planner=PLANNER_NAME,
        notes=_notes(request),
    )


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """The costs of any stage of one request."""

    request: PlanRequest
    layout: cost.WeightLayout

    def kv_bytes(self, first: int, end: int) -> int:
        return cost.stage_kv_bytes(
            self.request.parameters,
            first,
            end,
            max_context=self.request.max_context,
            max_sequences=self.request.max_sequences,
            bytes_per_value=self.request.kv_bytes_per_value,
        )

    def scratch_bytes(self, first: int, end: int) -> int:
        return cost.stage_scratch_bytes(
            self.request.parameters,
            first,
            end,
            max_context=self.request.max_context,
            max_sequences=self.request.max_sequences,
            max_batch_tokens=self.request.max_batch_tokens,
        )

    def memory_bytes(self, first: int, end: int) -> int:
        weights = cost.stage_weight_bytes(self.layout, first, end)
        return weights + self.kv_bytes(first, end) + self.scratch_bytes(first, end)

    def overload(self, node: NodeCapacity, first: int, end: int) -> float:
        """Needed over available memory: above 1 it does not fit; 0 where the node's memory isn't known."""
        return self.memory_bytes(first, end) / node.memory_bytes if node.memory_bytes else 0.0

    def seconds(self, node: NodeCapacity, first: int, end: int) -> float:
        """Time of a token, or infinity where the stage doesn't fit the node."""
        if node.memory_bytes and self.memory_bytes(first, end) > node.memory_bytes:
            return math.inf
        return cost.stage_seconds(cost.bytes_read_per_token(self.layout, first, end), node.bandwidth)


def _check_counts(request: PlanRequest) -> None:
    stages, n_layers = len(request.nodes), request.parameters.n_layers
    most = len(legal_cuts(request.parameters)) + 1
    if stages < 1:
        raise PlanError(
            "a model cannot be split into 0 stages",
            f"ask for 1 to {most} stages; the model has {count(n_layers, 'layer')}",
            reason="no-stages",
        )
    if stages > most:
        raise PlanError(
            f"{count(stages, 'stage')} are too many: the model has {count(n_layers, 'layer')}"
            + ("" if most == n_layers else f", which may be cut in {count(most - 1, 'place')}"),
            f"ask for at most {count(most, 'stage')}",
            reason="too-many-stages",
        )
    if min(request.max_context, request.max_sequences, request.max_batch_tokens) < 1:
        raise PlanError(
            f"a context of {request.max_context}, {count(request.max_sequences, 'sequence')} and a batch of "
            f"{count(request.max_batch_tokens, 'token')} cannot be served",
            "each must be at least 1",
            reason="bad-limit",
        )
    for node in request.nodes:
        if not (node.bandwidth > 0 and math.isfinite(node.bandwidth)):
            raise PlanError(
                f"node {node.node} has a bandwidth of {node.bandwidth}", "give it a positive one", reason="bad-limit"
            )


def _checked_split(request: PlanRequest) -> tuple[int, ...]:
    split, n_layers = request.split, request.parameters.n_layers
    text = ",".join(str(layers) for layers in split)
    if len(split) != len(request.nodes):
        raise PlanError(
            f"the split {text} names {count(len(split), 'stage')}, but there are {count(len(request.nodes), 'stage')}",
            "give a number of layers for each stage",
            reason="bad-split",
        )
    if min(split) < 1:
        raise PlanError(
            f"the split {text} has a stage of {min(split)} layers", "each stage needs at least 1", reason="bad-split"
        )
    if sum(split) != n_layers:
        raise PlanError(
            f"the split {text} adds up to {count(sum(split), 'layer')}, but the model has {n_layers}",
            f"make it add up to {n_layers}",
            reason="bad-split",
        )
    allowed, place = frozenset(legal_cuts(request.parameters)), 0
    for layers in split[:-1]:
        place += layers
        if place not in allowed:
            raise PlanError(
                f"the split {text} cuts before layer {place}, where {request.parameters.architecture} may not be cut",
                f"cut before one of the layers {', '.join(str(cut) for cut in sorted(allowed)) or '(none)'}",
                reason="illegal-cut",
            )
    return split


def _balanced_split(request: PlanRequest, arithmetic: _Arithmetic) -> tuple[int, ...]:
    def seconds(stage: int, first: int, end: int) -> float:
        return arithmetic.seconds(request.nodes[stage], first, end)

    parameters = request.parameters
    sizes = balanced_partition(parameters.n_layers, legal_cuts(parameters), len(request.nodes), seconds)
    if sizes is None:
        raise _too_little_memory(request, arithmetic)
    return sizes


def _too_little_memory(request: PlanRequest, arithmetic: _Arithmetic) -> PlanError:
    """Say how far the request is from fitting, and what would fit instead."""
    parameters, stages = request.parameters, len(request.nodes)
    cuts = legal_cuts(parameters)

    def overload(stage: int, first: int, end: int) -> float:
        return arithmetic.overload(request.nodes[stage], first, end)

    sizes = balanced_partition(parameters.n_layers, cuts, stages, overload)
    assert sizes is not None  # the counts were checked, and an overload is never infinite
    worst, first = 0.0, 0
    needed = available = 0
    node = request.nodes[0]
    for candidate, layers in zip(request.nodes, sizes, strict=True):
        value = arithmetic.overload(candidate, first, first + layers)
        if value > worst:
            worst, node = value, candidate
            needed, available = arithmetic.memory_bytes(first, first + layers), candidate.memory_bytes
        first += layers
    return PlanError(
        f"the model does not fit {count(stages, 'stage')}: even split at best, {node.node} needs "
        f"{readable_bytes(needed)} and has {readable_bytes(available)}",
        _what_would_fit(request, arithmetic),
        reason="too-little-memory",
    )


def _what_would_fit(request: PlanRequest, arithmetic: _Arithmetic) -> str:
    """A hint: the fewest nodes like the smallest one, the largest context, or how much memory there must be."""
    ways: list[str] = []
    smallest = min((node for node in request.nodes if node.memory_bytes), key=lambda node: node.memory_bytes)
    stages = _fewest_stages(request, arithmetic, smallest)
    if stages:
        ways.append(f"use {count(stages, 'node')} of {readable_bytes(smallest.memory_bytes)}")
    context = _largest_context(request, arithmetic)
    if context:
        ways.append(f"use a context of at most {context:,}")
    if not ways:
        ways.append("use nodes with more memory, fewer sequences at once, or a smaller quantization")
    return ", or ".join(ways)


def _fewest_stages(request: PlanRequest, arithmetic: _Arithmetic, node: NodeCapacity) -> int:
    """The least number of nodes like ``node``, more than were asked for, that hold the model; 0 if none does."""
    parameters = request.parameters
    cuts = legal_cuts(parameters)

    def overload(stage: int, first: int, end: int) -> float:
        return arithmetic.overload(node, first, end)

    for stages in range(len(request.nodes) + 1, min(len(cuts) + 1, 64) + 1):
        if smallest_bottleneck(parameters.n_layers, cuts, stages, overload) <= 1.0:
            return stages
    return 0


def _largest_context(request: PlanRequest, arithmetic: _Arithmetic) -> int:
    """The largest context, below the one asked for, that the nodes can hold; 0 if none. Memory only grows with it."""

    def fits(context: int) -> bool:
        smaller = _Arithmetic(replace(request, max_context=context), arithmetic.layout)

        def overload(stage: int, first: int, end: int) -> float:
            return smaller.overload(request.nodes[stage], first, end)

        cuts = legal_cuts(request.parameters)
        return smallest_bottleneck(request.parameters.n_layers, cuts, len(request.nodes), overload) <= 1.0

    low, high = 0, request.max_context  # fits(low) or low is 0; high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _stages(request: PlanRequest, arithmetic: _Arithmetic, sizes: tuple[int, ...]) -> tuple[StagePlan, ...]:
    parameters = request.parameters
    stages: list[StagePlan] = []
    first = 0
    for index, (node, layers) in enumerate(zip(request.nodes, sizes, strict=True)):
        end = first + layers
        needed = arithmetic.memory_bytes(first, end)
        if node.memory_bytes and needed > node.memory_bytes:
            raise PlanError(
                f"layers {first} to {end - 1} need {readable_bytes(needed)}, but {node.node} has "
                f"{readable_bytes(node.memory_bytes)}",
                "give it fewer layers, or leave the split to the planner",
                reason="too-little-memory",
            )
        stages.append(
            StagePlan(
                index=index,
                node=node.node,
                slice=StageSlice(first, end, parameters.n_layers),
                tensor_count=len(stage_tensors(request.facts, parameters, first, end)),
                weight_bytes=cost.stage_weight_bytes(arithmetic.layout, first, end),
                kv_bytes=arithmetic.kv_bytes(first, end),
                scratch_bytes=arithmetic.scratch_bytes(first, end),
            )
        )
        first = end
    return tuple(stages)


def _edges(request: PlanRequest, stages: tuple[StagePlan, ...]) -> tuple[EdgePlan, ...]:
    """Token-in, an activation edge between neighbours, token-out from the tail to the head (a lone stage needs
    none)."""
    head, tail = stages[0].node, stages[-1].node
    edges = [
        EdgePlan(
            EdgeKind.TOKEN_IN,
            _ORCHESTRATOR,
            head,
            token_bytes=cost.TOKEN_BYTES,
            record_bytes=cost.record_bytes(request.max_context, cost.TOKEN_BYTES, segments=1),
        )
    ]
    width = cost.activation_token_bytes(request.parameters)
    segments = min(request.max_sequences, request.max_batch_tokens)
    for before, after in pairwise(stages):
        largest = cost.record_bytes(request.max_batch_tokens, width, segments=segments)
        edges.append(EdgePlan(EdgeKind.ACTIVATION, before.node, after.node, token_bytes=width, record_bytes=largest))
    if len(stages) > 1:
        largest = cost.record_bytes(segments, cost.SAMPLE_BYTES, segments=0)
        edges.append(EdgePlan(EdgeKind.TOKEN_OUT, tail, head, token_bytes=cost.SAMPLE_BYTES, record_bytes=largest))
    return tuple(edges)


def _notes(request: PlanRequest) -> tuple[str, ...]:
    trained = request.parameters.context_length
    if request.max_context > trained:
        return (f"a context of {request.max_context} is beyond the {trained} positions that the model was trained for",)
    return ()
