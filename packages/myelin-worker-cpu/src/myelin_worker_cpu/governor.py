"""How many threads a small step runs with: all, or one where that is faster. Pure: seconds in, a number out.

Threads that meet at a barrier after every matrix are as slow as the slowest of them, so a neighbour that takes a part
of one core may make all together several times slower than one alone. Results don't depend on the number of threads, so
it can be chosen anew for every step. One thread is tried once for a few steps, since a machine may be busy from the
start; after that, as long as steps take about what they can, nothing is tried and nothing lost. Once they take much
longer, one thread is tried again, and has the rest if it was faster. From time to time, and ever less often, all get
another try.
"""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 8
"""Steps that a judgement looks back on: their median."""
PROBE = 4
"""Steps of a trial; the first, which finds threads asleep, isn't counted."""
SLOW = 1.5
"""Times the best that is known: from there on it is worth trying another way."""
CLEARLY = 0.8
"""One thread takes over where its steps take at most so much of what they take with all: a few of them are no proof,
and one thread is a poor choice once the neighbour has gone."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 256
"""Steps between trials: doubled whenever one changed nothing."""
FORGET = 1.001
"""The best known time grows by this with every step, as a context does."""


class Governor:
    """For the steps of one kind, of which one takes about as long as another.

    Args:
        threads: All that there are.
    """

    def __init__(self, threads: int) -> None:
        self._all = threads
        self._current = threads
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._best = float("inf")
        self._trial: list[float] | None = None
        self._pause = FIRST_PAUSE
        self._since = 0
        self._tried = False

    def threads(self) -> int:
        """For the next step."""
        if self._trial is None:
            return self._current
        return self._other()

    def took(self, seconds: float) -> None:
        """How long the step took that :meth:`threads` was asked for."""
        if self._all == 1:
            return
        if self._trial is not None:
            self._trial.append(seconds)
            if len(self._trial) == PROBE:
                self._judge(statistics.median(self._trial[1:]))
            return
        self._recent.append(seconds)
        self._best = min(self._best * FORGET, seconds)
        self._since += 1
        full = len(self._recent) == WINDOW
        if full and self._since >= self._pause and (self._current == 1 or not self._tried or self._is_slow()):
            self._trial = []
            self._tried = True

    def _is_slow(self) -> bool:
        return statistics.median(self._recent) > SLOW * self._best

    def _other(self) -> int:
        return 1 if self._current > 1 else self._all

    def _judge(self, other: float) -> None:
        bound = CLEARLY if self._current > 1 else 1.0
        if other < bound * statistics.median(self._recent):
            self._current = self._other()
            self._recent.clear()
            self._best = other
            self._pause = FIRST_PAUSE
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._trial = None
        self._since = 0
