"""Byte sources over local files."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

from myelin.errors import ModelError
from myelin.model.split import part_names


class LocalFile:
    """A file on disk, read with ``pread``: thread-safe, and nothing stays mapped into memory.

    Raises:
        ModelError: It isn't there, isn't a regular file, or may not be read.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        self.path = path
        self._name = name or path.name
        self._descriptor = -1
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # before opening it: a pipe would keep us waiting
                raise ModelError(f"{path} is not a file", "Name a .gguf file.", reason="model-unreadable")
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
            self._size = os.fstat(self._descriptor).st_size
        except FileNotFoundError:
            raise ModelError(f"there is no file {path}", "Check the path.", reason="model-missing") from None
        except OSError as error:
            raise ModelError(
                f"{path} can't be opened: {error.strerror}", "Check its permissions.", reason="model-unreadable"
            ) from None

    @property
    def name(self) -> str:
        """The file's name."""
        return self._name

    @property
    def size(self) -> int:
        """Bytes in all, as of the opening."""
        return self._size

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``; :class:`ModelError` where the file ends before."""
        pieces: list[bytes] = []
        while length > 0:
            try:
                piece = os.pread(self._descriptor, length, offset)
            except OSError as error:
                raise self._broken(offset, error.strerror or "the read failed") from None
            if not piece:
                raise self._broken(offset, "the file ends there")
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` (writable bytes) from ``offset``, without a copy; errors as :meth:`read_at`."""
        while target.nbytes:
            try:
                count = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                raise self._broken(offset, error.strerror or "the read failed") from None
            if not count:
                raise self._broken(offset, "the file ends there")
            offset += count
            target = target[count:]

    def _broken(self, offset: int, why: str) -> ModelError:
        return ModelError(
            f"{self._name} could not be read at byte {offset}: {why}",
            "It was changed or cut short while in use: fetch it again.",
            reason="model-unreadable",
        )

    def close(self) -> None:
        """Free the descriptor; twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __repr__(self) -> str:
        return f"LocalFile({str(self.path)!r})"


class JoinedFiles:
    """Several files read as if they were one, in order: a model that was cut into pieces to be shipped.

    Not to be confused with a split model, each part of which has a header of its own.
    """

    def __init__(self, files: Sequence[LocalFile], name: str) -> None:
        self._files = tuple(files)
        self._name = name
        self._starts = [0]
        for file in self._files:
            self._starts.append(self._starts[-1] + file.size)

    @property
    def files(self) -> tuple[LocalFile, ...]:
        """The pieces, in order."""
        return self._files

    @property
    def name(self) -> str:
        """The name of the whole."""
        return self._name

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return self._starts[-1]

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``; :class:`ModelError` where they aren't there."""
        target = bytearray(length)
        self.read_into(offset, memoryview(target))
        return bytes(target)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` (writable bytes) from ``offset``; errors as :meth:`read_at`."""
        if offset + target.nbytes > self.size:
            raise ModelError(
                f"{self._name} could not be read at byte {offset}: its pieces end at {self.size}",
                "A piece is missing: install the model's packages again.",
                reason="model-unreadable",
            )
        while target.nbytes:
            index = bisect_right(self._starts, offset) - 1
            count = min(target.nbytes, self._starts[index + 1] - offset)
            self._files[index].read_into(offset - self._starts[index], target[:count])
            offset += count
            target = target[count:]

    def close(self) -> None:
        """Close all files; twice is fine."""
        for file in self._files:
            file.close()


def local_paths(parts: Iterable[object]) -> tuple[Path, ...]:
    """The absolute paths of those of ``parts`` (a model's open files) that are files of this machine."""
    found: list[Path] = []
    for part in parts:
        files = part.files if isinstance(part, JoinedFiles) else (part,)
        found += [file.path.absolute() for file in files if isinstance(file, LocalFile)]
    return tuple(found)


def open_all(paths: Iterable[Path]) -> tuple[LocalFile, ...]:
    """Open these files; where one can't be opened, none stays open and its :class:`ModelError` is raised."""
    files: list[LocalFile] = []
    try:
        for path in paths:
            files.append(LocalFile(path))  # noqa: PERF401  # those opened so far must be known when one fails
    except ModelError:
        for file in files:
            file.close()
        raise
    return tuple(files)


def open_files(path: Path) -> tuple[LocalFile, ...]:
    """Open the file, or all parts of the split model that it begins.

    Raises:
        ModelError: A file is missing or can't be read (nothing stays open), or ``path`` is a later part.
    """
    if path.is_dir():
        inside = sorted(file.name for file in path.glob("*.gguf"))
        raise ModelError(
            f"{path} is a folder",
            f"Name a file in it, such as {inside[0]}." if inside else "Name a .gguf file.",
            reason="model-missing",
        )
    names = part_names(path.name)
    if len(names) > 1:
        missing = [name for name in names if not (path.parent / name).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(
                f"the split model's part {missing[0]}{more} is missing from {path.parent}",
                f"Keep all {len(names)} parts in one folder under the names that they were published with.",
                reason="model-part",
            )
    return open_all(path.parent / name for name in names)
