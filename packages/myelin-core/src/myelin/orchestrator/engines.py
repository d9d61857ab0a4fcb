"""Which engine computes the stages: the best one that can, or the one that was named, if it can."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from myelin.engine.contract import EngineSupport
from myelin.errors import EngineError
from myelin.model.facts import TensorInfo

AUTO = "auto"


def choose_engine(
    name: str, supports: Sequence[EngineSupport], architecture: str, tensors: Collection[TensorInfo]
) -> EngineSupport:
    """The engine to use. Pure.

    Args:
        name: An engine's, or ``auto``: of those that run here and compute the model, the one with the highest rank.
        supports: What each installed engine says of itself.
        architecture: The model's.
        tensors: Those that the stages need.

    Raises:
        EngineError: There is none; the first tensor and its type are named where that is why.
    """
    if name != AUTO:
        return _named(name, supports, architecture, tensors)
    ranked = sorted(supports, key=lambda support: (-support.rank, support.name))
    able = [s for s in ranked if not s.unavailable and not why_not(s, architecture, tensors)]
    if able:
        return able[0]
    reasons = [why_not(support, architecture, tensors) or support.unavailable for support in ranked]
    raise EngineError(
        "no engine that is installed computes this model" + (f": {reasons[0]}" if reasons else ""),
        "install another engine, or use another quantization of the model; `myelin plugins` lists what there is",
        reason="no-engine",
    )


def _named(
    name: str, supports: Sequence[EngineSupport], architecture: str, tensors: Collection[TensorInfo]
) -> EngineSupport:
    support = next((each for each in supports if each.name == name), None)
    if support is None:
        raise EngineError(
            f"no engine {name!r} is installed",
            f"use one of {', '.join(sorted(each.name for each in supports)) or '(none is installed)'}, or {AUTO}",
            reason="no-engine",
        )
    if support.unavailable and not support.types:
        raise EngineError(
            f"the engine {name} can't be used: {support.unavailable}", f"use another, or {AUTO}", reason="no-engine"
        )
    # Whether this machine could run it doesn't matter for a named engine: its nodes may be other machines, and they
    # check.
    problem = why_not(support, architecture, tensors)
    if problem:
        raise EngineError(
            problem, f"use another engine ({AUTO} finds one), or another quantization", reason="unsupported-model"
        )
    return support


def why_not(support: EngineSupport, architecture: str, tensors: Collection[TensorInfo]) -> str:
    """Why the engine doesn't compute the model; empty where it does."""
    if architecture not in support.architectures:
        return f"the engine {support.name} does not compute models of the architecture {architecture}"
    for tensor in tensors:
        if tensor.ggml_type not in support.types:
            kind = tensor.ggml_type.name
            return f"the engine {support.name} does not compute the type {kind} of the tensor {tensor.name}"
    return ""
