"""What the CPU engine computes, known without numba."""

from __future__ import annotations

ENGINE_NAME = "cpu"
RANK = 50
ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3", "gemma3"})
