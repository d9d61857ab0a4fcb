"""Which cores of this machine each node of a run keeps to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_PROCESSORS = Path("/sys/devices/system/cpu")


def core_numbers(processors: Path = _PROCESSORS) -> tuple[int, ...]:
    """The cores that this process may use, neighbours side by side: by socket, then by physical core.

    Numbers alone don't tell: many machines count the second threads of all cores after the first ones. Empty where the
    system doesn't let a process choose.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()

    def place(number: int) -> tuple[int, int, int]:
        topology = processors / f"cpu{number}" / "topology"
        return _number(topology / "physical_package_id"), _number(topology / "core_id"), number

    return tuple(sorted(os.sched_getaffinity(0), key=place))


def own_cores(cores: Sequence[int], nodes: int, place: int) -> tuple[int, ...]:
    """The part of ``cores`` that belongs to node ``place`` (from 0) of ``nodes``; parts differ by one core at most.

    Empty where there is nothing to choose: with a single node, with fewer cores than nodes, or for a node too many.
    """
    if not 2 <= nodes <= len(cores) or place >= nodes:
        return ()
    return tuple(cores[place * len(cores) // nodes : (place + 1) * len(cores) // nodes])


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0
