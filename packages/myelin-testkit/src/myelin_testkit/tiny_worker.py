"""A stand-in for ``python -m myelin worker --boot-stdin``, for tests of providers: it starts in a blink.

Run it as a file or as ``python -m myelin_testkit.tiny_worker``; it needs the standard library alone, so that it may be
copied onto any node. It does what a provider can see of a worker, and serves nothing:

- it reads its boot line from standard input, listens where that says, and announces it on standard output;
- it ends at the end of its standard input, or by SIGTERM;
- told to use a transport that there is not, it says so on standard error and exits with status 1.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import TextIO

TRANSPORTS = ("tcp", "grpc", "memory")


def main() -> int:
    """Be a node until standard input ends; returns the exit status."""
    boot = json.loads(sys.stdin.readline())
    if boot["transport"] not in TRANSPORTS:
        _say(f"The transport {boot['transport']!r} is not installed", sys.stderr)
        return 1
    host, _, port = boot["bind"].rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        address = f"{host}:{listener.getsockname()[1]}"
        _say(json.dumps({"myelin-listening": 1, "candidates": [address]}))
        _say(f"{boot['node']} listens on {address}", sys.stderr)
        sys.stdin.read()
    _say(f"{boot['node']} ends: its parent is gone", sys.stderr)
    return 0


def _say(text: str, stream: TextIO = sys.stdout) -> None:
    stream.write(f"{text}\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
