"""Model sources: where a GGUF comes from, and how its files are opened.

The spellings (``path``, ``pkg:``, ``hf:``, ``https:``) are recognised by plugins of the group ``myelin.sources``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from myelin.model.shard import ByteSource

FetchProgress = Callable[[int, int], None]
"""``progress(bytes_done, bytes_total)``; the total is 0 where it isn't known."""


PUBLIC_HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What sources may use.

    Attributes:
        cache_dir: Where remote files are kept.
        token: For gated repositories (``HF_TOKEN``); sent to the Hub alone, never to where it redirects.
        offline: Use only what is on disk.
        hub_endpoint: Base URL of the Hub (``HF_ENDPOINT``).
        hub_cache_dir: Where the Hub's own tools keep files on this machine, which are used in place; None not to look.
    """

    cache_dir: Path
    token: SecretStr | None = None
    offline: bool = False
    hub_endpoint: str = PUBLIC_HUB
    hub_cache_dir: Path | None = None


class ModelSource(Protocol):
    """A recognised source, not yet opened."""

    @property
    def uri(self) -> str:
        """The canonical spelling: what a node is given to open the same model (revisions resolved once opened)."""

    def open(self, progress: FetchProgress | None = None) -> tuple[ByteSource, ...]:
        """Open the model's files, in order of their part numbers. Blocking.

        A source may fetch them whole first, telling ``progress``, or give files whose bytes come as they are read.

        Raises:
            ModelError: It isn't there, a part is missing, or it can't be fetched.
        """
