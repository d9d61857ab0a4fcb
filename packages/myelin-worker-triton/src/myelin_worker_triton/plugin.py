"""The hooks of the Triton engine. Importing this costs nothing: PyTorch and Triton come with :func:`myelin_engine`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from myelin.engine_api import Engine, EngineOptions, EngineSupport, hookimpl
from myelin_worker_triton.support import ARCHITECTURES, ENGINE_NAME, RANK, SUPPORTED_TYPES

TILED_PROMPTS = "TRITON_ENGINE_TILED_PROMPTS"
"""Set to 1 in a node's environment, prompts go through tiled products: faster, but no longer bit for bit what decoding
the same tokens one by one gives."""

_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""What the drivers of NVIDIA (Linux, WSL) and AMD put there."""


@hookimpl
def myelin_engine_support() -> EngineSupport | None:
    """Whether there is a GPU, by looking for its driver's device file."""
    return EngineSupport(
        name=ENGINE_NAME,
        types=SUPPORTED_TYPES,
        architectures=ARCHITECTURES,
        rank=RANK,
        unavailable=_unavailable(),
    )


@hookimpl
def myelin_engine(name: str, options: EngineOptions) -> Engine | None:
    """Make the engine; kernels are compiled, or read from Triton's cache, when it loads its stage."""
    if name != ENGINE_NAME:
        return None
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what the kernels were measured with, in every version
    from myelin_worker_triton.engine import TritonEngine

    return TritonEngine(options, invariant=os.environ.get(TILED_PROMPTS, "0") in ("", "0"))


def _unavailable() -> str:
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "Triton's interpreter is on: for tests, and far too slow to be chosen"
    if not any(device.exists() for device in _DEVICES):
        return "no GPU driver on this machine"
    return ""
