"""The built-in engine ``reference``: the NumPy oracle of :mod:`myelin.engine.reference`."""

from __future__ import annotations

from myelin.engine_api import Engine, EngineOptions, EngineSupport, hookimpl


@hookimpl
def myelin_engine_support() -> EngineSupport:
    """Runs anywhere, and is preferred nowhere."""
    from myelin.engine.reference import REFERENCE_TYPES
    from myelin.model.architecture import ARCHITECTURES

    return EngineSupport("reference", types=REFERENCE_TYPES, architectures=frozenset(ARCHITECTURES), rank=0)


@hookimpl
def myelin_engine(name: str, options: EngineOptions) -> Engine | None:
    """Make the engine, where it is the one asked for."""
    if name != "reference":
        return None
    from myelin.engine.reference import ReferenceEngine

    return ReferenceEngine(options)
