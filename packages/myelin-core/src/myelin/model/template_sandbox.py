"""A Jinja sandbox whose templates can neither run long nor use much memory.

A chat template comes with the model file, from whoever made it. Jinja's own sandbox keeps it from reaching Python's
internals, but not from nested loops over ``range(100000)``, nor from ``'a' * 10**10``. A child process with limits
would cost more than all other work on a prompt, so a template is metered where it runs:

- every loop iteration, call, filter, operator and printed value costs *steps*, as many as there are nodes in what it
  may run before the next charge; a rendering has so many steps, and a deadline that is looked at whenever some are
  spent;
- every text that is made costs its length from a budget, and none may be longer than a limit. Whatever could make a
  huge value in one go (``*``, ``**``, ``%``, ``replace``, ``join``, ``center``, ``format``, …) runs only after its
  result's size is known to fit;
- lists and dictionaries are weighed as they are made, with what they hold counted as often as it is held: a list that
  holds a list twice, which holds a list twice, … must not grow a text of 2^40 elements;
- only known methods, functions and filters can be called.

How much there is follows from the input: long conversations get more. So the worst that a template can do is to take
:data:`SECONDS`, and memory in proportion to :data:`STEPS` and :data:`TEXT`.
"""

from __future__ import annotations

import functools
import json
import re
import string
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, cast

from jinja2 import Template, nodes, pass_environment
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import escape

STEPS = 1_000_000
STEPS_PER_INPUT_ELEMENT = 1_000
TEXT = 16 << 20
TEXT_PER_INPUT_CHARACTER = 16
LONGEST_TEXT = 4 << 20
LONGEST_PER_INPUT_CHARACTER = 4
SECONDS = 5.0
LONGEST_SOURCE = 128 << 10
LONGEST_RANGE = 100_000
MOST_BITS = 4096
WIDEST = 10_000

# A character may be written as an escape sequence, such as \U0001f600, where a value is shown in a list.
_LONGEST_ESCAPE = 10


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


@contextmanager
def metered_by(meter: Meter) -> Iterator[None]:
    """Charge everything that templates do meanwhile, in this thread or task, to ``meter``."""
    token = _METER.set(meter)
    try:
        yield
    finally:
        _METER.reset(token)


def render(template: Template, variables: Mapping[str, object], meter: Meter) -> str:
    """Render a template that :meth:`MeteredEnvironment.compiled` made, within an allowance.

    Raises:
        LimitExceededError: It took more.
        Exception: Whatever the template runs into.
    """
    with metered_by(meter):
        pieces: list[str] = []
        length = 0
        for piece in template.generate(**variables):
            length += len(piece)
            meter.step()
            meter.room(length)
            pieces.append(piece)
        return "".join(pieces)


