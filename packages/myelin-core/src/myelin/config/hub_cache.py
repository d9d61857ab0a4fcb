"""Where the Hub's own tools keep files on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def default_hub_cache(environment: Mapping[str, str]) -> Path:
    """The folder, by the variables that those tools read."""
    if chosen := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(chosen).expanduser()
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser() / "hub"
