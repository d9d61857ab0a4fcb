"""A remote file as a byte source: what is read is fetched first, unless it is in the cache already."""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable

from myelin.errors import ModelError
from myelin.model.remote.http import HttpFile
from myelin.model.remote.store import CELL_BYTES, CacheFile
from myelin.model.source import FetchProgress

LONGEST_REQUEST = 16 << 20
"""Bytes that one read asks for in one request."""

_WAIT_S = 0.02
_PIECE = 1 << 20


class RemoteFile:
    """See :class:`~myelin.model.shard.ByteSource`; thread-safe.

    A read blocks until its bytes are there: fetched by this thread, by another one, or by another process that shares
    the cache. Nothing is fetched twice.

    Args:
        store: Its file in the cache.
        http: Where its bytes come from; None to use only what is in the cache.
        progress: Told ``(fetched_bytes, 0)`` as bytes come that a read asked for; what it raises ends the read.

    Attributes:
        fetched_bytes: What came over the network by this object.
        progress: As given; None where nobody is to be told any more.
    """

    def __init__(self, store: CacheFile, http: HttpFile | None, progress: FetchProgress | None = None) -> None:
        self.fetched_bytes = 0
        self.progress = progress
        self._store = store
        self._http = http
        self._lock = threading.Lock()
        self._in_flight = 0
        self._failure: ModelError | None = None
        self._closed = False
        self._fetching = 0

    @property
    def name(self) -> str:
        """The file's name."""
        return self._store.about.name

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self._store.about.size

    @property
    def fingerprint(self) -> str:
        """Tells this version of the file from every other; empty where the server gave no version."""
        about = self._store.about
        return f"{about.source} {about.etag} {about.size}" if about.etag else ""

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``; :class:`ModelError` where they can't be had."""
        target = bytearray(length)
        self.read_into(offset, memoryview(target))
        return bytes(target)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` (writable bytes) from ``offset``; errors as :meth:`read_at`."""
        end = offset + target.nbytes
        if offset < 0 or end > self.size:
            raise ModelError(
                f"{self.name} could not be read at byte {offset}: the file ends at {self.size}",
                "It was cut short where it was published: name another file.",
                reason="model-unreadable",
            )
        if not target.nbytes:
            return
        while True:
            self._have(offset, end)
            if self._store.checked(offset, end):
                break
        self._store.read_into(offset, target)

    # Fetching --------------------------------------------------------------------------------------------------------

    def missing_bytes(self, start: int, end: int) -> int:
        """How many of ``[start, end)`` are not there yet."""
        return sum(last - first for first, last in self._store.missing(start, end))

    @property
    def in_flight(self) -> int:
        """Bytes that have come and aren't noted yet."""
        return self._in_flight

    def bring(self, start: int, end: int, arrived: Callable[[], None] | None = None) -> bool:
        """Fetch what is missing of ``[start, end)``, or of its beginning; False where somebody else is at it.

        Args:
            arrived: Called as bytes come.

        Raises:
            ModelError: It can't be fetched.
        """
        if self._http is None:
            raise ModelError(
                f"{self.name} is not whole in the cache (bytes {start} to {end} are missing), and fetching is "
                "switched off",
                "Fetch it once with a connection (without offline mode).",
                reason="model-offline",
            )
        if not self._http.answer.has_ranges:
            start, end = 0, self.size  # all of it or nothing
        with self._lock:
            self._check_open()
            self._fetching += 1
        try:
            claim = self._store.claim(start, end)
            if claim is None:
                return False
            try:
                for first, last in self._store.missing(*claim):
                    self._fetch(self._http, first, last, arrived)
            finally:
                self._store.release(*claim)
        finally:
            with self._lock:
                self._fetching -= 1
                idle = self._closed and not self._fetching
            if idle:
                self._free()
        return True

    def wait(self) -> None:
        """For a moment, or until something changes; then look what other processes have brought."""
        self._store.wait(_WAIT_S)
        self._store.refresh()

    def check_space(self, needed: int) -> None:
        """See :meth:`CacheFile.check_space`."""
        self._store.check_space(needed)

    def fail(self, error: ModelError) -> None:
        """Let every read that waits, and every later one that needs the network, fail with ``error``."""
        self._failure = error
        self._store.wake()

    def finish(self) -> None:
        """Compare the file with its SHA-256, if it is whole now and the server gave one.

        Raises:
            ModelError: It isn't the file that was published (``model-corrupt``); what was fetched is forgotten.
        """
        store = self._store
        if not store.about.sha256 or store.missing(0, self.size) or store.verified:
            return
        digest = hashlib.sha256()
        buffer = bytearray(_PIECE)
        for start in range(0, self.size, _PIECE):
            view = memoryview(buffer)[: min(_PIECE, self.size - start)]
            self.read_into(start, view)
            digest.update(view)
        if digest.hexdigest() != store.about.sha256:
            store.drop_all()
            raise ModelError(
                f"{self.name} is not what was published: its SHA-256 differs",
                "It was changed on its way here. It has been taken out of the cache: try again, by another network.",
                reason="model-corrupt",
            )
        store.set_verified()

    def close(self) -> None:
        """Free what it holds, once running fetches have noticed; twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = not self._fetching
        if idle:
            self._free()

    def _free(self) -> None:
        self._store.close()
        if self._http is not None:
            self._http.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise ModelError(f"{self.name} is closed", reason="model-closed")

    def _have(self, start: int, end: int) -> None:
        """Wait until ``[start, end)`` is there, fetching what nobody else does."""
        if not self._store.missing(start, end):
            return
        self._store.check_space(self.missing_bytes(start, end))
        while missing := self._store.missing(start, end):
            first, last = missing[0]
            if not self.bring(first, min(last, first + LONGEST_REQUEST), self._tell):
                with self._lock:
                    self._check_open()
                self.wait()

    def _fetch(self, http: HttpFile, start: int, end: int, arrived: Callable[[], None] | None) -> None:
        """Fetch a hole; noted cell by cell."""
        at = noted = start
        checksum = 0

        def sink(chunk: bytes) -> None:
            nonlocal at, noted, checksum
            while chunk:
                with self._lock:
                    self._check_open()
                border = min(end, (at // CELL_BYTES + 1) * CELL_BYTES)
                piece, chunk = chunk[: border - at], chunk[border - at :]
                self._store.write(at, piece)
                checksum = zlib.crc32(piece, checksum)
                at += len(piece)
                self._count(len(piece))
                if at == border:
                    self._store.note(noted, at, checksum)
                    self._settle(at - noted)
                    noted, checksum = at, 0
                if arrived is not None:
                    arrived()

        try:
            http.fetch(start, end, sink)
        finally:
            self._settle(at - noted)

    def _tell(self) -> None:
        progress = self.progress
        if progress is not None:
            progress(self.fetched_bytes, 0)

    def _count(self, size: int) -> None:
        with self._lock:
            self.fetched_bytes += size
            self._in_flight += size

    def _settle(self, size: int) -> None:
        with self._lock:
            self._in_flight -= size
