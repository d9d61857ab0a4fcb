"""Fetching a stage's bytes in the background, over several connections, while the engine already reads them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextvars import copy_context
from typing import TypeGuard

from opentelemetry import trace

from myelin.errors import ModelError
from myelin.model.remote.file import RemoteFile
from myelin.model.remote.store import CELL_BYTES
from myelin.model.shard import ByteRange, ByteSource
from myelin.model.source import FetchProgress

CONNECTIONS = 6
"""Requests at once for one stage. Each writes what comes straight to the cache file: memory stays within a few MiB."""

REPORT_S = 0.1
_STOP_WAIT_S = 1.0


def is_remote(source: ByteSource) -> TypeGuard[RemoteFile]:
    """Whether a source's bytes come over the network."""
    return isinstance(source, RemoteFile)


class ShardFetch:
    """Brings ``ranges`` in, in their order. Readers need not wait for it: a read blocks for its own bytes alone.

    Args:
        parts: The model's files; those that aren't remote have everything already.
        ranges: The stage's bytes.
        progress: Told ``(done, total)`` in bytes, from several threads, one at a time.

    Attributes:
        total: Bytes of the ranges in remote files.
        seconds: How long it took; 0 while it lasts.

    Raises:
        ModelError: The disk has no room for what is missing.
    """

    def __init__(
        self,
        parts: Sequence[ByteSource],
        ranges: Iterable[ByteRange],
        progress: FetchProgress,
        connections: int = CONNECTIONS,
    ) -> None:
        self._files = {index: part for index, part in enumerate(parts) if is_remote(part)}
        for file in self._files.values():
            file.progress = None  # one who tells is enough
        self._ranges = [piece for piece in ranges if piece.part in self._files]
        self._progress = progress
        self._lock = threading.Lock()
        self._began = self._told = time.monotonic()
        self._stopped = False
        self._error: BaseException | None = None
        self.seconds = 0.0
        self.total = sum(piece.end - piece.start for piece in self._ranges)
        self._before = sum(file.fetched_bytes for file in self._files.values())
        self._queue = deque(
            cell
            for piece in self._ranges
            for cell in cells(piece)
            if self._files[cell.part].missing_bytes(cell.start, cell.end)
        )
        needed = sum(self._files[cell.part].missing_bytes(cell.start, cell.end) for cell in self._queue)
        if needed:
            self._files[self._queue[0].part].check_space(needed)
        count = min(connections, len(self._queue))
        self._cells = len(self._queue)
        # Each thread knows whose span it works for.
        self._threads = [
            threading.Thread(target=copy_context().run, args=(self._run,), name=f"fetch-{n}", daemon=True)
            for n in range(count)
        ]
        if self._ranges:
            self._report(force=True)
        for thread in self._threads:
            thread.start()

    @property
    def fetched_bytes(self) -> int:
        """What came over the network since this began."""
        return sum(file.fetched_bytes for file in self._files.values()) - self._before

    @property
    def finished(self) -> bool:
        """Everything is there."""
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self) -> None:
        """Wait for the last byte, and compare files that are whole with their checksums.

        Raises:
            ModelError: Something could not be fetched, or isn't what was published.
        """
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        for file in self._files.values():
            file.finish()
        self.seconds = time.monotonic() - self._began
        trace.get_current_span().add_event(
            "fetched",
            {
                "myelin.fetch.requests": self._cells,
                "myelin.fetch.bytes": self.fetched_bytes,
                "myelin.fetch.seconds": self.seconds,
            },
        )
        if self._ranges:
            self._report(force=True)

    def stop(self) -> None:
        """Give up: running requests end, readers that wait fail. For where nobody wants the bytes any more."""
        self._stopped = True
        for file in self._files.values():
            file.fail(ModelError(f"fetching {file.name} was given up", reason="interrupted"))
        for thread in self._threads:
            thread.join(_STOP_WAIT_S)

    def _run(self) -> None:
        try:
            while (cell := self._next()) is not None:
                file = self._files[cell.part]
                if not file.bring(cell.start, cell.end, self._report):
                    file.wait()
                if file.missing_bytes(cell.start, cell.end):
                    with self._lock:
                        self._queue.append(cell)  # another stage is at it
                self._report()
        except BaseException as error:
            if not self._stopped:
                self._error = self._error or error
            self._stopped = True
            told = error if isinstance(error, ModelError) else ModelError(f"fetching failed: {error}")
            for file in self._files.values():
                file.fail(told)

    def _next(self) -> ByteRange | None:
        """The next cell to fetch; None where there is none."""
        with self._lock:
            if self._stopped or not self._queue:
                return None
            return self._queue.popleft()

    def _report(self, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._told < REPORT_S:
            return
        with self._lock:
            self._told = now
            left = sum(self._files[piece.part].missing_bytes(piece.start, piece.end) for piece in self._ranges)
            in_flight = sum(file.in_flight for file in self._files.values())
            self._progress(max(0, min(self.total, self.total - left + in_flight)), self.total)


def cells(piece: ByteRange) -> Iterable[ByteRange]:
    """``piece`` cut at the borders of the cache's cells."""
    start = piece.start
    while start < piece.end:
        end = min(piece.end, (start // CELL_BYTES + 1) * CELL_BYTES)
        yield ByteRange(piece.part, start, end)
        start = end
