"""The sandbox itself: compiles a template with its meters, renders it, and decides what it may call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner

from myelin.model.template_sandbox import charges
from myelin.model.template_sandbox.charges import measured, metered, printable, weighed
from myelin.model.template_sandbox.filters import allowed_filters
from myelin.model.template_sandbox.functions import OpaqueNamespace, counted_range, raise_exception, strftime_now
from myelin.model.template_sandbox.meter import LimitExceededError, Meter, current_meter, metered_by
from myelin.model.template_sandbox.methods import (
    PADDING,
    SAFE_METHODS,
    SAFE_TEXT_METHODS,
    format_text,
    join,
    pad,
    replace,
)
from myelin.model.template_sandbox.operators import percent, plus, power, times
from myelin.model.template_sandbox.syntax import Generation, PutMeters

LONGEST_SOURCE = 128 << 10


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


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. Templates come from :meth:`compiled` alone, which puts the meters in."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    metered = staticmethod(charges.metered)
    measured = staticmethod(charges.measured)
    joined = staticmethod(charges.joined)
    sliced = staticmethod(charges.sliced)
    concat = staticmethod(charges.concatenated)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            autoescape=False,
            finalize=printable,
            extensions=["jinja2.ext.loopcontrols", Generation],
        )
        self.filters = allowed_filters()
        self.globals = {
            "cycler": Cycler,
            "dict": dict,
            "joiner": Joiner,
            "namespace": OpaqueNamespace,
            "raise_exception": raise_exception,
            "range": counted_range,
            "strftime_now": strftime_now,
        }
        self.binop_table.update({"%": percent, "*": times, "**": power, "+": plus})
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
            meters = PutMeters()
            tree = meters.visit(tree)
            tree.set_environment(self)
            self._call_weight = meters.call_weight
            return self.from_string(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator, charged for."""
        current_meter().step()
        return measured(super().call_binop(context, operator, left, right))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute``, charged for."""
        current_meter().step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """``obj[argument]``, charged for."""
        current_meter().step()
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format``, with a check of what it would make."""
        if not isinstance(value, BuiltinMethodType) or not isinstance(value.__self__, str):
            return None
        text: str = value.__self__
        if value.__name__ == "format":
            return _Formatting(lambda *arguments, **keywords: format_text(self, text, arguments, keywords))
        if value.__name__ == "format_map":
            return _Formatting(lambda keywords: format_text(self, text, (), keywords))
        return None

    def call(self, context: Context, obj: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """A call, if it is of something known, charged for."""
        if isinstance(obj, Macro | BlockReference):
            current_meter().step(self._call_weight)
            if isinstance(obj, Macro) and (obj.catch_varargs or obj.catch_kwargs):
                weighed([arguments, _visible(keywords)])
            return super().call(context, obj, *arguments, **keywords)
        if isinstance(obj, LoopContext):
            current_meter().step(self._call_weight)
            return super().call(context, obj, *(metered(items, self._call_weight) for items in arguments), **keywords)
        if obj in (self.metered, self.joined, self.sliced, self.measured):
            return obj(*arguments)
        current_meter().step()
        weighed([arguments, _visible(keywords)])
        if isinstance(obj, BuiltinMethodType):
            return measured(self._call_method(obj.__self__, obj.__name__, arguments, keywords))
        if (
            isinstance(obj, _Formatting | Joiner | Undefined)
            or (isinstance(obj, MethodType) and isinstance(obj.__self__, LoopContext | Cycler))
            or obj in self._functions
        ):
            return measured(super().call(context, obj, *arguments, **keywords))
        raise SecurityError(f"{type(obj).__name__} may not be called")

    def _call_method(self, owner: Any, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        keywords = _visible(keywords)
        if isinstance(owner, str):
            if name in SAFE_TEXT_METHODS:
                return getattr(owner, name)(*arguments, **keywords)
            if name == "replace":
                return replace(owner, *arguments, **keywords)
            if name == "join" and len(arguments) == 1:
                return join(owner, arguments[0])
            if name in PADDING and arguments:
                return pad(owner, name, arguments[0], arguments[1:])
            if name == "format":
                return format_text(self, owner, arguments, keywords)
        for kind, names in SAFE_METHODS.items():
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
