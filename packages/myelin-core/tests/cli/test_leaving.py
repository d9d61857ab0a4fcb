"""How a command's process ends: with its code, in order, and past Python's own goodbye where threads are left."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from myelin.cli.leaving import leave

class Finalized:
    def __del__(self):
        sys.stderr.write("taken apart\\n")

kept = Finalized()
atexit.register(lambda: sys.stdout.write("registered\\n"))
if sys.argv[1] == "daemon":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
sys.stdout.write("said\\n")
leave(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("thread", "goodbye"), [("none", "taken apart\n"), ("daemon", "")])
@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_process_ends_with_its_code_and_all_that_it_said(thread: str, goodbye: str, code: int) -> None:
    words = [sys.executable, "-c", PROGRAM, thread, str(code)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert done.stdout == "said\nregistered\n"
    assert done.stderr == goodbye
