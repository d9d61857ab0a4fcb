"""Locks on single bytes of a file, that end with the process that holds them, whatever ends it.

Linux's locks of open file descriptions are used where they exist: two readers of one file in one process exclude each
other, too. Elsewhere POSIX record locks are, which hold between processes only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

_SET = getattr(fcntl, "F_OFD_SETLK", None)
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_BUSY = frozenset({errno.EACCES, errno.EAGAIN})


class ByteLocks:
    """Locks in the file ``path``, which is made where it doesn't exist. Its content means nothing."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def acquire(self, at: int, *, shared: bool = False) -> bool:
        """Lock byte ``at`` if nobody else has it (or, ``shared``, nobody alone); never waits."""
        return self._set(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, at)

    def release(self, at: int) -> None:
        """Unlock byte ``at``."""
        self._set(fcntl.F_UNLCK, at)

    def close(self) -> None:
        """Unlock everything; twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _set(self, kind: int, at: int) -> bool:
        try:
            if _SET is not None:
                fcntl.fcntl(self._descriptor, _SET, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
            else:
                flag = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX}.get(kind)
                command = fcntl.LOCK_UN if flag is None else flag | fcntl.LOCK_NB
                fcntl.lockf(self._descriptor, command, 1, at, os.SEEK_SET)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            raise
        return True
