"""Model source ``path``: a GGUF file on this machine, or the first part of a split one (the others lie beside it)."""

from __future__ import annotations

import re
from pathlib import Path

from myelin.model.local import open_files
from myelin.model.shard import ByteSource
from myelin.model.source import FetchProgress, ModelSource, SourceOptions
from myelin.plugin import hookimpl

# A scheme of two letters or more belongs to another source; one letter is a drive.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


class PathSource:
    """Files on this machine. ``uri`` is the absolute path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def uri(self) -> str:
        """The absolute path."""
        return str(self._path)

    def open(self, progress: FetchProgress | None = None) -> tuple[ByteSource, ...]:
        """Open all parts; :class:`ModelError` where one is missing or can't be read."""
        return open_files(self._path)


@hookimpl
def myelin_model_source(uri: str, options: SourceOptions) -> ModelSource | None:
    """Everything without a scheme is a path; ``~`` is the home folder."""
    if _SCHEME.match(uri) or not uri:
        return None
    return PathSource(Path(uri).expanduser().absolute())
