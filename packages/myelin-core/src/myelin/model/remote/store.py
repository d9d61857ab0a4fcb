"""One file of the cache: of the original's full size, with holes where nothing was fetched yet.

Its folder holds the file under its own name (any GGUF reader can open it once what it reads is there), ``journal``
(:mod:`.journal`), ``lock`` (:mod:`.locks`) and ``about.json``. The file is divided into *cells* of
:data:`CELL_BYTES`; whoever fetches bytes of a cell holds that cell's lock meanwhile, so that no two processes, threads
or stages fetch the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import zlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from myelin.errors import ModelError
from myelin.model.remote.extents import Extents
from myelin.model.remote.journal import RECORD_BYTES, Kind, Record, records
from myelin.model.remote.locks import ByteLocks

CELL_BYTES = 4 << 20
"""What one connection fetches at a time, and loses at most where its process is killed."""

_IN_USE = 1 << 40  # this byte of the lock file is held, shared, by whoever has the file open
_MENDING = _IN_USE + 1
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class About:
    """What ``about.json`` says.

    Attributes:
        source: Where the file is from, fit for people: no signature, no token.
        name: Its name.
        etag: Which version of it.
        size: Its bytes in all.
        sha256: Its checksum in hexadecimal digits, where the server gives it.
    """

    source: str
    name: str
    etag: str
    size: int
    sha256: str = ""

    @classmethod
    def read(cls, folder: Path) -> About | None:
        """What the folder's ``about.json`` says; None where there is no such thing."""
        try:
            noted = json.loads((folder / "about.json").read_text("utf-8"))
            source, name, etag, sha256 = (str(noted[key]) for key in ("source", "name", "etag", "sha256"))
            return cls(source, name, etag, int(noted["size"]), sha256)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def write_whole(path: Path, text: str) -> None:
    """Write a small file, whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


class CacheFile:
    """A cache file that is open. Thread-safe.

    Raises:
        ModelError: The folder can't be made or written.
    """

    def __init__(self, folder: Path, about: About) -> None:
        self.folder = folder
        self.about = about
        self.path = folder / about.name
        self._changed = threading.Condition()
        self._there = Extents()
        self._checked = Extents()
        self._records: list[tuple[int, int, int]] = []
        self._journal_end = 0
        self._cells: set[int] = set()
        self._data = self._journal = -1
        with self._trouble():
            folder.mkdir(parents=True, exist_ok=True)
            self._locks = ByteLocks(folder / "lock")
        try:
            self._open(folder, about)
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path, about: About) -> None:
        with self._trouble():
            self._locks.acquire(_IN_USE, shared=True)
            if About.read(folder) != about:
                write_whole(folder / "about.json", json.dumps(asdict(about)))
            self._data = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.fstat(self._data).st_size != about.size:
                os.ftruncate(self._data, about.size)
            self._journal = os.open(folder / "journal", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._align_journal()
            self.refresh()

    # What is there ---------------------------------------------------------------------------------------------------

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The holes in ``[start, end)``, as far as this process knows."""
        with self._changed:
            return self._there.missing(start, end)

    def refresh(self) -> None:
        """Read what other processes have noted since."""
        with self._changed:
            while data := os.pread(self._journal, 1 << 16, self._journal_end):
                whole = len(data) - len(data) % RECORD_BYTES
                if not whole:
                    return
                for record in records(data[:whole], self.about.size):
                    self._take(record)
                self._journal_end += whole

    def wait(self, seconds: float) -> None:
        """Until something changed in this process, or a while."""
        with self._changed:
            self._changed.wait(seconds)

    def wake(self) -> None:
        """End every :meth:`wait`."""
        with self._changed:
            self._changed.notify_all()

    def _take(self, record: Record) -> None:
        entry = (record.start, record.end, record.checksum)
        at = bisect_left(self._records, entry)
        known = at < len(self._records) and self._records[at] == entry
        if record.kind is Kind.THERE:
            if not known:
                insort(self._records, entry)
            self._there.add(record.start, record.end)
        elif known:
            del self._records[at]
            self._there.remove(record.start, record.end)
            self._checked.remove(record.start, record.end)

    # Fetching --------------------------------------------------------------------------------------------------------

    def claim(self, start: int, end: int) -> tuple[int, int] | None:
        """Claim the cells of ``[start, end)`` from its beginning on, as far as nobody else has them.

        Returns:
            The part of ``[start, end)`` that is ours until :meth:`release`; None where another has the first cell.
        """
        cell = start // CELL_BYTES
        last = (end - 1) // CELL_BYTES
        with self._changed, self._trouble():
            while cell <= last and cell not in self._cells and self._locks.acquire(cell):
                self._cells.add(cell)
                cell += 1
        claimed = min(end, cell * CELL_BYTES)
        if claimed <= start:
            return None
        self.refresh()
        return start, claimed

    def release(self, start: int, end: int) -> None:
        """Give claimed cells back."""
        with self._changed:
            for cell in range(start // CELL_BYTES, (end - 1) // CELL_BYTES + 1):
                self._locks.release(cell)
                self._cells.discard(cell)
            self._changed.notify_all()

    def write(self, at: int, data: bytes) -> None:
        """Put bytes of a claimed range in place. Raises :class:`ModelError` (``model-cache``) on a full disk."""
        view = memoryview(data)
        with self._trouble():
            while view.nbytes:
                count = os.pwrite(self._data, view, at)
                view, at = view[count:], at + count

    def note(self, start: int, end: int, checksum: int) -> None:
        """Note that ``[start, end)`` is in place, with the CRC-32 of its bytes."""
        self._append(Record(Kind.THERE, start, end, checksum))
        with self._changed:
            self._take(Record(Kind.THERE, start, end, checksum))
            self._checked.add(start, end)
            self._changed.notify_all()

    def check_space(self, needed: int) -> None:
        """Raises :class:`ModelError` where the disk has no room for ``needed`` more bytes."""
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise ModelError(
                f"{self.folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are still to come",
                "Free some space there (myelin cache prune) or name another cache folder (MYELIN_MODEL_CACHE_DIR).",
                reason="model-cache",
            )

    # Reading ---------------------------------------------------------------------------------------------------------

    def checked(self, start: int, end: int) -> bool:
        """Compare the checksums of what ``[start, end)`` touches, where this process has not yet; the wrong is dropped.

        Returns:
            Whether all of it was right.
        """
        with self._changed:
            at = max(0, bisect_left(self._records, (start, 0, 0)) - 1)
            doubtful: list[tuple[int, int, int]] = []
            while at < len(self._records) and self._records[at][0] < end:
                record = self._records[at]
                if record[1] > start and self._checked.missing(record[0], record[1]):
                    doubtful.append(record)
                at += 1
        right = True
        for first, last, checksum in doubtful:
            if self._checksum(first, last) == checksum:
                with self._changed:
                    self._checked.add(first, last)
            else:
                right = False
                self.drop(first, last, checksum)
        return right

    def drop(self, start: int, end: int, checksum: int) -> None:
        """Forget a range whose bytes are wrong."""
        self._append(Record(Kind.DROPPED, start, end, checksum))
        self.refresh()

    def drop_all(self) -> None:
        """Forget everything."""
        with self._changed:
            known = list(self._records)
        for start, end, checksum in known:
            self.drop(start, end, checksum)
        (self.folder / "verified").unlink(missing_ok=True)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with bytes that are there."""
        with self._trouble():
            while target.nbytes:
                count = os.preadv(self._data, [target], offset)
                if not count:
                    raise OSError(0, "the file was cut short")
                offset += count
                target = target[count:]

    @property
    def verified(self) -> bool:
        """The whole file was compared with its SHA-256."""
        return (self.folder / "verified").exists()

    def set_verified(self) -> None:
        """Note that it was."""
        with self._trouble():
            (self.folder / "verified").touch()

    def _checksum(self, start: int, end: int) -> int:
        checksum = 0
        buffer = bytearray(min(_PIECE, end - start))
        while start < end:
            view = memoryview(buffer)[: min(len(buffer), end - start)]
            self.read_into(start, view)
            checksum = zlib.crc32(view, checksum)
            start += view.nbytes
        return checksum

    def close(self) -> None:
        """Free what it holds; twice is fine."""
        with self._changed:
            for descriptor in (self._data, self._journal):
                if descriptor >= 0:
                    os.close(descriptor)
            self._data = self._journal = -1
            self._locks.close()

    def _append(self, record: Record) -> None:
        with self._trouble():
            if os.write(self._journal, record.pack()) != RECORD_BYTES:
                self._align_journal()
                raise OSError(0, "the journal can't be written")

    def _align_journal(self) -> None:
        """Fill up what a cut write left, so that records begin where they should again."""
        if os.fstat(self._journal).st_size % RECORD_BYTES and self._locks.acquire(_MENDING):
            try:
                rest = os.fstat(self._journal).st_size % RECORD_BYTES
                if rest:
                    os.write(self._journal, bytes(RECORD_BYTES - rest))
            finally:
                self._locks.release(_MENDING)

    @contextlib.contextmanager
    def _trouble(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ModelError(
                f"{self.about.name} can't be kept in {self.folder}: {error.strerror or error}",
                "Free some space there or name another cache folder (MYELIN_MODEL_CACHE_DIR).",
                reason="model-cache",
            ) from None


def remove_unused(folder: Path) -> bool:
    """Delete a cache file's folder unless somebody has it open; whether it was."""
    try:
        locks = ByteLocks(folder / "lock")
    except OSError:
        return False
    try:
        if not locks.acquire(_IN_USE):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        locks.close()
