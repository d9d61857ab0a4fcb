"""Stopping a process for a while, so that it answers nobody (Linux)."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

STOPPED_WITHIN_S = 60.0


def freeze(pid: int) -> None:
    """Stop a process; returns once each of its threads has stopped, which they do one after the other.

    Raises:
        RuntimeError: Not all of them did.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + STOPPED_WITHIN_S
    while _states(pid) != {"T"}:
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {pid} does not stop")
        time.sleep(0.005)


def thaw(pid: int) -> None:
    """Let a process go on."""
    os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> set[str]:
    """The states of a process's threads, as ``proc(5)`` has them in ``stat``."""
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended meanwhile
            found.add(path.read_text().rpartition(")")[2].split()[0])
    return found
