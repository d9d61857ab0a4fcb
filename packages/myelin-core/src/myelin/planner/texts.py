"""Numbers as people read them."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def readable_bytes(size: int) -> str:
    """``size`` in binary units with three significant digits: ``1.25 GiB``."""
    value, step = float(size), 0
    while abs(value) >= 1024 and step < len(_UNITS) - 1:
        value, step = value / 1024, step + 1
    if not step:
        return f"{size} B"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {_UNITS[step]}"


def count(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
