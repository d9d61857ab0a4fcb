"""What one stage needs of a model, and a reader that gives just that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from myelin.model.architecture import Hyperparameters
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


class ShardReader:
    """Reads the tensors of one stage, and no other bytes.

    Attributes:
        facts, parameters, stage: What is read.
        names: The stage's tensors, in file order.
        bytes_read: Tensor bytes given out so far (a tensor read twice counts twice).
    """

    facts: ModelFacts
    parameters: Hyperparameters
    stage: StageSlice
    names: tuple[str, ...]
    bytes_read: int

    def __init__(
        self, facts: ModelFacts, parameters: Hyperparameters, stage: StageSlice, sources: tuple[ByteSource, ...]
    ) -> None:
        raise NotImplementedError

    def __contains__(self, name: str) -> bool:
        """Whether the stage has a tensor of this name."""
        raise NotImplementedError

    def info(self, name: str) -> TensorInfo:
        """The tensor's entry. Raises :class:`ModelError` if it isn't this stage's."""
        raise NotImplementedError

    def read(self, name: str) -> NDArray[np.uint8]:
        """The tensor's raw bytes as ``uint8`` of shape ``(rows, row_bytes)`` (rows = product of all but the last axis)."""
        raise NotImplementedError

    def read_rows(self, name: str, first: int, count: int) -> NDArray[np.uint8]:
        """Rows ``[first, first+count)`` of :meth:`read`, without reading the others: lets a large tensor be repacked piece
        by piece."""
        raise NotImplementedError
