"""The run plan: the immutable result of planning."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from myelin.model.architecture import Hyperparameters
from myelin.model.facts import ModelFacts
from myelin.model.shard import StageSlice
from myelin.values import NodeId


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """What a planner may assume of one node.

    Attributes:
        node: Its logical name.
        memory_bytes: What the stage may use; 0 is unknown (not limited).
        bandwidth: Bytes per second of memory traffic, relative figures are enough; equal nodes have equal figures.
    """

    node: NodeId
    memory_bytes: int = 0
    bandwidth: float = 1.0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the planner is asked.

    Attributes:
        facts, parameters: The model.
        model_uri: Its source, as the nodes will open it.
        nodes: The nodes, in pipeline order; one stage each.
        split: Layers of each stage by hand, empty where the planner is free. Its sum is ``n_layers``.
        max_context, max_sequences, max_batch_tokens, kv_bytes_per_value: For the memory arithmetic.
    """

    facts: ModelFacts
    parameters: Hyperparameters
    model_uri: str
    nodes: tuple[NodeCapacity, ...]
    split: tuple[int, ...] = ()
    max_context: int = 4096
    max_sequences: int = 4
    max_batch_tokens: int = 512
    kv_bytes_per_value: float = 2


class EdgeKind(StrEnum):
    """What an edge carries."""

    TOKEN_IN = "token-in"
    ACTIVATION = "activation"
    TOKEN_OUT = "token-out"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage and what it costs. All sizes in bytes."""

    index: int
    node: NodeId
    slice: StageSlice
    tensor_count: int
    weight_bytes: int
    kv_bytes: int
    scratch_bytes: int

    @property
    def layers(self) -> tuple[int, int]:
        """``[first, end)``."""
        return self.slice.first_layer, self.slice.end_layer

    @property
    def memory_bytes(self) -> int:
        """All that the node must hold for it."""
        return self.weight_bytes + self.kv_bytes + self.scratch_bytes


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """A directed stream of records.

    Attributes:
        source, target: Node ids; the orchestrator's side is ``"orchestrator"``.
        token_bytes: Bytes of a record for each token in it.
        record_bytes: The largest record, header included.
    """

    kind: EdgeKind
    source: str
    target: str
    token_bytes: int
    record_bytes: int


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Stages in order, edges in order, and the limits they were planned for."""

    model_uri: str
    stages: tuple[StagePlan, ...]
    edges: tuple[EdgePlan, ...]
    max_context: int
    max_sequences: int
    max_batch_tokens: int
    planner: str = ""
    notes: tuple[str, ...] = field(default=())
