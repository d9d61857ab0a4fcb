"""Where compiled kernels are kept between runs, and how processes that compile at once stay out of each other's way.

Numba's own index of a cached function is written without a lock: two processes that add different entries at once may
give both the same file name, and a later process would load the wrong code. So whoever has something to compile holds
:func:`compile_lock`; a marker for each finished set of kernels lets all others pass without it.

Every version of the sources has a folder of its own, so folders grow old: whoever uses one removes those that nobody
has used for a month, and all but the newest few.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from myelin_worker_cpu.isa import Isa

UNUSED_SECONDS = 30 * 86_400.0
"""A folder that nobody has used for so long is removed."""
FOLDERS = 12
"""Folders that are kept at most: several Pythons and instruction sets, and a few versions of each."""
_FOLDER = re.compile(r"py\d+-[a-z0-9]+-[0-9a-f]{16}")


def source_digest() -> str:
    """A short digest of this package's sources: another version of any kernel gets a cache of its own."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def directory(isa: Isa) -> Path:
    """The cache for this version, Python, and instruction set; made if it isn't there.

    ``NUMBA_CACHE_DIR``, where it is set, is the root instead of the user's cache folder.
    """
    root = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(platformdirs.user_cache_dir("myelin"), "numba")
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    path = Path(root) / f"{python}-{isa.value}-{source_digest()}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def prune(folder: Path, now: float | None = None) -> None:
    """Note that ``folder`` is in use, and remove the caches beside it that are old or too many; errors are no reason to
    fail, and what cannot be removed today may be tomorrow."""
    try:
        os.utime(folder)
        others = [entry for entry in os.scandir(folder.parent) if _FOLDER.fullmatch(entry.name) and entry.is_dir()]
        used = {Path(entry.path): entry.stat().st_mtime for entry in others if entry.name != folder.name}
    except OSError:
        return
    oldest = (time.time() if now is None else now) - UNUSED_SECONDS
    newest_first = sorted(used, key=lambda path: used[path], reverse=True)
    for rank, path in enumerate(newest_first, start=1):
        if rank >= FOLDERS or used[path] < oldest:
            _remove(path)


def _remove(folder: Path) -> None:
    """Remove a cache, unless somebody compiles into it just now."""
    try:
        with compile_lock(folder, wait=False) as held:
            if held:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass


@contextmanager
def compile_lock(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the folder's lock; it is freed by the system should this process die.

    Without ``wait`` it gives False, and no lock, where another holds it.
    """
    with open(folder / "lock", "a+b") as handle:
        if sys.platform == "win32":
            import msvcrt

            handle.seek(0)
            while True:
                try:
                    msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                    break
                except OSError:  # LK_LOCK gives up after ten seconds
                    if wait:
                        continue
                    yield False
                    return
            try:
                yield True
            finally:
                handle.seek(0)
                msvcrt.locking(handle.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                fcntl.flock(handle, fcntl.LOCK_UN)


class Markers:
    """Which kernels of a folder are complete, for one kind of processor (a home folder may be shared by several)."""

    def __init__(self, folder: Path, processor: str) -> None:
        self._folder = folder
        self._processor = hashlib.sha256(processor.encode()).hexdigest()[:12]

    def _path(self, kernel: str) -> Path:
        return self._folder / f"{kernel}-{self._processor}.done"

    def has(self, kernel: str) -> bool:
        """Whether the kernel was compiled and kept."""
        return self._path(kernel).exists()

    def set(self, kernel: str) -> None:
        """Note that it was."""
        self._path(kernel).touch()
