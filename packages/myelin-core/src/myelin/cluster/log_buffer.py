"""What a provider keeps of a node's output, for whoever wants to follow it: bounded, whatever a node writes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from myelin.cluster.provider import LogLine

KEPT_LINES = 2000
MAX_LINE_CHARACTERS = 16_384


class LogBuffer:
    """The last lines of a node, which any number of readers may follow, also after its end.

    Belongs to one event loop.

    Args:
        keep: How many lines are kept; the oldest go first.
    """

    def __init__(self, keep: int = KEPT_LINES) -> None:
        self._lines: deque[LogLine] = deque(maxlen=keep)
        self._appended = 0
        self._ended = False
        self._changed = asyncio.Event()

    def append(self, line: LogLine) -> None:
        """Add a line, cut to :data:`MAX_LINE_CHARACTERS`; the oldest one goes where there are too many."""
        self._lines.append(LogLine(line.stream, line.text[:MAX_LINE_CHARACTERS], line.time))
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
