"""The functions that a template finds."""

from __future__ import annotations

import re
from datetime import datetime

from jinja2.utils import Namespace

from myelin.model.template_sandbox.charges import printable
from myelin.model.template_sandbox.meter import LimitExceededError, RaisedError

LONGEST_RANGE = 100_000


class OpaqueNamespace(Namespace):
    """A namespace that shows nothing of itself: as the one thing that can change, it could come to hold itself."""

    def __repr__(self) -> str:
        return "<namespace>"


def counted_range(*bounds: int) -> range:
    """``range``, up to :data:`LONGEST_RANGE` numbers."""
    numbers = range(*bounds)
    if len(numbers) > LONGEST_RANGE:
        raise LimitExceededError(f"it counts to more than {LONGEST_RANGE}")
    return numbers


def raise_exception(message: object = "") -> None:
    """How a template says that it can't render a conversation."""
    raise RaisedError(str(printable(message))[:1000])


def strftime_now(form: str) -> str:
    """The local date and time."""
    if len(form) > 100 or re.search(r"\d{3}", form):
        raise LimitExceededError("it pads a date too far")
    return datetime.now().astimezone().strftime(form)
