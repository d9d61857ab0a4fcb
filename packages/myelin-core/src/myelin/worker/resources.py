"""What this process and this machine use of memory."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most that was ever resident of this process.

    On Linux this is ``VmHWM``: ``ru_maxrss`` there starts with what the parent had when it forked us. Elsewhere it is
    ``ru_maxrss`` (bytes on macOS), and on Windows the peak working set.
    """
    if sys.platform.startswith("linux"):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine_memory() -> tuple[int, int]:
    """Bytes of memory of this machine: in all, and available."""
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)
