"""Why a process ended, in words."""

from __future__ import annotations

import signal

_SHOWN_CHARACTERS = 300


def exit_reason(status: int, last_error: str = "", *, memory_kills: int = 0) -> str:
    """One line for people.

    Args:
        status: As ``subprocess`` gives it: the exit status, or the negative number of the signal that ended it.
        last_error: The last line on its standard error; shown where it ended by itself with an error.
        memory_kills: How often the kernel has killed for memory while it ran.
    """
    if status < 0:
        return _signalled(-status, memory_kills)
    if status == 0:
        return "ended by itself (status 0)"
    reason = f"exited with status {status}"
    shown = last_error.strip()[:_SHOWN_CHARACTERS]
    return f"{reason}: {shown}" if shown else reason


def _signalled(number: int, memory_kills: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if name == "SIGKILL":
        if memory_kills > 0:
            return "was killed by the system, which ran out of memory (SIGKILL)"
        return "was killed (SIGKILL): by hand, or by the system for want of memory"
    if name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT", "SIGFPE"):
        return f"crashed ({name})"
    return f"was ended by {name}"
