"""What a model's header says, as immutable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from myelin.model.quant import GgmlType


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file.

    Attributes:
        name: The GGUF name, such as ``blk.3.attn_q.weight``.
        ggml_type: How its elements are stored.
        shape: NumPy order: ``(rows, columns)`` for a matrix, the last axis contiguous (the reverse of GGUF's ``ne``).
        part: Index of the file (in :attr:`ModelFacts.parts`) that holds it.
        offset: Where its first byte is, from the start of that file.
        nbytes: Its size in bytes.
    """

    name: str
    ggml_type: GgmlType
    shape: tuple[int, ...]
    part: int
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the last axis), which is always a whole number of blocks."""
        rows = 1
        for extent in self.shape[:-1]:
            rows *= extent
        return self.nbytes // rows


@dataclass(frozen=True, slots=True)
class PartInfo:
    """One file of the model. ``name`` is what people see; ``header_bytes`` ends where tensor data may begin."""

    name: str
    size: int
    header_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The header of a model, all its parts joined.

    Attributes:
        architecture: ``general.architecture``.
        metadata: Every key of the header. Scalars are ``int``, ``float``, ``bool`` or ``str``; numeric arrays are NumPy
            arrays; string arrays are :class:`~collections.abc.Sequence` of ``str`` (decoded lazily, see
            :mod:`myelin.model.gguf`).
        tensors: By name, in file order.
        parts: One entry, or one for each file of a split model.
    """

    architecture: str
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    parts: tuple[PartInfo, ...] = field(default=())

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.size for part in self.parts)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors.values())
