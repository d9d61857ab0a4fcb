"""The built-in engine ``reference``: the NumPy oracle of :mod:`myelin.engine.reference`."""

from __future__ import annotations

from myelin.engine_api import Engine, EngineOptions, EngineSupport, hookimpl

ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3", "gemma3"})


@hookimpl
def myelin_engine_support() -> EngineSupport:
    """Runs anywhere, and is preferred nowhere."""
    from myelin.engine.reference import REFERENCE_TYPES

    return EngineSupport("reference", types=REFERENCE_TYPES, architectures=ARCHITECTURES, rank=0)


@hookimpl
def myelin_engine(name: str, options: EngineOptions) -> Engine | None:
    """Make the engine, where it is the one asked for."""
    if name != "reference":
        return None
    from myelin.engine.reference import ReferenceEngine

    return ReferenceEngine(options)
