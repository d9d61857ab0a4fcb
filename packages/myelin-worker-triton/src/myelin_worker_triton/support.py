"""What the engine computes: types and architectures. Imports nothing heavy."""

from __future__ import annotations

from myelin.engine_api import GgmlType
from myelin_worker_triton.layouts import LAYOUTS

ENGINE_NAME = "triton"
RANK = 40
"""Below the CPU engine's 50: ``auto`` doesn't choose what no GPU has measured yet. ``--engine triton`` does."""
ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3", "gemma3"})
SUPPORTED_TYPES = frozenset(GgmlType[name] for name in LAYOUTS)
