"""What this machine has: processors and memory that a node may use, and whether the kernel has killed for memory."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that can be allocated without swapping: the machine's, or less where a control group (v2) limits us."""
    available = int(psutil.virtual_memory().available)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - used))


def memory_kills(vmstat: Path = _VMSTAT) -> int | None:
    """How often the kernel has killed a process for memory since it started; None where it doesn't tell."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _number(path: Path) -> int | None:
    """The number in a file; None where the file is missing or says ``max``."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
