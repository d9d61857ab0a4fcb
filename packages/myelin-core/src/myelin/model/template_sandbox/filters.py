"""The filters that a template may use: Jinja's own that are harmless, and others in place of the rest."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import pass_environment
from jinja2.environment import Environment
from jinja2.filters import FILTERS
from markupsafe import escape

from myelin.model.template_sandbox.charges import CONTAINERS, measured, text_length
from myelin.model.template_sandbox.meter import LimitExceededError, current_meter
from myelin.model.template_sandbox.methods import join, pad, replace
from myelin.model.template_sandbox.operators import WIDEST, percent, plus


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates want it: nothing escaped for HTML, other scripts as they are."""
    if isinstance(indent, str) or (indent or 0) > 16 or (separators and sum(map(len, separators)) > 16):
        raise LimitExceededError("it indents too far")
    current_meter().room(text_length(value))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _attributes(environment: Environment, items: Iterable[Any], attribute: str | int | None) -> Iterable[Any]:
    return items if attribute is None else (environment.getitem(item, attribute) for item in items)


@pass_environment
def _sum(environment: Environment, items: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    for item in _attributes(environment, items, attribute):
        start = measured(plus(start, item))
    return start


@pass_environment
def _join_filter(
    environment: Environment, items: Iterable[Any], d: object = "", attribute: str | int | None = None
) -> str:
    return join(str(d), _attributes(environment, items, attribute))


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if isinstance(width, int) and width > WIDEST:
        raise LimitExceededError("it indents too far")
    lead = width if isinstance(width, str) else " " * width
    current_meter().room(len(text) + len(lead) * (1 + text.count("\n")))
    lines = text.split("\n")
    return "\n".join(lead + line if (index or first) and (line or blank) else line for index, line in enumerate(lines))


def _round(value: float, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > 300:
        raise LimitExceededError("it rounds too finely")
    return FILTERS["round"](value, precision, method)


def _center(text: str, width: int = 80) -> str:
    return pad(text, "center", width, ())


def _format_filter(text: str, *arguments: Any, **keywords: Any) -> Any:
    return percent(text, keywords or arguments)


def _plain(value: Any) -> Any:
    """``safe``: nothing is escaped here to begin with."""
    return value


def _escape(value: Any) -> str:
    current_meter().room(6 * text_length(value))
    return str(escape(str(value)))


_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "center": _center,
    "e": _escape,
    "escape": _escape,
    "format": _format_filter,
    "indent": _indent,
    "join": _join_filter,
    "replace": replace,
    "round": _round,
    "safe": _plain,
    "sum": _sum,
    "tojson": _tojson,
}
_JINJA_FILTERS = (
    "abs",
    "attr",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "first",
    "float",
    "groupby",
    "int",
    "items",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "sort",
    "title",
    "trim",
    "truncate",
    "unique",
    "upper",
    "wordcount",
)


def _charged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that costs the size of what it is given, and of what it gives."""
    first = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @functools.wraps(function)
    def charged(*arguments: Any, **keywords: Any) -> Any:
        value = arguments[first] if len(arguments) > first else None
        size = len(value) if isinstance(value, CONTAINERS) else len(value) // 64 if isinstance(value, str) else 0
        current_meter().step(1 + size)
        return measured(function(*arguments, **keywords))

    return charged


@_charged
def _string(value: Any) -> str:
    current_meter().room(text_length(value))
    return str(value)


def allowed_filters() -> dict[str, Callable[..., Any]]:
    """All filters by name, each charged for."""
    found = {name: _charged(FILTERS[name]) for name in _JINJA_FILTERS}
    found.update({name: _charged(function) for name, function in _OWN_FILTERS.items()})
    return found | {"string": _string}
