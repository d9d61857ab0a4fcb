"""Made-up distributions, installed nowhere: their metadata is text."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Mapping
from typing import Any


class MadeUpDistribution(importlib.metadata.Distribution):
    """A distribution whose files are given as text."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = dict(files)

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


def made_up(name: str, entries: str, *, version: str = "1.0", requires: tuple[str, ...] = ()) -> MadeUpDistribution:
    """A distribution with the content of an ``entry_points.txt``."""
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    return MadeUpDistribution({"METADATA": "\n".join(lines) + "\n", "entry_points.txt": textwrap.dedent(entries)})
