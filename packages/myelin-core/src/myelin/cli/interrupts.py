"""Remembering an interrupt that comes before a command is ready to end in good order.

Python raises :class:`KeyboardInterrupt` wherever it happens to be, and where that is a destructor or a callback of the
interpreter's own, in the middle of an import say, the exception is printed and forgotten. The command would go on as if
nobody had asked it to stop.
"""

from __future__ import annotations

import signal
from types import FrameType

_seen: list[int] = []


def remember_interrupts() -> None:
    """From now on, keep in mind that SIGINT came; it is still raised as :class:`KeyboardInterrupt`.

    Where somebody else handles SIGINT already, or ignores it, nothing changes.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _remember)


def remembered() -> int:
    """The number of the signal that came, or 0."""
    return _seen[0] if _seen else 0


def _remember(number: int, frame: FrameType | None) -> None:
    _seen.append(number)
    raise KeyboardInterrupt
