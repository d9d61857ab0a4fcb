"""A node's output as lines: cutting bytes into lines, and keeping the last of them for whoever wants to follow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from myelin.plugin import LogLine

MAX_LINE_BYTES = 16_384


class LineSplitter:
    """Cuts a stream of bytes into lines of text.

    A line that grows above ``limit`` bytes is cut there, and goes on as a new one, so that memory is bounded whatever a
    node writes. Bytes that aren't UTF-8 become replacement characters.
    """

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that are complete with ``data``, without their ends."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        lines = [piece for line in complete for piece in self._pieces(line)]
        *full, self._rest = self._pieces(self._rest)
        return [self._text(piece) for piece in (*lines, *full)]

    def finish(self) -> list[str]:
        """The last line, where the stream ended without a line's end."""
        rest, self._rest = self._rest, b""
        return [self._text(rest)] if rest else []

    def _pieces(self, line: bytes) -> list[bytes]:
        if len(line) <= self._limit:
            return [line]
        return [line[start : start + self._limit] for start in range(0, len(line), self._limit)]

    @staticmethod
    def _text(line: bytes) -> str:
        return line.removesuffix(b"\r").decode(errors="replace")


class LogBuffer:
    """The last lines of a node, which any number of readers may follow, also after its end."""

    def __init__(self, keep: int) -> None:
        self._lines: deque[LogLine] = deque(maxlen=keep)
        self._appended = 0
        self._ended = False
        self._changed = asyncio.Event()

    def append(self, line: LogLine) -> None:
        """Add a line; the oldest one goes where there are too many."""
        self._lines.append(line)
        self._appended += 1
        self._tell()

    def end(self) -> None:
        """Nothing more will come."""
        self._ended = True
        self._tell()

    def last(self, stream: str) -> str:
        """The last line of ``stream`` that isn't blank, or an empty text."""
        return next((line.text for line in reversed(self._lines) if line.stream == stream and line.text.strip()), "")

    async def follow(self) -> AsyncIterator[LogLine]:
        """All lines that are kept, then each new one, until the end. Says where lines were dropped."""
        position = 0
        while True:
            first_kept = self._appended - len(self._lines)
            if position < first_kept:
                dropped, position = first_kept - position, first_kept
                yield LogLine("provider", f"({dropped} lines were dropped)", self._lines[0].time)
                continue
            if position < self._appended:
                line = self._lines[position - first_kept]
                position += 1
                yield line
                continue
            if self._ended:
                return
            await self._changed.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
