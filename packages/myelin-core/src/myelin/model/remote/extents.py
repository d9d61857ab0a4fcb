"""A set of byte positions, kept as the ranges that they form."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Extents:
    """Ranges ``[start, end)``, ascending; those that touch are one. Not thread-safe."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._ends, strict=True))

    @property
    def total(self) -> int:
        """Positions in all."""
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        """Put ``[start, end)`` in; what is in already stays."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        """Take ``[start, end)`` out; what isn't in stays out."""
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        kept: list[tuple[int, int]] = []
        if first < last:
            if self._starts[first] < start:
                kept.append((self._starts[first], start))
            if self._ends[last - 1] > end:
                kept.append((end, self._ends[last - 1]))
        self._starts[first:last] = [piece[0] for piece in kept]
        self._ends[first:last] = [piece[1] for piece in kept]

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges of ``[start, end)`` that are not in, ascending."""
        holes: list[tuple[int, int]] = []
        index = bisect_right(self._ends, start)
        while start < end:
            if index == len(self._starts) or self._starts[index] >= end:
                holes.append((start, end))
                break
            if self._starts[index] > start:
                holes.append((start, self._starts[index]))
            start = self._ends[index]
            index += 1
        return holes
