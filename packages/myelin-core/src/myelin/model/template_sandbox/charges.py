"""What values cost: weighed and measured before they are made, or as soon as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from myelin.model.template_sandbox.meter import LimitExceededError, current_meter

MOST_BITS = 4096
# A character may be written as an escape sequence, such as \U0001f600, where a value is shown in a list.
_LONGEST_ESCAPE = 10


CONTAINERS: tuple[type[Collection[Any]], ...] = (
    list,
    tuple,
    dict,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


def weigh(value: object, most_elements: int, most_characters: int) -> tuple[int, int]:
    """Elements and characters of a value, with what is held several times counted several times.

    Raises:
        LimitExceededError: There are more than that; counting ends there, so that it takes no longer either.
    """
    elements = characters = 0
    pending: list[object] = [value]
    while pending:
        item = pending.pop()
        elements += 1
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, CONTAINERS):
            pending.extend(item)
        if elements + len(pending) > most_elements or characters > most_characters:
            raise LimitExceededError("it makes a value that is too large")
    return elements, characters


def weighed(value: object) -> tuple[int, int]:
    """Elements and characters of a value, as :func:`weigh` counts them; charges for looking."""
    meter = current_meter()
    elements, characters = weigh(value, max(meter.steps, 0), 4 * meter.longest)
    meter.step(elements)
    return elements, characters


def measured(value: Any) -> Any:
    """Charge for a value that was just made, and return it."""
    if isinstance(value, str):
        current_meter().made(len(value))
    elif isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise LimitExceededError("it makes a number that is too large")
    elif isinstance(value, CONTAINERS):
        weighed(value)
    return value


def text_length(value: Any) -> int:
    """At most how long ``str(value)`` is; charges for looking."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, CONTAINERS):
        elements, characters = weighed(value)
        return _LONGEST_ESCAPE * characters + (4 + MOST_BITS) * elements if characters else MOST_BITS * elements
    return MOST_BITS


def printable(value: Any) -> Any:
    """Check a value that is about to be printed."""
    meter = current_meter()
    meter.step()
    if isinstance(value, CONTAINERS):
        meter.room(text_length(value))
    return value


def metered(iterable: Iterable[Any], weight: int) -> Iterator[Any]:
    """Charge for every iteration."""
    meter = current_meter()
    for item in iterable:
        meter.step(weight)
        yield item


def joined(*parts: Any) -> str:
    """The operator ``~``."""
    current_meter().room(sum(map(text_length, parts)))
    return str(measured("".join(map(str, parts))))


def sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """``value[start:stop:step]``."""
    part = value[start:stop:step]
    if isinstance(part, str):
        return measured(part)
    current_meter().step(len(part))
    return part


def concatenated(pieces: Iterable[str]) -> str:
    """The text of a macro, a block or a ``{% set %}`` body."""
    parts = list(pieces)
    current_meter().made(sum(map(len, parts)))
    return "".join(parts)
