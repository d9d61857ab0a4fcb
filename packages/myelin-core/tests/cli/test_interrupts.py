"""An interrupt that Python itself swallowed still ends the command."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from myelin.cli import interrupts
from myelin.cli.running import Interrupted, run_to_end


def test_one_that_went_unheard_ends_the_command(monkeypatch):
    monkeypatch.setattr(interrupts, "_seen", [int(signal.SIGINT)])
    reached = []

    async def command() -> None:
        await asyncio.sleep(0)
        reached.append("too far")

    with pytest.raises(Interrupted) as caught:
        run_to_end(command())
    assert caught.value.signal == signal.SIGINT
    assert reached == []


def test_one_in_a_destructor_is_remembered():
    program = """
import os, signal
from myelin.cli.interrupts import remember_interrupts, remembered
class Swallows:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
remember_interrupts()
del (kept := [Swallows()])[0]
print(remembered())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == str(int(signal.SIGINT)), done.stderr
    assert done.returncode == 0
