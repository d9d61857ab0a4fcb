"""Keys and values of the sequences: one slot of zeroed, lazily committed memory for each that is alive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from myelin.engine_api import EngineError, Hyperparameters, Segment, SequenceId
from myelin_worker_cpu.attention_ops import BLOCK, POSITIONS
from myelin_worker_cpu.memory import block

VECTOR = 16


def padded(size: int, to: int = VECTOR) -> int:
    """``size`` rounded up to a multiple of ``to``."""
    return -(-size // to) * to


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where a slot's keys and values are; all in bytes.

    A slot is a sequence of *blocks* of 64 positions, so that memory is committed as a sequence grows, whatever the
    size of the system's pages. A block has, for each layer and in it for each key/value head, the keys in tiles of 16
    positions (``[4][head_dim][16]``) and then the values (``[64][value_dim]``); head sizes are padded to 16.

    Elements of one byte are q8_0: an f16 scale for 32 elements, to which head sizes are then padded. The scales of a
    head's keys (``[4][head_dim / 32][16]``) follow the keys, those of its values (``[value_dim / 32][64]``) the values.
    """

    layers: int
    positions: int
    kv_heads: int
    head_dim: int
    value_dim: int
    element_bytes: int

    @classmethod
    def of(cls, parameters: Hyperparameters, layers: int, max_context: int, element_bytes: int) -> CacheLayout:
        """The layout for ``layers`` layers of a model."""
        unit = BLOCK if element_bytes == 1 else VECTOR
        return cls(
            layers=layers,
            positions=padded(max_context, POSITIONS),
            kv_heads=parameters.n_kv_heads,
            head_dim=padded(parameters.head_dim, unit),
            value_dim=padded(parameters.value_dim, unit),
            element_bytes=element_bytes,
        )

    @property
    def key_scales_start(self) -> int:
        """Where the scales of a head's keys begin in a block, after its keys."""
        return POSITIONS * self.head_dim * self.element_bytes

    @property
    def values_start(self) -> int:
        """Where a head's values begin in a block, after its keys and their scales."""
        return self.key_scales_start + self._scale_bytes(self.head_dim)

    @property
    def value_scales_start(self) -> int:
        """Where the scales of a head's values begin in a block, after its values."""
        return self.values_start + POSITIONS * self.value_dim * self.element_bytes

    @property
    def head_bytes(self) -> int:
        """One head's keys and values in a block."""
        return self.value_scales_start + self._scale_bytes(self.value_dim)

    def _scale_bytes(self, size: int) -> int:
        return POSITIONS * size // BLOCK * 2 if self.element_bytes == 1 else 0

    @property
    def layer_bytes(self) -> int:
        """One layer's keys and values in a block."""
        return self.kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """A block."""
        return self.layers * self.layer_bytes

    @property
    def slot_bytes(self) -> int:
        """One sequence's keys and values."""
        return self.positions // POSITIONS * self.block_bytes


@dataclass(slots=True)
class _Sequence:
    slot: int
    length: int


class Slots:
    """Which sequence has which slot, and how many positions of it are there."""

    def __init__(self, layout: CacheLayout, max_sequences: int, max_context: int) -> None:
        self._layout = layout
        self._max_context = max_context
        self._memory: list[NDArray[np.uint8] | None] = [None] * max_sequences
        self._free = list(range(max_sequences))[::-1]
        self._sequences: dict[SequenceId, _Sequence] = {}

    @property
    def reserved_bytes(self) -> int:
        """What all slots would take if they were full."""
        return self._layout.slot_bytes * len(self._memory)

    def check(self, segments: tuple[Segment, ...]) -> None:
        """See that every segment fits, before anything is changed.

        Raises:
            EngineError: Too many sequences, a position beyond the context, a gap, a sequence named twice.
        """
        new = 0
        seen = set()
        for segment in segments:
            if segment.sequence in seen:
                raise EngineError(f"sequence {segment.sequence} is in the batch twice", reason="batch")
            seen.add(segment.sequence)
            known = self._sequences.get(segment.sequence)
            held = known.length if known else 0
            new += known is None
            if segment.count < 1 or not 0 <= segment.start <= held:
                raise EngineError(
                    f"sequence {segment.sequence} holds {held} positions, "
                    f"but {segment.count} from {segment.start} were sent",
                    "This is a fault of the scheduler; please report it.",
                    reason="position-gap",
                )
            if segment.start + segment.count > self._max_context:
                raise EngineError(
                    f"position {segment.start + segment.count - 1} is beyond the context of {self._max_context}",
                    "Raise --max-context.",
                    reason="context-full",
                )
        if new > len(self._free):
            raise EngineError(
                f"{new} new sequences, but only {len(self._free)} of {len(self._memory)} places are free",
                "Raise the number of sequences, or release some.",
                reason="sequences-full",
            )

    def place(self, segment: Segment) -> int:
        """The address of the sequence's slot, after noting that it will hold the segment's positions."""
        known = self._sequences.get(segment.sequence)
        if known is None:
            known = self._sequences[segment.sequence] = _Sequence(self._free.pop(), 0)
        known.length = segment.start + segment.count
        memory = self._memory[known.slot]
        if memory is None:
            memory = self._memory[known.slot] = block(self._layout.slot_bytes)
        return int(memory.ctypes.data)

    def release(self, sequence: SequenceId) -> None:
        """Free the sequence's slot; its memory is kept for the next."""
        known = self._sequences.pop(sequence, None)
        if known is not None:
            self._free.append(known.slot)

    def clear(self) -> None:
        """Give all memory back."""
        self._sequences.clear()
        self._free = list(range(len(self._memory)))[::-1]
        self._memory = [None] * len(self._memory)
