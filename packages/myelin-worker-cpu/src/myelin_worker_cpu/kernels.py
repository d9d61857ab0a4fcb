"""Getting the kernels that a stage needs: from the cache on disk, or compiled now, with progress."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numba.core.config

from myelin.engine_api import GgmlType, Progress
from myelin_worker_cpu import cache
from myelin_worker_cpu.attention import compile_attend, compile_remember
from myelin_worker_cpu.formats import FORMATS
from myelin_worker_cpu.isa_here import ISA
from myelin_worker_cpu.layer import compile_layer
from myelin_worker_cpu.matmul import compile_matmul
from myelin_worker_cpu.records import WIDTHS
from myelin_worker_cpu.stage import compile_stage, compile_stop

_log = logging.getLogger(__name__)

_COMPILED: dict[str, Any] = {}
"""What this process has already; engines of one process share it."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one stage. Calling ``stage`` or ``stop`` lets go of Python's lock meanwhile.

    Attributes:
        stage, stop: See :mod:`myelin_worker_cpu.stage`.
        layer, remember, attend: Addresses; see :mod:`myelin_worker_cpu.layer` and :mod:`myelin_worker_cpu.attention`.
        matmul: The address of the product for each type and block width.
    """

    stage: Callable[[int, int], None]
    stop: Callable[[int], None]
    layer: int
    remember: int
    attend: int
    matmul: dict[tuple[GgmlType, int], int]


def prepare(matrix_types: Collection[GgmlType], element_bytes: int, progress: Progress) -> Kernels:
    """Compile or fetch what a stage needs. Safe beside other processes that do the same.

    Args:
        matrix_types: Of the stage's matrices.
        element_bytes: Of a key or value.
        progress: Told the phase ``compile``.
    """
    work: dict[str, Callable[..., Any]] = {
        "stage": compile_stage,
        "stop": compile_stop,
        "layer": compile_layer,
        f"remember-{element_bytes}": partial(compile_remember, element_bytes),
        f"attend-{element_bytes}": partial(compile_attend, element_bytes),
    }
    for kind in sorted(matrix_types):
        for width in WIDTHS:
            work[_matmul_name(kind, width)] = partial(compile_matmul, FORMATS[kind], width)
    progress("compile", 0, len(work))
    done = 0

    def compile_all(markers: cache.Markers | None) -> None:
        nonlocal done
        for name in list(work)[done:]:
            if name not in _COMPILED:
                _COMPILED[name] = work[name](cached=markers is not None)
                if markers is not None:
                    markers.set(name)
            done += 1
            progress("compile", done, len(work))

    try:
        folder = cache.directory(ISA)
        markers = cache.Markers(folder, _processor())
        with contextlib.ExitStack() as stack:
            stack.enter_context(_numba_cache(folder))
            if not all(name in _COMPILED or markers.has(name) for name in work):
                stack.enter_context(cache.compile_lock(folder))
            compile_all(markers)
        cache.prune(folder)
    except OSError as error:  # no right to write, or a full disk: no reason to fail
        _log.warning("compiled kernels cannot be kept, so every start compiles them again: %s", error)
        compile_all(None)
    return Kernels(
        stage=ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(_COMPILED["stage"].address),
        stop=ctypes.CFUNCTYPE(None, ctypes.c_int64)(_COMPILED["stop"].address),
        layer=_COMPILED["layer"].address,
        remember=_COMPILED[f"remember-{element_bytes}"].address,
        attend=_COMPILED[f"attend-{element_bytes}"].address,
        matmul={
            (kind, width): _COMPILED[_matmul_name(kind, width)].address for kind in matrix_types for width in WIDTHS
        },
    )


def _matmul_name(kind: GgmlType, width: int) -> str:
    return f"matmul-{kind.name}-{width}"


def _processor() -> str:
    """What numba compiles for: its own index tells such processors apart, and so must our markers."""
    features: str = llvmlite.binding.get_host_cpu_features().flatten()
    return f"{llvmlite.binding.get_host_cpu_name()} {features} {numba.__version__}"


@contextlib.contextmanager
def _numba_cache(folder: Path) -> Iterator[None]:
    """Have numba keep what is decorated meanwhile in ``folder``."""
    config: Any = numba.core.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before
