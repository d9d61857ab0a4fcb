"""Keeping a node that shares its machine on cores of its own.

Of the stages of a pipeline, one computes while the others wait, so a machine's cores look idle to its scheduler, which
then wakes a stage's threads on the core of whoever woke them: where the other stage, or its own event loop, is about
to run. The stages take turns on one core, and each finds the caches full of the other's weights. A node whose threads
all stay on its own cores finds them as it left them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from myelin.cluster.boot import CORE_SET_VARIABLE


def own_cores(environment: Mapping[str, str], threads: int) -> frozenset[int]:
    """The cores that this node should keep to; empty where its provider named none, or fewer than ``threads``."""
    numbers = environment.get(CORE_SET_VARIABLE, "").split(",")
    if not all(number.isascii() and number.isdigit() for number in numbers):
        return frozenset()
    cores = frozenset(int(number) for number in numbers)
    return cores if len(cores) >= threads else frozenset()


def keep_to(cores: frozenset[int]) -> bool:
    """Have every thread of this process, and those that they start, run on ``cores`` alone.

    Returns:
        Whether they do; not where the system has no such thing, or the cores aren't ours to use.
    """
    if not cores or not hasattr(os, "sched_setaffinity") or not cores <= os.sched_getaffinity(0):
        return False
    try:
        os.sched_setaffinity(0, cores)  # first, so that no thread is started without it meanwhile
        threads = os.listdir("/proc/self/task")
    except OSError:
        return False
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), cores)
    return True
