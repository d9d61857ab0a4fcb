"""The operators whose results may be huge, each run only after its result is known to fit."""

from __future__ import annotations

import re
from typing import Any

from myelin.model.template_sandbox.charges import MOST_BITS, text_length
from myelin.model.template_sandbox.meter import LimitExceededError, current_meter

WIDEST = 10_000


def widths_of(text: str) -> int:
    """The sum of all widths and precisions in a format."""
    if "*" in text:
        raise LimitExceededError("it pads by a computed width")
    widths = [int(digits[:6]) for digits in re.findall(r"\d+", text)]
    if max(widths, default=0) > WIDEST:
        raise LimitExceededError("it pads a text too far")
    return sum(widths)


def percent(left: Any, right: Any) -> Any:
    """``left % right``."""
    if isinstance(left, str):
        conversions = re.findall(r"%(?:\([^)]*\))?([^a-zA-Z%]*)", left)
        widths = sum(map(widths_of, conversions))
        current_meter().room(len(left) + widths + len(conversions) * text_length(right))
    return left % right


def times(left: Any, right: Any) -> Any:
    """``left * right``."""
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int):
            if isinstance(value, str):
                current_meter().room(len(value) * count)
            elif isinstance(value, list | tuple):
                current_meter().step(max(0, len(value) * count))
    return left * right


def power(left: Any, right: Any) -> Any:
    """``left ** right``."""
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MOST_BITS:
        raise LimitExceededError("it makes a number that is too large")
    return left**right


def plus(left: Any, right: Any) -> Any:
    """``left + right``."""
    if isinstance(left, str) and isinstance(right, str):
        current_meter().room(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        current_meter().step(len(left) + len(right))
    return left + right