_CONTAINERS: tuple[type[Collection[Any]], ...] = (
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
        elif isinstance(item, _CONTAINERS):
            pending.extend(item)
        if elements + len(pending) > most_elements or characters > most_characters:
            raise LimitExceededError("it makes a value that is too large")
    return elements, characters


def _weigh(value: object) -> tuple[int, int]:
    meter = _METER.get()
    elements, characters = weigh(value, max(meter.steps, 0), 4 * meter.longest)
    meter.step(elements)
    return elements, characters


def _measured(value: Any) -> Any:
    """Charge for a value that was just made, and return it."""
    if isinstance(value, str):
        _METER.get().made(len(value))
    elif isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise LimitExceededError("it makes a number that is too large")
    elif isinstance(value, _CONTAINERS):
        _weigh(value)
    return value


def _text_length(value: Any) -> int:
    """At most how long ``str(value)`` is; charges for looking."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, _CONTAINERS):
        elements, characters = _weigh(value)
        return _LONGEST_ESCAPE * characters + (4 + MOST_BITS) * elements if characters else MOST_BITS * elements
    return MOST_BITS


def _printable(value: Any) -> Any:
    """Check a value that is about to be printed."""
    meter = _METER.get()
    meter.step()
    if isinstance(value, _CONTAINERS):
        meter.room(_text_length(value))
    return value


def _metered(iterable: Iterable[Any], weight: int) -> Iterator[Any]:
    """Charge for every iteration."""
    meter = _METER.get()
    for item in iterable:
        meter.step(weight)
        yield item


def _joined(*parts: Any) -> str:
    """The operator ``~``."""
    _METER.get().room(sum(map(_text_length, parts)))
    return str(_measured("".join(map(str, parts))))


def _sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """``value[start:stop:step]``."""
    part = value[start:stop:step]
    if isinstance(part, str):
        return _measured(part)
    _METER.get().step(len(part))
    return part


def _concatenated(pieces: Iterable[str]) -> str:
    """The text of a macro, a block or a ``{% set %}`` body."""
    parts = list(pieces)
    _METER.get().made(sum(map(len, parts)))
    return "".join(parts)


# Operators.


def _widths(text: str) -> int:
    """The sum of all widths and precisions in a format."""
    if "*" in text:
        raise LimitExceededError("it pads by a computed width")
    widths = [int(digits[:6]) for digits in re.findall(r"\d+", text)]
    if max(widths, default=0) > WIDEST:
        raise LimitExceededError("it pads a text too far")
    return sum(widths)


def _percent(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        conversions = re.findall(r"%(?:\([^)]*\))?([^a-zA-Z%]*)", left)
        widths = sum(map(_widths, conversions))
        _METER.get().room(len(left) + widths + len(conversions) * _text_length(right))
    return left % right


def _times(left: Any, right: Any) -> Any:
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int):
            if isinstance(value, str):
                _METER.get().room(len(value) * count)
            elif isinstance(value, list | tuple):
                _METER.get().step(max(0, len(value) * count))
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MOST_BITS:
        raise LimitExceededError("it makes a number that is too large")
    return left**right


def _plus(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        _METER.get().room(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        _METER.get().step(len(left) + len(right))
    return left + right


# Methods.


def _format(environment: Environment, text: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str:
    fields = widths = 0
    for _, name, spec, _ in string.Formatter().parse(text):
        if name is not None:
            fields += 1
            if spec and "{" in spec:
                raise SecurityError("a format within a format is not allowed")
            widths += _widths(spec or "")
    _METER.get().room(len(text) + widths + fields * _text_length([arguments, dict(keywords)]))
    return SandboxedFormatter(environment).vformat(text, arguments, keywords)


def _replace(text: str, old: Any, new: Any, count: int | None = -1) -> str:
    old, new = str(old), str(new)
    times = text.count(old)
    if count is None or count < 0:
        count = -1
    else:
        times = min(times, count)
    _METER.get().room(len(text) + times * max(0, len(new) - len(old)))
    return text.replace(old, new, count)


def _join(separator: str, items: Iterable[Any]) -> str:
    parts = list(_metered(items, 1))
    _METER.get().room(sum(map(_text_length, parts)) + len(separator) * len(parts))
    return separator.join(map(str, parts))


def _pad(text: str, method: str, width: int, fill: Sequence[str]) -> str:
    if width > WIDEST:
        raise LimitExceededError("it pads a text too far")
    return str(getattr(text, method)(width, *fill))


_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_SAFE_TEXT_METHODS = frozenset(
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
_SAFE_METHODS: dict[type, frozenset[str]] = {
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
}


# Functions.


class _OpaqueNamespace(Namespace):
    """A namespace that shows nothing of itself: as the one thing that can change, it could come to hold itself."""

    def __repr__(self) -> str:
        return "<namespace>"


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > LONGEST_RANGE:
        raise LimitExceededError(f"it counts to more than {LONGEST_RANGE}")
    return numbers


def _raise_exception(message: object = "") -> None:
    raise RaisedError(str(_printable(message))[:1000])


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"\d{3}", form):
        raise LimitExceededError("it pads a date too far")
    return datetime.now().astimezone().strftime(form)


# Filters.


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
    _METER.get().room(_text_length(value))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _attributes(environment: Environment, items: Iterable[Any], attribute: str | int | None) -> Iterable[Any]:
    return items if attribute is None else (environment.getitem(item, attribute) for item in items)


@pass_environment
def _sum(environment: Environment, items: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    for item in _attributes(environment, items, attribute):
        start = _measured(_plus(start, item))
    return start


@pass_environment
def _join_filter(
    environment: Environment, items: Iterable[Any], d: object = "", attribute: str | int | None = None
) -> str:
    return _join(str(d), _attributes(environment, items, attribute))


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if isinstance(width, int) and width > WIDEST:
        raise LimitExceededError("it indents too far")
    lead = width if isinstance(width, str) else " " * width
    _METER.get().room(len(text) + len(lead) * (1 + text.count("\n")))
    lines = text.split("\n")
    return "\n".join(lead + line if (index or first) and (line or blank) else line for index, line in enumerate(lines))


def _round(value: float, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > 300:
        raise LimitExceededError("it rounds too finely")
    return FILTERS["round"](value, precision, method)


def _center(text: str, width: int = 80) -> str:
    return _pad(text, "center", width, ())


def _format_filter(text: str, *arguments: Any, **keywords: Any) -> Any:
    return _percent(text, keywords or arguments)


def _plain(value: Any) -> Any:
    """``safe``: nothing is escaped here to begin with."""
    return value


def _escape(value: Any) -> str:
    _METER.get().room(6 * _text_length(value))
    return str(escape(str(value)))


_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "center": _center,
    "e": _escape,
    "escape": _escape,
    "format": _format_filter,
    "indent": _indent,
    "join": _join_filter,
    "replace": _replace,
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
        size = len(value) if isinstance(value, _CONTAINERS) else len(value) // 64 if isinstance(value, str) else 0
        _METER.get().step(1 + size)
        return _measured(function(*arguments, **keywords))

    return charged


@_charged
def _string(value: Any) -> str:
    _METER.get().room(_text_length(value))
    return str(value)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. Templates come from :meth:`compiled` alone, which puts the meters in."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    metered = staticmethod(_metered)
    measured = staticmethod(_measured)
    joined = staticmethod(_joined)
    sliced = staticmethod(_sliced)
    concat = staticmethod(_concatenated)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            autoescape=False,
            finalize=_printable,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.filters = {name: _charged(FILTERS[name]) for name in _JINJA_FILTERS}
        self.filters.update({name: _charged(function) for name, function in _OWN_FILTERS.items()})
        self.filters["string"] = _string
        self.globals = {
            "cycler": Cycler,
            "dict": dict,
            "joiner": Joiner,
            "namespace": _OpaqueNamespace,
            "raise_exception": _raise_exception,
            "range": _range,
            "strftime_now": _strftime_now,
        }
        self.binop_table.update({"%": _percent, "*": _times, "**": _power, "+": _plus})
        self._functions = frozenset({*self.globals.values(), self.metered, self.measured, self.joined, self.sliced})
        self._call_weight = 1

    def compiled(self, source: str) -> Template:
        """Compile a template, with meters where it loops, joins, slices and makes containers.

        Raises:
            LimitExceededError: The source is too long.
            jinja2.TemplateSyntaxError: It is no template.
            RecursionError, MemoryError, SyntaxError: It is nested too deeply.
        """
        if len(source) > LONGEST_SOURCE:
            raise LimitExceededError(f"it has more than {LONGEST_SOURCE} characters")
        with metered_by(Meter()):
            tree = self.parse(source)
            meters = _PutMeters()
            tree = meters.visit(tree)
            tree.set_environment(self)
            self._call_weight = meters.call_weight
            return self.from_string(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator, charged for."""
        _METER.get().step()
        return _measured(super().call_binop(context, operator, left, right))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute``, charged for."""
        _METER.get().step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``, charged for."""
        _METER.get().step()
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format``, with a check of what it would make."""
        if not isinstance(value, BuiltinMethodType) or not isinstance(value.__self__, str):
            return None
        text: str = value.__self__
        if value.__name__ == "format":
            return _Formatting(lambda *arguments, **keywords: _format(self, text, arguments, keywords))
        if value.__name__ == "format_map":
            return _Formatting(lambda keywords: _format(self, text, (), keywords))
        return None

    def call(self, context: Context, obj: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """A call, if it is of something known, charged for."""
        if isinstance(obj, Macro | BlockReference):
            _METER.get().step(self._call_weight)
            if isinstance(obj, Macro) and (obj.catch_varargs or obj.catch_kwargs):
                _weigh([arguments, _visible(keywords)])
            return super().call(context, obj, *arguments, **keywords)
        if isinstance(obj, LoopContext):
            _METER.get().step(self._call_weight)
            return super().call(context, obj, *(_metered(items, self._call_weight) for items in arguments), **keywords)
        if obj in (self.metered, self.joined, self.sliced, self.measured):
            return obj(*arguments)
        _METER.get().step()
        _weigh([arguments, _visible(keywords)])
        if isinstance(obj, BuiltinMethodType):
            return _measured(self._call_method(obj.__self__, obj.__name__, arguments, keywords))
        if (
            isinstance(obj, _Formatting | Joiner | Undefined)
            or (isinstance(obj, MethodType) and isinstance(obj.__self__, LoopContext | Cycler))
            or obj in self._functions
        ):
            return _measured(super().call(context, obj, *arguments, **keywords))
        raise SecurityError(f"{type(obj).__name__} may not be called")

    def _call_method(self, owner: Any, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        keywords = _visible(keywords)
        if isinstance(owner, str):
            if name in _SAFE_TEXT_METHODS:
                return getattr(owner, name)(*arguments, **keywords)
            if name == "replace":
                return _replace(owner, *arguments, **keywords)
            if name == "join" and len(arguments) == 1:
                return _join(owner, arguments[0])
            if name in _PADDING and arguments:
                return _pad(owner, name, arguments[0], arguments[1:])
            if name == "format":
                return _format(self, owner, arguments, keywords)
        for kind, names in _SAFE_METHODS.items():
            if isinstance(owner, kind) and name in names:
                return getattr(owner, name)(*arguments, **keywords)
        raise SecurityError(f"{type(owner).__name__}.{name} may not be called")


class _Formatting:
    """The method ``format`` of one text."""

    def __init__(self, function: Callable[..., str]) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> str:
        return self._function(*arguments, **keywords)


def _visible(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that the template wrote; Jinja adds some of its own."""
    return {name: value for name, value in keywords.items() if name not in ("_loop_vars", "_block_vars", "caller")}


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what to train on; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 # Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Keep the body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PutMeters(NodeTransformer):
    """Puts calls of the environment's meters into a syntax tree.

    Attributes:
        call_weight: Nodes of the largest macro or recursive loop: what a call may cost.
    """

    def __init__(self) -> None:
        self.call_weight = 1

    def generic_visit(self, node: nodes.Node, *_: Any, **__: Any) -> nodes.Node:
        """The node that takes the place of this one, whose children have been replaced already."""
        super().generic_visit(node)
        if isinstance(node, nodes.For):
            weight = _nodes_in(node)
            if node.recursive:
                self.call_weight = max(self.call_weight, weight)
            node.iter = _call("metered", node, cast(nodes.Expr, node.iter), nodes.Const(weight, lineno=node.lineno))
        elif isinstance(node, nodes.Macro | nodes.CallBlock | nodes.Block):
            self.call_weight = max(self.call_weight, _nodes_in(node))
        elif isinstance(node, nodes.Concat):
            return _call("joined", node, *node.nodes)
        elif isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return _call("measured", node, node)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            bounds = (node.arg.start, node.arg.stop, node.arg.step)
            missing = nodes.Const(None, lineno=node.lineno)
            return _call("sliced", node, node.node, *(bound or missing for bound in bounds))
        return node


def _call(name: str, at: nodes.Node, *arguments: nodes.Expr) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=at.lineno)
    return nodes.Call(function, list(arguments), [], None, None, lineno=at.lineno)


def _nodes_in(node: nodes.Node) -> int:
    return 1 + sum(map(_nodes_in, node.iter_child_nodes()))
