"""Clocks for fakes: the real one, and one that a test moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time and lets it pass."""

    def time(self) -> float:
        """Unix seconds."""

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds of this clock."""


class RealClock:
    """The system's time and the event loop's sleep."""

    def time(self) -> float:
        """Unix seconds."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """See :class:`Clock`."""
        await asyncio.sleep(seconds)


class SimulatedClock:
    """Time that stands still until :meth:`advance`: hours pass in a blink, and always in the same order."""

    def __init__(self, start: float = 1.75e9) -> None:
        self._now = start
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def time(self) -> float:
        """Unix seconds."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Return once the clock has been moved so far. Of zero seconds: after a turn of the event loop."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        wake = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), wake))
        await wake

    async def advance(self, seconds: float, *, turns: int = 20) -> None:
        """Let so many seconds pass; whoever sleeps meanwhile wakes at his time, in order.

        Args:
            turns: Turns of the event loop that tasks get between two wakings, to do what follows from the first.
        """
        end = self._now + seconds
        await self._settle(turns)
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():  # its sleeper may have been cancelled
                wake.set_result(None)
                await self._settle(turns)
        self._now = end

    async def _settle(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
