"""Triton's interpreter, made faster: it replaces the functions of ``triton.language`` anew at each call of a device
function, though they still are what earlier calls made of them. For tests; nothing of it is used on a GPU.
"""

from __future__ import annotations

import inspect
from typing import Any


def speed_up() -> None:
    """Replace each module's functions once in a kernel's run. Twice is fine; an interpreter that works otherwise is
    left alone."""
    from triton import language  # type: ignore[import-untyped]  # Triton has no types
    from triton.runtime import interpreter  # type: ignore[import-untyped]  # Triton has no types

    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None or getattr(interpreter, "_myelin_replaces_once", False):
        return
    known: dict[Any, frozenset[str]] = {}
    replaced: set[str] = set()
    scopes: list[Any] = []

    class AllScopes:
        """What the running kernel has replaced, all of it."""

        def restore(self) -> None:
            replaced.clear()
            while scopes:
                scopes.pop().restore()

    everything = AllScopes()

    def modules(function: Any) -> frozenset[str]:
        if function not in known:
            values = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            known[function] = frozenset(v.__name__ for v in values if v in (language, language.core))
        return known[function]

    def patch_once(function: Any) -> Any:
        needed = modules(function)
        if not needed <= replaced:
            found = patch(function)
            if not hasattr(found, "restore"):
                return found
            replaced.update(needed)
            scopes.append(found)
        return everything

    interpreter._patch_lang = patch_once
    interpreter._myelin_replaces_once = True  # our own mark
