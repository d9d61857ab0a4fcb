"""What one rendering of a template may use, and the meter that counts it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jinja2.exceptions import TemplateRuntimeError

STEPS = 1_000_000
STEPS_PER_INPUT_ELEMENT = 1_000
TEXT = 16 << 20
TEXT_PER_INPUT_CHARACTER = 16
LONGEST_TEXT = 4 << 20
LONGEST_PER_INPUT_CHARACTER = 4
SECONDS = 5.0


class LimitExceededError(TemplateRuntimeError):
    """The template used more steps, text or time than it may."""


class RaisedError(TemplateRuntimeError):
    """The template called ``raise_exception``."""


class Meter:
    """What one rendering may still use.

    Args:
        input_elements, input_characters: The size of what the template is given, as :func:`weigh` counts it.
    """

    def __init__(self, input_elements: int = 0, input_characters: int = 0) -> None:
        self.steps = STEPS + STEPS_PER_INPUT_ELEMENT * input_elements
        self._text = TEXT + TEXT_PER_INPUT_CHARACTER * input_characters
        self.longest = LONGEST_TEXT + LONGEST_PER_INPUT_CHARACTER * input_characters
        self._deadline = time.monotonic() + SECONDS

    def step(self, count: int = 1) -> None:
        """Spend steps."""
        self.steps -= count
        if self.steps < 0:
            raise LimitExceededError("it takes too many steps")
        if time.monotonic() > self._deadline:
            raise LimitExceededError(f"it takes more than {SECONDS:g} seconds")

    def room(self, characters: int) -> None:
        """Check, before it is made, that a text of this length may be."""
        if characters > self.longest or characters > self._text:
            raise LimitExceededError("it makes a text that is too long")

    def made(self, characters: int) -> None:
        """Spend the length of a text."""
        self.room(characters)
        self._text -= characters


_METER: ContextVar[Meter] = ContextVar("template_meter")


def current_meter() -> Meter:
    """The meter of the rendering that runs in this thread or task."""
    return _METER.get()


@contextmanager
def metered_by(meter: Meter) -> Iterator[None]:
    """Charge everything that templates do meanwhile, in this thread or task, to ``meter``."""
    token = _METER.set(meter)
    try:
        yield
    finally:
        _METER.reset(token)
