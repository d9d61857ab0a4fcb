"""How a command's process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process with exit code ``code``.

    Work that was given up (a download, a tokenizer that is still being built) goes on in daemon threads. Were such a
    thread in native code while Python takes itself apart, it would find no interpreter to come back to, and say so by
    a panic after the last line that people should see. So Python is left standing then, once all that is registered
    for an exit has been done.
    """
    if not any(thread.daemon for thread in threading.enumerate()):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a reader that is gone, a full disk: `main` has told of it
            stream.flush()
    os._exit(code)
