"""``python -m myelin``, and the command ``myelin``."""

from __future__ import annotations

import os
import sys


def _worker() -> None:
    """A node: the same as ``myelin worker --boot-stdin``, past the command line's imports and Python's goodbye.

    Every node pays for both, and nobody sees them: the one before it can announce itself, the other (freeing what an
    engine holds, object by object) while the orchestrator waits for it to be gone. Nothing is left to flush: output is
    unbuffered, and spans were exported when the node ended its work.
    """
    from myelin.plugins.registry import Registry
    from myelin.worker.main import main_from_stdin

    code = main_from_stdin(Registry.discover)
    sys.stderr.flush()
    os._exit(code)


def run() -> None:
    """The ``myelin`` command; doesn't return."""
    if sys.argv[1:] == ["worker", "--boot-stdin"]:
        _worker()
    from myelin.cli.leaving import leave
    from myelin.cli.main import main

    leave(main())


if __name__ == "__main__":
    run()
