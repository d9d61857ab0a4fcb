"""The engine contract: load a stage, step batches of many sequences through it, forget a sequence.

An engine is synchronous and owned by one thread: no method is called while another runs. It may use threads of its own
inside a call. **Batch invariance**: what a row of a batch gives must not depend, bit for bit, on which other rows are
in the batch, nor on how a prompt was cut into chunks, so that a model gives the same tokens however it is served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from myelin.model.quant import GgmlType
from myelin.model.shard import ShardReader
from myelin.values import GREEDY, SamplingParams, SequenceId

Progress = Callable[[str, int, int], None]
"""``progress(phase, done, total)``: called often, cheaply, from the engine's thread. Phases: ``compile`` (kernels),
``load`` (bytes). ``total`` may be 0 where it isn't known."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine may use.

    Attributes:
        threads: Compute threads; 0 is «as many as there are cores that this process may use».
        max_context: Positions of one sequence.
        max_sequences: Sequences alive at once.
        max_batch_tokens: Rows of one step at most.
        kv_dtype: How keys and values are kept: ``f16`` or ``f32``, and ``q8_0`` where the engine has it.
        memory_bytes: An upper bound for what the engine may allocate; 0 is none.
    """

    threads: int = 0
    max_context: int = 4096
    max_sequences: int = 4
    max_batch_tokens: int = 512
    kv_dtype: str = "f16"
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive positions of one sequence inside a batch.

    Attributes:
        sequence: Whose.
        start: Position of the first row; equal to the number of positions the engine already holds of this sequence.
            A smaller ``start`` rewinds the sequence to it first (what came after is forgotten).
        count: Rows, at least 1.
        output: The tail must choose a token after the last row.
        sampling: How.
    """

    sequence: SequenceId
    start: int
    count: int
    output: bool = False
    sampling: SamplingParams = GREEDY


@dataclass(frozen=True, slots=True)
class StageBatch:
    """The rows of one step, segment after segment.

    Attributes:
        segments: At least one; a sequence appears at most once.
        tokens: ``int32[rows]`` for a head, otherwise None.
        hidden: ``float32[rows, width]``, C-contiguous, for any other stage, else None. The engine may overwrite it.
        want_logits: The tail also returns the raw logits of its output rows (evaluation; never set while serving).
        want_all_logits: The tail returns the logits of *every* row (perplexity; implies ``want_logits``).
    """

    segments: tuple[Segment, ...]
    tokens: NDArray[np.int32] | None = None
    hidden: NDArray[np.float32] | None = None
    want_logits: bool = False
    want_all_logits: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """The token chosen after a segment, for position ``position`` (= the segment's ``start + count``), and its natural
    log-probability under the untempered distribution."""

    sequence: SequenceId
    position: int
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a step gives.

    Attributes:
        hidden: ``float32[rows, width]`` unless the stage is the tail. Valid until the next :meth:`Engine.step`.
        samples: One for each segment with ``output``, in order; only from the tail.
        logits: ``float32[k, vocab_size]`` where asked for, after soft caps; valid until the next step.
    """

    hidden: NDArray[np.float32] | None = None
    samples: tuple[Sample, ...] = ()
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading a stage took: bytes held for weights, bytes reserved for keys and values, seconds."""

    weight_bytes: int
    kv_bytes: int
    seconds: float


class Engine(Protocol):
    """Computes one stage. See the module's text for threads and determinism."""

    def load(self, shard: ShardReader, progress: Progress) -> LoadReport:
        """Compile what must be compiled, read the stage's tensors, reserve the KV cache. Called once.

        Raises:
            EngineError: A type or architecture is not supported, or memory does not suffice.
        """

    def step(self, batch: StageBatch) -> StageOutput:
        """Run the stage's layers over a batch.

        Raises:
            EngineError: A segment doesn't fit (too many sequences, beyond ``max_context``, a gap in positions).
        """

    def release(self, sequence: SequenceId) -> None:
        """Forget a sequence; one that isn't known is fine."""

    def close(self) -> None:
        """Free everything; end own threads; twice is fine."""


@dataclass(frozen=True, slots=True)
class EngineSupport:
    """What an engine says of itself on this machine, before anything is loaded.

    Attributes:
        name: The entry point's.
        types: Tensor types it computes.
        architectures: Families it computes.
        rank: Which engine ``auto`` prefers on this machine: the highest. ``reference`` is 0, ``cpu`` 50, a GPU's 100.
        unavailable: Empty, or why it can't run here (no GPU, not built yet).
    """

    name: str
    types: frozenset[GgmlType]
    architectures: frozenset[str]
    rank: int
    unavailable: str = ""
