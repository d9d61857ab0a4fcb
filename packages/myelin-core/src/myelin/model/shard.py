"""What one stage needs of a model, and a reader that gives just that."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from myelin.errors import ModelError
from myelin.model.architecture import Hyperparameters, stage_tensors
from myelin.model.facts import ModelFacts, TensorInfo


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``[start, end)`` of file ``part``."""

    part: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StageSlice:
    """The layers ``[first_layer, end_layer)`` of a model of ``n_layers``."""

    first_layer: int
    end_layer: int
    n_layers: int

    @property
    def is_head(self) -> bool:
        """Holds the token embedding and takes token ids."""
        return self.first_layer == 0

    @property
    def is_tail(self) -> bool:
        """Holds the output head and gives tokens."""
        return self.end_layer == self.n_layers


class ByteSource(Protocol):
    """Random access to one file of a model, local or not. Thread-safe."""

    @property
    def name(self) -> str:
        """What people see: a file name."""

    @property
    def size(self) -> int:
        """Bytes in all."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``.

        Raises:
            ModelError: They are not there (a file cut short, a connection lost for good).
        """

    def close(self) -> None:
        """Free what it holds; twice is fine."""


@runtime_checkable
class DirectSource(Protocol):
    """A byte source that can also fill memory that we give it; saves a copy of each tensor."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` (writable bytes) from ``offset``; errors as :meth:`ByteSource.read_at`."""


@runtime_checkable
class VersionedSource(Protocol):
    """A byte source that can tell its version of the file from every other."""

    @property
    def fingerprint(self) -> str:
        """The same in every process that has the same version open; empty where there is no telling."""


def fingerprints(parts: Iterable[ByteSource]) -> tuple[str, ...]:
    """The parts' fingerprints; empty unless each has one."""
    found = tuple(part.fingerprint if isinstance(part, VersionedSource) else "" for part in parts)
    return found if all(found) else ()


class ShardReader:
    """Reads the tensors of one stage, and no other bytes. Thread-safe.

    Attributes:
        facts, parameters, stage: What is read.
        names: The stage's tensors, in file order.
        bytes_read: Tensor bytes given out so far (a tensor read twice counts twice).
    """

    def __init__(
        self, facts: ModelFacts, parameters: Hyperparameters, stage: StageSlice, sources: tuple[ByteSource, ...]
    ) -> None:
        self.facts = facts
        self.parameters = parameters
        self.stage = stage
        self.names: tuple[str, ...] = stage_tensors(facts, parameters, stage.first_layer, stage.end_layer)
        self.bytes_read = 0
        self._members = frozenset(self.names)
        self._sources = sources
        self._lock = threading.Lock()

    @property
    def total_bytes(self) -> int:
        """Bytes of all the stage's tensors."""
        return sum(self.facts.tensors[name].nbytes for name in self.names)

    def __contains__(self, name: str) -> bool:
        """Whether the stage has a tensor of this name."""
        return name in self._members

    def info(self, name: str) -> TensorInfo:
        """The tensor's entry. Raises :class:`ModelError` if it isn't this stage's."""
        if name not in self._members:
            first, end = self.stage.first_layer, self.stage.end_layer
            why = "belongs to another stage" if name in self.facts.tensors else "is not in the model"
            raise ModelError(
                f"tensor '{name}' was asked for by the stage of layers {first} to {end - 1}, but it {why}",
                "This is a fault of the engine; please report it.",
                reason="tensor-missing",
            )
        return self.facts.tensors[name]

    def read(self, name: str) -> NDArray[np.uint8]:
        """The tensor's raw bytes as ``uint8`` of shape ``(rows, row_bytes)`` (rows = product of all but the last axis).

        The array is new, writable and C-contiguous.
        """
        tensor = self.info(name)
        return self.read_rows(name, 0, tensor.nbytes // tensor.row_bytes)

    def read_rows(self, name: str, first: int, count: int) -> NDArray[np.uint8]:
        """Rows ``[first, first+count)`` of :meth:`read`, without reading the others: lets a large tensor be repacked
        piece by piece.

        Raises:
            ModelError: The tensor isn't this stage's, or the bytes aren't there.
            IndexError: The rows are outside the tensor.
        """
        tensor = self.info(name)
        row_bytes = tensor.row_bytes
        rows = tensor.nbytes // row_bytes
        if first < 0 or count < 0 or first + count > rows:
            raise IndexError(f"rows {first} to {first + count} of {rows} in tensor '{name}'")
        offset, length = tensor.offset + first * row_bytes, count * row_bytes
        source = self._sources[tensor.part]
        values = np.empty((count, row_bytes), dtype=np.uint8)
        if length:
            target = values.reshape(-1).data
            if isinstance(source, DirectSource):
                source.read_into(offset, target)
            else:
                target[:] = source.read_at(offset, length)
        with self._lock:
            self.bytes_read += length
        return values


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What one stage is to fetch.

    Attributes:
        ranges: Its bytes, ascending; gaps of at most :data:`SMALL_GAP` between tensors are part of them.
        tensors: How many tensors it needs.
        tensor_bytes: Their bytes.
        fraction: The ranges' share of the whole model's files, 0 to 1.
    """

    ranges: tuple[ByteRange, ...]
    tensors: int
    tensor_bytes: int
    fraction: float

    @property
    def range_bytes(self) -> int:
        """Bytes of all ranges."""
        return sum(piece.end - piece.start for piece in self.ranges)


SMALL_GAP = 16 << 10
"""Bytes between two tensors that are fetched along, since another request would cost more than they do."""


def plan_shard(facts: ModelFacts, parameters: Hyperparameters, stage: StageSlice) -> ShardPlan:
    """The bytes that the stage needs of the model."""
    names = stage_tensors(facts, parameters, stage.first_layer, stage.end_layer)
    ranges = stage_byte_ranges(facts, names, SMALL_GAP)
    total = sum(piece.end - piece.start for piece in ranges)
    return ShardPlan(
        ranges=ranges,
        tensors=len(names),
        tensor_bytes=sum(facts.tensors[name].nbytes for name in names),
        fraction=total / facts.total_bytes if facts.total_bytes else 0.0,
    )


def stage_byte_ranges(facts: ModelFacts, names: Iterable[str], gap: int = 0) -> tuple[ByteRange, ...]:
    """The bytes of these tensors as ranges, ascending by part and start, none overlapping.

    Args:
        facts: The model.
        names: Tensors in any order; one named twice counts once.
        gap: Ranges of one part that are at most this many bytes apart become one (fewer requests, some bytes too many).

    Raises:
        KeyError: A name isn't the model's.
    """
    spans = sorted(
        (tensor.part, tensor.offset, tensor.offset + tensor.nbytes)
        for tensor in (facts.tensors[name] for name in set(names))
    )
    merged: list[ByteRange] = []
    for part, start, end in spans:
        if merged and merged[-1].part == part and start <= merged[-1].end + gap:
            merged[-1] = ByteRange(part, merged[-1].start, max(end, merged[-1].end))
        else:
            merged.append(ByteRange(part, start, end))
    return tuple(merged)
