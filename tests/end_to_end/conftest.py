"""Running the real command, as a user would, and seeing what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float

    def json(self) -> dict:
        """Its standard output, which must be one JSON document and nothing else."""
        return json.loads(self.out)


class Commands:
    """Starts `myelin` with a run id of its own, so that its nodes can be told from any other's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = {"MYELIN_STATE_DIR": str(folder / "state")}
        self.marker = f"e2e-{os.getpid()}-{time.monotonic_ns()}"
        self.started: list[subprocess.Popen[str]] = []

    def environment(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MYELIN_", "OTEL_"))}
        ours = {"E2E_MARKER": self.marker, "NO_COLOR": "1", "COLUMNS": "120", "MYELIN_SERVE_HTTP": "127.0.0.1:0"}
        return {**kept, **ours, **self.state, **more}

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "myelin", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment(**environment),
        )
        self.started.append(process)
        return process

    def run(self, *words: str, timeout: float = 170, **environment: str) -> Finished:
        begun = time.monotonic()
        process = self.start(*words, **environment)
        out, err = process.communicate(timeout=timeout)
        return Finished(process.returncode, out, err, time.monotonic() - begun)

    def alive(self) -> list[psutil.Process]:
        """Every live process that this object's commands started, directly or not."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("E2E_MARKER") == self.marker and process.status() != "zombie":
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def wait_until_gone(self, seconds: float) -> list[psutil.Process]:
        """What is still alive when either nothing is, or the time is up."""
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def wait_for_nodes(self, count: int, seconds: float = 120) -> list[psutil.Process]:
        """The worker processes, once there are ``count`` of them."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            nodes = [p for p in self.alive() if "worker" in p.cmdline()]
            if len(nodes) >= count:
                return nodes
            time.sleep(0.02)
        raise AssertionError(f"{count} nodes did not appear within {seconds} s")


@pytest.fixture
def myelin(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    yield commands
    for process in commands.started:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=60)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()
    for orphan in commands.wait_until_gone(0):
        orphan.kill()
