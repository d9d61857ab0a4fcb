"""What a model's header says, as immutable values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from myelin.errors import ModelError
from myelin.model.quant import GgmlType
from myelin.model.strings import StringArray


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
    """One file of the model: ``name`` is what people see, its first ``header_bytes`` are header (padding included)."""

    name: str
    size: int
    header_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The header of a model, all its parts joined.

    Attributes:
        architecture: ``general.architecture``.
        metadata: Every key of the header. Scalars are ``int``, ``float``, ``bool`` or ``str``; numeric arrays are NumPy
            arrays; string arrays are :class:`~myelin.model.strings.StringArray`, a sequence of ``str`` that is decoded
            where it is looked at.
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

    def integer(self, key: str, default: int | None = None) -> int:
        """The whole number under ``key``, or ``default`` where there is none.

        Raises:
            ModelError: The key is missing and there is no default, or it isn't a whole number.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The finite number under ``key``; otherwise as :meth:`integer`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """The truth value under ``key``; otherwise as :meth:`integer`."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """The string under ``key``; otherwise as :meth:`integer`."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def strings(self, key: str, default: Sequence[str] | None = None) -> StringArray:
        """The array of strings under ``key``; otherwise as :meth:`integer`."""
        value = self._value(key, default)
        if isinstance(value, StringArray):
            return value
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return StringArray.of(value)
        raise self._wrong(key, "an array of strings")

    def _value(self, key: str, default: object) -> object:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(
                f"the model's header has no key '{key}'",
                "The file is incomplete or of a kind that Myelin does not serve: try another file of the same model.",
                reason="model-key",
            )
        return value

    def _wrong(self, key: str, expected: str) -> ModelError:
        value = self.metadata.get(key)
        kind = f"{type(value).__name__} {str(value)[:60]!r}"
        return ModelError(
            f"the model's key '{key}' is not {expected} but {kind}",
            "The file is damaged or of a kind that Myelin does not serve: try another file of the same model.",
            reason="model-key",
        )
