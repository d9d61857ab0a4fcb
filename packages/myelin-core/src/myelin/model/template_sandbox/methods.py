"""The methods of values that a template may call."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedFormatter

from myelin.model.template_sandbox.charges import metered, text_length
from myelin.model.template_sandbox.meter import LimitExceededError, current_meter
from myelin.model.template_sandbox.operators import WIDEST, widths_of


def format_text(environment: Environment, text: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    """``text.format(…)``."""
    fields = widths = 0
    for _, name, spec, _ in string.Formatter().parse(text):
        if name is not None:
            fields += 1
            if spec and "{" in spec:
                raise SecurityError("a format within a format is not allowed")
            widths += widths_of(spec or "")
    current_meter().room(len(text) + widths + fields * text_length([arguments, dict(keywords)]))
    return SandboxedFormatter(environment).vformat(text, arguments, keywords)


def replace(text: str, old: Any, new: Any, count: int | None = -1) -> str:
    """``text.replace(…)``, which is the filter too."""
    old, new = str(old), str(new)
    times = text.count(old)
    if count is None or count < 0:
        count = -1
    else:
        times = min(times, count)
    current_meter().room(len(text) + times * max(0, len(new) - len(old)))
    return text.replace(old, new, count)


def join(separator: str, items: Iterable[Any]) -> str:
    """``separator.join(items)``, of anything that can be shown."""
    parts = list(metered(items, 1))
    current_meter().room(sum(map(text_length, parts)) + len(separator) * len(parts))
    return separator.join(map(str, parts))


def pad(text: str, method: str, width: int, fill: Sequence[str]) -> str:
    """One of the methods :data:`PADDING`."""
    if width > WIDEST:
        raise LimitExceededError("it pads a text too far")
    return str(getattr(text, method)(width, *fill))


PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
SAFE_TEXT_METHODS = frozenset(
    {
        "capitalize",
        "casefold",
        "count",
        "endswith",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "rfind",
        "rindex",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
    }
)
SAFE_METHODS: dict[type, frozenset[str]] = {
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
}
