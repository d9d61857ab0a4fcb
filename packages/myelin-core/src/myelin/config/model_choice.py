"""Which model the settings mean, where several of them could name one."""

from __future__ import annotations

from pathlib import Path

from myelin.config.settings import Layer, Settings
from myelin.errors import ConfigError


def model_uri(settings: Settings) -> str:
    """The model's source, spelt as sources are.

    Three settings can name one: ``model.source``, ``model.gguf_local_path``, and the repository (``model.gguf_repo``
    with ``gguf_file`` and ``gguf_revision``). The one that was set on the highest layer wins, and on the same layer
    the one that comes first in this list. Where it is the repository, ``model.cached_model_host_path`` is used in its
    place.

    Raises:
        ConfigError: The cached copy isn't there.
    """
    model = settings.model
    candidates: list[tuple[Layer, str]] = []
    if model.source:
        candidates.append((settings.origin("model.source").layer, model.source))
    if model.gguf_local_path is not None:
        candidates.append((settings.origin("model.gguf_local_path").layer, str(model.gguf_local_path)))
    repository_keys = ("model.gguf_repo", "model.gguf_file", "model.gguf_revision", "model.cached_model_host_path")
    candidates.append((max(settings.origin(key).layer for key in repository_keys), ""))
    # `max` keeps the first of equals.
    _, uri = max(candidates, key=lambda candidate: candidate[0])
    if uri:
        return uri
    if model.cached_model_host_path is not None:
        return str(_cached_copy(model.cached_model_host_path, model.gguf_file))
    revision = f"@{model.gguf_revision}" if model.gguf_revision else ""
    return f"hf:{model.gguf_repo}/{model.gguf_file}{revision}"


def _cached_copy(path: Path, file: str) -> Path:
    copy = path / Path(file).name if path.is_dir() else path
    if not copy.is_file():
        raise ConfigError(
            f"There is no cached copy of the model at {copy}",
            "mend model.cached_model_host_path, or unset it to have the model fetched",
        )
    return copy
