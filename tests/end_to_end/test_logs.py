"""`myelin logs -f` beside a run that serves: lines as they come, their streams named, no secret among them."""

from __future__ import annotations

import queue
import re
import signal
import threading
import time
from pathlib import Path

from end_to_end_support import SMOLLM2, wait_for_rpc

TOKEN = "hf_" + "a1b2c3d4" * 4
CARELESS = f"""
import sys, threading, time
if "worker" in sys.orig_argv:
    def talk():
        for number in range(10_000):
            print(f"out {{number}} token={TOKEN}", file=sys.stdout, flush=True)
            print(f"err {{number}} Authorization: Bearer {TOKEN}", file=sys.stderr, flush=True)
            time.sleep(0.1)
    threading.Thread(target=talk, daemon=True).start()
"""
"""A library of a node that writes what it shouldn't, ten times a second."""


def test_output_is_followed_as_it_comes(myelin, tmp_path):
    library = tmp_path / "library"
    library.mkdir()
    (library / "sitecustomize.py").write_text(CARELESS)
    serving = myelin.start(
        *("serve", "-N", "2", "--model", SMOLLM2, "--rpc-bind", "127.0.0.1:0", "--threads", "1", "--no-dashboard"),
        *("--run-id", "talkative", "--max-context", "512"),
        PYTHONPATH=str(library),
    )
    wait_for_rpc(serving)
    following = myelin.start("logs", "talkative", "-f")
    lines = Lines(following)

    for node in ("stage-0", "stage-1"):
        # A node's own words are all that standard output has; what others print there later comes with the errors.
        lines.wait_for(rf"^{node}\.1 stdout \| out 0 ")
        first = int(lines.wait_for(rf"^{node}\.1 stderr \| err (\d+) ")[1])
        # Later ones weren't there yet when it was asked for.
        lines.wait_for(rf"^{node}\.1 stderr \| err {max(first, lines.latest(node)) + 10} ")
    only = myelin.start("logs", "talk", "stage-1", "-f")  # by the beginning of its name, and one node
    only_lines = Lines(only)
    only_lines.wait_for(r"^stage-1\.1 ")

    serving.send_signal(signal.SIGINT)
    assert serving.wait(60) == 0
    assert following.wait(60) == 0, "it ends with the run"
    assert only.wait(60) == 0
    assert {line.split(".")[0] for line in only_lines.rest()} == {"stage-1"}
    seen = lines.rest()
    assert any("token=[redacted]" in line for line in seen)
    assert any("Bearer [redacted]" in line for line in seen)
    assert not [line for line in seen if TOKEN in line]
    kept = [path for path in Path(tmp_path / "state").rglob("*.log") if TOKEN in path.read_text("utf-8")]
    assert kept == []
    assert myelin.wait_until_gone(15) == []


class Lines:
    """What a command writes, as it comes."""

    def __init__(self, process) -> None:
        self._process = process
        self.seen: list[str] = []
        self._coming: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, stream) -> None:
        for line in stream:
            self._coming.put(line)
        self._coming.put(None)

    def wait_for(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        """The first line that matches."""
        place, deadline = 0, time.monotonic() + seconds
        while True:
            assert time.monotonic() < deadline, f"{pattern} is not in\n{''.join(self.seen[-20:])}"
            while place < len(self.seen):
                if match := re.search(pattern, self.seen[place]):
                    return match
                place += 1
            line = self._coming.get(timeout=seconds)
            if line is None:
                raise AssertionError(f"{pattern} is not in\n{''.join(self.seen[-20:])}{self._process.stderr.read()}")
            self.seen.append(line)

    def latest(self, node: str) -> int:
        """The number of a node's last line up to now."""
        time.sleep(0.5)
        while not self._coming.empty():
            if (line := self._coming.get()) is not None:
                self.seen.append(line)
        return max(int(match[1]) for line in self.seen if (match := re.match(rf"{node}\.1 stderr \| err (\d+)", line)))

    def rest(self) -> list[str]:
        """All lines, once no more come."""
        while (line := self._coming.get(timeout=60)) is not None:
            self.seen.append(line)
        return self.seen
