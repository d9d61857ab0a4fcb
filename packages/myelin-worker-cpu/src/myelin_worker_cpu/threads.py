"""The helper threads of a stage: each lives inside one compiled call and is woken for every step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Helpers:
    """Threads 1 to ``count - 1``; thread 0 is the caller's.

    Args:
        run: ``run(thread)``: returns only after :attr:`stop` was called.
        stop: Makes every ``run`` return.
    """

    def __init__(self, count: int, run: Callable[[int], None], stop: Callable[[], None]) -> None:
        self._stop = stop
        self._threads = [
            threading.Thread(target=run, args=(number,), name=f"myelin-cpu-{number}", daemon=True)
            for number in range(1, count)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End them; twice is fine."""
        threads, self._threads = self._threads, []
        if threads:
            self._stop()
        for thread in threads:
            thread.join()
