"""Stands in for ``myelin worker --boot-stdin``: announces itself, then does what its argument says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TextIO


def say(text: str, stream: TextIO = sys.stdout) -> None:
    stream.write(text + "\n")
    stream.flush()


def main() -> int:
    behaviour = sys.argv[1]
    if behaviour == "broken":
        say("Traceback (most recent call last):", sys.stderr)
        say("ModuleNotFoundError: No module named 'myelin'", sys.stderr)
        return 3
    boot = json.loads(sys.stdin.readline())
    if behaviour == "environment":
        say(json.dumps(dict(os.environ)))
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        say(f"child {child.pid}")
    if behaviour == "chatty":
        for number in range(5000):
            say(f"line {number}", sys.stderr if number % 2 else sys.stdout)
    say(json.dumps({"myelin-listening": 1, "candidates": ["127.0.0.1:4711"]}))
    say(f"{boot['node']} is up")
    if behaviour == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "parent":
        return 0
    if behaviour == "stubborn":
        while True:
            time.sleep(1)
    sys.stdin.read()
    say("stdin ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
