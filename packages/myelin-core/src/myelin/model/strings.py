"""A string array of a header, decoded only where it is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

LENGTH_BYTES = 8
"""Each string of a GGUF array is preceded by its length, an unsigned 64-bit integer."""


class StringArray(Sequence[str]):
    """The strings of a GGUF array over the bytes that hold them.

    A vocabulary has up to 262,144 of them, and most readers look at few: a string is decoded when it is asked for.
    Bytes that are not UTF-8 (some vocabularies have such tokens) decode to U+FFFD; :meth:`raw` gives them as they are.

    Args:
        data: The array's elements as they are in the file, each with its length before it.
        bounds: ``int64[n + 1]``: where each element's length begins in ``data``, and the end of the last element.
    """

    __slots__ = ("_bounds", "_data")

    def __init__(self, data: bytes, bounds: NDArray[np.int64]) -> None:
        self._data = data
        self._bounds = bounds

    @classmethod
    def of(cls, strings: Sequence[str | bytes]) -> StringArray:
        """An array of these strings (tests and synthetic models)."""
        pieces: list[bytes] = []
        bounds = [0]
        for string in strings:
            raw = string.encode() if isinstance(string, str) else string
            pieces.append(len(raw).to_bytes(LENGTH_BYTES, "little") + raw)
            bounds.append(bounds[-1] + LENGTH_BYTES + len(raw))
        return cls(b"".join(pieces), np.array(bounds, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def raw(self, index: int) -> bytes:
        """The bytes of one string. Negative indices count from the end; ``IndexError`` beyond either end."""
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"string {index} of {count}")
        index %= count
        return self._data[int(self._bounds[index]) + LENGTH_BYTES : int(self._bounds[index + 1])]

    def raws(self) -> Iterator[bytes]:
        """The bytes of every string, in order."""
        data = self._data
        bounds = self._bounds.tolist()
        start = bounds[0]
        for end in bounds[1:]:
            yield data[start + LENGTH_BYTES : end]
            start = end

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        return self.raw(index).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        for raw in self.raws():
            yield raw.decode("utf-8", "replace")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StringArray):
            return NotImplemented
        return self._data == other._data

    def __hash__(self) -> int:
        return hash(self._data)

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings, {len(self._data)} bytes)"
