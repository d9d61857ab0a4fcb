"""Files of what nodes write: one for each start of a node, cut in two at a size, forgotten at an age.

They are named ``<run>.<node>.<attempt>.log``, the older half ``….log.1``. A line is ``<Unix seconds> <stream> <text>``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from myelin.cluster.provider import LaunchKey
from myelin.values import Attempt, NodeId, RunId

LARGEST_BYTES = 8 << 20
"""Of each half."""
KEPT_S = 14 * 86400.0
_SUFFIX = ".log"


class NodeLogFile:
    """What one start of a node writes. Blocking, and quick: every line is with the system when :meth:`write` returns.

    Args:
        folder: Made where it is missing, for this user alone.
        key: Which start.
        largest: Bytes of each half.

    Raises:
        OSError: It can't be written.
    """

    def __init__(self, folder: Path, key: LaunchKey, *, largest: int = LARGEST_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = folder / f"{key}{_SUFFIX}"
        self._largest = largest
        self._file = _appended(self._path)
        self._size = self._file.tell()

    def write(self, text: str) -> None:
        """Add ``text``, which ends a line."""
        data = text.encode(errors="replace")
        if self._size and self._size + len(data) > self._largest:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = _appended(self._path)
            self._size = 0
        self._file.write(data)
        self._size += len(data)

    def flush(self) -> None:
        """Nothing waits; here because files have it."""

    def close(self) -> None:
        """No more comes."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class KeptLog:
    """The files of one start of a node, oldest first."""

    node: NodeId
    attempt: Attempt
    paths: tuple[Path, ...]

    def lines(self) -> Iterator[str]:
        """All lines, without their ends."""
        for path in self.paths:
            with suppress(FileNotFoundError), path.open("r", encoding="utf-8", errors="replace") as file:
                for line in file:
                    yield line.rstrip("\n")


class LogTail:
    """Reads a log as it grows, across its being cut. A context."""

    def __init__(self, log: KeptLog) -> None:
        self.log = log
        self._path = log.paths[-1]
        self._before = log.paths[:-1]
        self._file: FileIO | None = None
        self._rest = b""

    def __enter__(self) -> LogTail:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def lines(self) -> Iterator[str]:
        """The whole lines that have come since the last call, without their ends."""
        for path in self._before:
            yield from KeptLog(self.log.node, self.log.attempt, (path,)).lines()
        self._before = ()
        while True:
            if self._file is None:
                try:
                    self._file = FileIO(self._path)
                except FileNotFoundError:
                    return
            while data := self._file.read(1 << 16):
                *whole, self._rest = (self._rest + data).split(b"\n")
                for line in whole:
                    yield line.decode(errors="replace")
            with suppress(FileNotFoundError):
                if self._path.stat().st_ino == os.fstat(self._file.fileno()).st_ino:
                    return
            self._file.close()
            self._file = None


def kept_logs(folder: Path, run: RunId) -> Sequence[KeptLog]:
    """The logs of a run, by node and attempt."""
    found: dict[tuple[NodeId, Attempt], list[Path]] = {}
    for path in folder.glob(f"{run}.*{_SUFFIX}*"):
        name = path.name.removesuffix(".1").removesuffix(_SUFFIX)
        parts = name.split(".")
        if len(parts) == 3 and parts[0] == run and parts[2].isdecimal():
            found.setdefault((NodeId(parts[1]), Attempt(int(parts[2]))), []).append(path)
    return [
        KeptLog(node, attempt, tuple(sorted(paths, key=lambda path: path.name, reverse=True)))
        for (node, attempt), paths in sorted(found.items())
    ]


def forget_old_logs(folder: Path, *, now: float | None = None, kept_s: float = KEPT_S) -> None:
    """Delete the logs to which nothing was written for so long. Files that aren't ours, or can't go, stay."""
    oldest = (time.time() if now is None else now) - kept_s
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                ours = path.name.removesuffix(".1").endswith(_SUFFIX) and path.name.count(".") >= 3
                if ours and path.stat().st_mtime < oldest:
                    path.unlink()


def _appended(path: Path) -> FileIO:
    """A file to add to, unbuffered, for this user alone."""
    return FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
