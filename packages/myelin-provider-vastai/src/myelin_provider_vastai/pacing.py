"""How calls to the service are spaced: least seconds between two of a kind, and waits after it said «too many»."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping

SPACING_S: Mapping[str, float] = {"create": 4.5, "destroy": 3.0, "show": 2.0, "list": 1.0, "ssh": 1.0, "search": 6.0}
"""Seconds between two calls of a kind, as the service enforces them (ten searches a minute)."""
LONGEST_WAIT_S = 60.0
_MARGIN = 1.02


class Pacer:
    """Lets calls of each kind through one at a time, spaced. Waiting in the queue costs nothing but time.

    Args:
        scale: Multiplies all spacings.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._next: defaultdict[str, float] = defaultdict(float)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def turn(self, kind: str) -> None:
        """Return when a call of ``kind`` may be made.

        Spaced from when the last one did return, which on a busy machine may have been later than it might have been.
        """
        async with self._turns[kind]:
            while (wait := self._next[kind] - time.monotonic()) > 0:  # noqa: ASYNC110  (it may be held meanwhile)
                await asyncio.sleep(wait)
            self._next[kind] = time.monotonic() + SPACING_S[kind] * self._scale * _MARGIN

    def hold(self, kind: str, seconds: float) -> None:
        """Let no call of ``kind`` through for so long."""
        self._next[kind] = max(self._next[kind], time.monotonic() + seconds)

    def wait_after_refusal(self, kind: str, tries: int, retry_after: str) -> float:
        """Seconds to wait after the ``tries``-th refusal: what the service says, or the spacing, doubled each time."""
        try:
            told = float(retry_after)
        except ValueError:
            told = -1.0
        if 0 <= told < float("inf"):
            return min(told, LONGEST_WAIT_S)
        return min(SPACING_S[kind] * self._scale * 2.0**tries, LONGEST_WAIT_S)
