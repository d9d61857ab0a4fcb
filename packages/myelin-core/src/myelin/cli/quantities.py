"""Amounts as people write them: ``24GB``, ``936GB/s``, ``1Gbit/s``, ``20ms``."""

from __future__ import annotations

import re

from myelin.errors import UsageError

_NUMBER = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z/]*)\s*")
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """``24GB`` (10^9), ``24GiB`` (2^30), ``500MB``, or a plain number of bytes.

    Raises:
        UsageError: It is none of these, or zero.
    """
    number, unit = _split(text)
    factor = _BINARY.get(unit.removesuffix("b")) or _PREFIXES.get(unit.removesuffix("b"))
    if not number or factor is None:
        raise UsageError(f"'{text}' is no amount of memory", "Write it as 24GB or 16GiB.")
    return int(number * factor)


def parse_rate(text: str) -> float:
    """Bytes per second: ``936GB/s``, or ``1Gbit/s`` (also ``1Gbps``).

    Raises:
        UsageError: It is neither, or zero.
    """
    number, unit = _split(text)
    if unit.endswith(("bit/s", "bps")):
        factor = _PREFIXES.get(unit.removesuffix("bit/s").removesuffix("bps"))
        if number and factor is not None:
            return number * factor / 8
    elif number and unit.endswith("b/s"):
        factor = _BINARY.get(unit.removesuffix("b/s")) or _PREFIXES.get(unit.removesuffix("b/s"))
        if factor is not None:
            return number * factor
    raise UsageError(f"'{text}' is no bandwidth", "Write it as 936GB/s or 1Gbit/s.")


def parse_seconds(text: str) -> float:
    """Seconds: ``20ms``, ``150us``, ``0.5s``.

    Raises:
        UsageError: It is none of these.
    """
    number, unit = _split(text)
    factor = {"s": 1.0, "ms": 1e-3, "us": 1e-6}.get(unit)
    if factor is None:
        raise UsageError(f"'{text}' is no time", "Write it as 20ms.")
    return number * factor


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    return (float(match["number"]), match["unit"].lower()) if match is not None else (0.0, "?")
