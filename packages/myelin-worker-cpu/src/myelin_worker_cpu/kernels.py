"""Getting the compiled functions that a stage needs: from the cache on disk, or compiled now, with progress."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
from myelin.engine_api import GgmlType, Progress
from numba import types

from myelin_worker_cpu import cache, stage
from myelin_worker_cpu.formats import FORMATS
from myelin_worker_cpu.isa_here import ISA
from myelin_worker_cpu.matmul import compile_matmul
from myelin_worker_cpu.records import WIDTHS

_COMPILED: dict[str, Any] = {}
"""What this process has already; engines of one process share it."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The compiled functions of one stage.

    Attributes:
        run_stage, help_stage, stop_helpers: See :mod:`myelin_worker_cpu.stage`; the helpers' two are None for one thread.
        matmul: The address of the product for each type and block width.
    """

    run_stage: Any
    help_stage: Any
    stop_helpers: Any
    matmul: dict[tuple[GgmlType, int], int] = field(default_factory=dict)


def prepare(matrix_types: Collection[GgmlType], threads: int, progress: Progress) -> Kernels:
    """Compile or fetch what a stage with matrices of these types needs. Safe beside other processes that do the same."""
    names = ["run_stage"]
    if threads > 1:
        names += ["help_stage", "stop_helpers"]
    names += [f"matmul-{kind.name}-{width}" for kind in sorted(matrix_types) for width in WIDTHS]
    progress("compile", 0, len(names))
    folder = _folder()
    markers = None if folder is None else cache.Markers(folder, _processor())
    with contextlib.ExitStack() as stack:
        if folder is not None and markers is not None:
            stack.enter_context(_numba_cache(folder))
            if not all(name in _COMPILED or markers.has(name) for name in names):
                stack.enter_context(cache.compile_lock(folder))
        for done, name in enumerate(names, start=1):
            if name not in _COMPILED:
                _COMPILED[name] = _compile(name, cached=folder is not None)
                if markers is not None:
                    markers.set(name)
            progress("compile", done, len(names))
    return Kernels(
        run_stage=_COMPILED["run_stage"],
        help_stage=_COMPILED["help_stage"] if threads > 1 else None,
        stop_helpers=_COMPILED["stop_helpers"] if threads > 1 else None,
        matmul={
            (kind, width): _COMPILED[f"matmul-{kind.name}-{width}"].address for kind in matrix_types for width in WIDTHS
        },
    )


def _compile(name: str, *, cached: bool) -> Any:
    signatures = {
        "run_stage": types.void(*stage.STAGE_ARGUMENTS),
        "help_stage": types.void(*stage.HELPER_ARGUMENTS),
        "stop_helpers": types.void(types.int64),
    }
    if name in signatures:
        decorate = numba.njit(signatures[name], nogil=True, error_model="numpy", cache=cached)
        return decorate(getattr(stage, name))
    _, kind, width = name.split("-")
    return compile_matmul(FORMATS[GgmlType[kind]], int(width), cached=cached)


def _folder() -> Path | None:
    """The cache folder, or None where none can be made (then every start compiles)."""
    try:
        return cache.directory(ISA)
    except OSError:
        return None


def _processor() -> str:
    """What numba compiles for: its own index tells such processors apart, and so must our markers."""
    features: str = llvmlite.binding.get_host_cpu_features().flatten()
    return f"{llvmlite.binding.get_host_cpu_name()} {features} {numba.__version__}"


@contextlib.contextmanager
def _numba_cache(folder: Path) -> Iterator[None]:
    """Have numba keep what is decorated meanwhile in ``folder``."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before
