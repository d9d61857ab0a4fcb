"""However a program ends, a transport leaves no trace on standard error and does not keep it waiting."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("quiet_program.py")
LOOPS = ["asyncio", "uvloop"] if importlib.util.find_spec("uvloop") else ["asyncio"]


@pytest.mark.parametrize("name", ["grpc", "tcp"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("way", ["dialler", "acceptor", "interrupt", "flood"])
def test_nothing_is_written_when_a_program_ends(way: str, loop: str, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", str(PROGRAM), way, loop, name],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
