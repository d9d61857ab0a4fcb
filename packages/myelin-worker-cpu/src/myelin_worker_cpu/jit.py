"""The decorators through which this package meets numba; typed, as numba's own are not.

There are three kinds of compiled code here. *Intrinsics* emit LLVM IR and are inlined where they are called. *Inlined*
functions are plain Python that numba compiles into whoever calls them. *Kernels* are compiled on their own, kept in
the cache on disk, and called by address: a caller then needs no recompiling, and no kernel is optimised again inside
another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numba.extending


def intrinsic(generator: Callable[..., Any]) -> Any:
    """Make an intrinsic: ``generator(context, *types)`` returns its signature and the function that emits its code."""
    return numba.extending.intrinsic(generator)


def intrinsic_of_constants(generator: Callable[..., Any]) -> Any:
    """An intrinsic some of whose arguments must be constants (their types have a ``literal_value``)."""
    return numba.extending.intrinsic(prefer_literal=True)(generator)


def inlined(function: Callable[..., Any]) -> Any:
    """A function for other compiled code only."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def kernel(function: Callable[..., None], arguments: int, *, cached: bool) -> Any:
    """Compile a function of ``arguments`` 64-bit integers that returns nothing; its ``address`` can be called.

    Nothing may hold a reference to another compiled function through its closure: that would spoil the cache's key.
    """
    signature = numba.types.void(*[numba.types.int64] * arguments)
    return numba.cfunc(signature, cache=cached)(function)
