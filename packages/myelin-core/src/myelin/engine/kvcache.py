"""A simple cache of keys and values: one slot for each sequence, one row for each position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from myelin.engine.contract import EngineOptions, Segment
from myelin.errors import EngineError
from myelin.model.architecture import Hyperparameters
from myelin.values import SequenceId

KV_DTYPES: dict[str, type[np.floating]] = {"f16": np.float16, "f32": np.float32}
"""Names of :attr:`EngineOptions.kv_dtype`."""


class SlotCache:
    """Keys and values of the stage's layers for up to ``max_sequences`` sequences.

    What is written is rounded to ``kv_dtype`` and held as ``float32``, so that a reader computes with it as it is.
    A step is a transaction: :meth:`check` refuses it before anything has changed, :meth:`begin` rewinds,
    :meth:`append` writes layer by layer, :meth:`commit` makes the new positions count.
    """

    def __init__(self, parameters: Hyperparameters, n_layers: int, options: EngineOptions) -> None:
        if options.kv_dtype not in KV_DTYPES:
            raise EngineError(
                f"keys and values cannot be kept as {options.kv_dtype!r}",
                f"choose one of {', '.join(sorted(KV_DTYPES))}",
                reason="kv-dtype",
            )
        self._dtype = KV_DTYPES[options.kv_dtype]
        self._max_context = options.max_context
        self._max_sequences = options.max_sequences
        shape = (n_layers, parameters.n_kv_heads, options.max_context)
        self._key_shape = (*shape, parameters.head_dim)
        self._value_shape = (*shape, parameters.value_dim)
        self._slots: dict[SequenceId, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
        self._lengths: dict[SequenceId, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots when full; a slot is allocated with its sequence."""
        elements = int(np.prod(self._key_shape)) + int(np.prod(self._value_shape))
        return self._max_sequences * elements * 4

    def length(self, sequence: SequenceId) -> int:
        """How many positions are held of ``sequence``; 0 where it isn't known."""
        return self._lengths.get(sequence, 0)

    def check(self, segments: Sequence[Segment]) -> None:
        """Whether a batch of these segments fits.

        Raises:
            EngineError: A sequence appears twice, a segment is empty, leaves a gap or goes beyond the context, or there
                are more sequences than slots. Nothing has changed.
        """
        names = [segment.sequence for segment in segments]
        if len(set(names)) != len(names):
            raise EngineError("a sequence appears twice in one batch", reason="duplicate-sequence")
        if len(self._lengths.keys() | set(names)) > self._max_sequences:
            raise EngineError(
                f"more than {self._max_sequences} sequences at once",
                "release one, or raise max_sequences",
                reason="too-many-sequences",
            )
        for segment in segments:
            held = self.length(segment.sequence)
            if segment.count < 1 or segment.start < 0:
                raise EngineError(f"sequence {segment.sequence} has an empty or negative segment", reason="bad-segment")
            if segment.start > held:
                raise EngineError(
                    f"sequence {segment.sequence} jumps to position {segment.start} while {held} are held",
                    reason="position-gap",
                )
            if segment.start + segment.count > self._max_context:
                raise EngineError(
                    f"sequence {segment.sequence} would reach position {segment.start + segment.count} of a context of "
                    f"{self._max_context}",
                    "shorten the prompt, or raise max_context",
                    reason="context-overflow",
                )

    def begin(self, segments: Sequence[Segment]) -> None:
        """Give new sequences a slot, and forget what comes at or after each segment's start."""
        for segment in segments:
            if segment.sequence not in self._slots:
                self._slots[segment.sequence] = (
                    np.zeros(self._key_shape, np.float32),
                    np.zeros(self._value_shape, np.float32),
                )
            self._lengths[segment.sequence] = segment.start

    def append(
        self, layer: int, segment: Segment, keys: NDArray[np.float32], values: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Write a segment's keys and values into a layer (counted from the stage's first).

        Args:
            keys: ``float32[count, n_kv_heads, head_dim]``, rotated.
            values: ``float32[count, n_kv_heads, value_dim]``.

        Returns:
            Views of all keys and values up to the segment's end: ``float32[n_kv_heads, end, head_dim or value_dim]``.
        """
        key_slot, value_slot = self._slots[segment.sequence]
        end = segment.start + segment.count
        with np.errstate(over="ignore"):  # beyond float16's range is infinite, as in any engine with such a cache
            key_slot[layer, :, segment.start : end] = keys.transpose(1, 0, 2).astype(self._dtype)
            value_slot[layer, :, segment.start : end] = values.transpose(1, 0, 2).astype(self._dtype)
        return key_slot[layer, :, :end], value_slot[layer, :, :end]

    def commit(self, segments: Sequence[Segment]) -> None:
        """Count the segments' positions as held."""
        for segment in segments:
            self._lengths[segment.sequence] = segment.start + segment.count

    def release(self, sequence: SequenceId) -> None:
        """Free a sequence's slot; one that isn't known is fine."""
        self._slots.pop(sequence, None)
        self._lengths.pop(sequence, None)
