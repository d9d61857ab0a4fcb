"""The cache folder: which files there are, what was said of them last, and how they go.

``files/<key>/`` is one version of one file (:mod:`.store`), ``known/<key>.json`` what a server said of an address: with
it, a commit is never asked about twice, and what was fetched once can be used without a connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from myelin.errors import ModelError
from myelin.model.remote.extents import Extents
from myelin.model.remote.file import RemoteFile
from myelin.model.remote.http import Address, Answer, HttpClient, HttpFile
from myelin.model.remote.journal import Kind, records
from myelin.model.remote.store import About, CacheFile, remove_unused, write_whole
from myelin.model.source import FetchProgress


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A file of the cache.

    Attributes:
        folder: Where it lies.
        about: What it is.
        held_bytes: How much of it was fetched.
        used: When it was last fetched to or opened, in seconds since 1970.
    """

    folder: Path
    about: About
    held_bytes: int
    used: float


class ModelCache:
    """The cache in ``root``, which need not exist."""

    def __init__(self, root: Path) -> None:
        self._files = root / "files"
        self._known = root / "known"

    def open(
        self,
        client: HttpClient | None,
        address: Address,
        source: str,
        name: str,
        answer: Answer,
        progress: FetchProgress | None = None,
    ) -> RemoteFile:
        """The file that ``answer`` tells of, as far as it is here; without ``client``, it stays as it is.

        Args:
            client: Connections for what is missing.
            address: Where it is.
            source: The same for people, and without what changes from one time to the next.
            name: The file's own.
            answer: What the server said of it, now or once.
            progress: As :class:`RemoteFile` takes it.
        """
        about = About(source, name, answer.etag, answer.size, answer.sha256)
        folder = self._files / _key(f"{source}\n{answer.etag}\n{answer.size}")
        store = CacheFile(folder, about)
        with contextlib.suppress(OSError):
            os.utime(folder / "about.json")
        return RemoteFile(store, HttpFile(client, address, answer) if client is not None else None, progress)

    def remember(self, asked: str, answer: Answer) -> None:
        """Keep what a server said of ``asked``."""
        try:
            self._known.mkdir(parents=True, exist_ok=True)
            # Where it redirects to is signed, and over in an hour.
            write_whole(self._place(asked), json.dumps(asdict(replace(answer, location=""))))
        except OSError as error:
            raise ModelError(
                f"nothing can be kept in {self._known}: {error.strerror or error}",
                "Name another cache folder (MYELIN_MODEL_CACHE_DIR).",
                reason="model-cache",
            ) from None

    def recall(self, asked: str) -> Answer | None:
        """What a server said of ``asked`` last; None where it never did."""
        try:
            noted = json.loads(self._place(asked).read_text("utf-8"))
            return Answer(**noted) if isinstance(noted["size"], int) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def entries(self) -> list[CacheEntry]:
        """Every file, the last used first."""
        found: list[CacheEntry] = []
        for folder in self._files.glob("*"):
            about = About.read(folder)
            if about is not None:
                used = max(_changed(folder / "about.json"), _changed(folder / "journal"))
                found.append(CacheEntry(folder, about, _held_bytes(folder, about.size), used))
        return sorted(found, key=lambda entry: -entry.used)

    def prune(self, *, unused_for_s: float = 0.0, keep_bytes: int = 0) -> Iterator[CacheEntry]:
        """Delete files, the longest unused first; those in use stay.

        Args:
            unused_for_s: Only those not used for so long.
            keep_bytes: Stop once no more than so many bytes are held; 0 deletes all.

        Yields:
            What was deleted.
        """
        entries = self.entries()
        held = sum(entry.held_bytes for entry in entries)
        now = time.time()
        for entry in reversed(entries):
            if (keep_bytes and held <= keep_bytes) or now - entry.used < unused_for_s:
                continue
            if remove_unused(entry.folder):
                held -= entry.held_bytes
                yield entry

    def _place(self, asked: str) -> Path:
        return self._known / f"{_key(asked)}.json"


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _held_bytes(folder: Path, size: int) -> int:
    there = Extents()
    try:
        data = (folder / "journal").read_bytes()
    except OSError:
        return 0
    for record in records(data, size):
        if record.kind is Kind.THERE:
            there.add(record.start, record.end)
        else:
            there.remove(record.start, record.end)
    return there.total
