"""The hooks of the CPU engine. Importing this costs nothing: numba comes with :func:`myelin_engine`."""

from __future__ import annotations

from myelin.engine_api import Engine, EngineOptions, EngineSupport, hookimpl
from myelin_worker_cpu.formats import SUPPORTED_TYPES
from myelin_worker_cpu.support import ARCHITECTURES, ENGINE_NAME, RANK


@hookimpl
def myelin_engine_support() -> EngineSupport | None:
    """Every machine has a CPU: there is always a path, if not always a fast one."""
    return EngineSupport(name=ENGINE_NAME, types=SUPPORTED_TYPES, architectures=ARCHITECTURES, rank=RANK)


@hookimpl
def myelin_engine(name: str, options: EngineOptions) -> Engine | None:
    """Make the engine; kernels are compiled, or read from the cache, when it loads its stage."""
    if name != ENGINE_NAME:
        return None
    from myelin_worker_cpu.engine import CpuEngine

    return CpuEngine(options)
