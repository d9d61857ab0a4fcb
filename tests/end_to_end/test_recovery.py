"""Real nodes that are killed, or stopped, in the middle of answers: the text is that of an undisturbed run."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from end_to_end_support import SMOLLM2

pytestmark = pytest.mark.slow

STAGES = 3
QUESTIONS = ("Tell me about the sea.", "Write a few lines about bread.")
TOKENS = 60


class Served:
    """`myelin serve` with three nodes, and what is seen of it."""

    def __init__(self, myelin, *settings: str) -> None:
        self.logs = Path(myelin.folder) / "nodes"
        words = [word for setting in (f"runtime.log_dir={self.logs}", *settings) for word in ("--set", setting)]
        self.process = myelin.start(
            *("serve", "-N", str(STAGES), "--model", SMOLLM2, "--rpc-bind", "127.0.0.1:0", "--threads", "1"),
            *("--max-context", "512", "--temperature", "0.9", "--seed", "5", *words),
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.address = self.wait_for(r"prompt rpc[^\n]*?(\d+\.\d+\.\d+\.\d+):(\d+)", 150)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_for(self, pattern: str, seconds: float, after: int = 0) -> re.Match[str]:
        """The first line, after so many, that matches."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in self.lines[after:]:
                if match := re.search(pattern, line, re.IGNORECASE):
                    return match
            time.sleep(0.01)
        raise AssertionError(f"{pattern!r} did not come in:\n{''.join(self.lines)}")

    def pid(self, stage: int) -> int:
        """The process of a stage's newest attempt, as it says itself."""
        logs = sorted(self.logs.glob(f"*.stage-{stage}.*.log"), key=lambda path: int(path.suffixes[-2][1:]))
        (pid,) = re.findall(r'"pid": (\d+)', logs[-1].read_text())[:1]
        return int(pid)

    def attempts(self, stage: int) -> int:
        return len(list(self.logs.glob(f"*.stage-{stage}.*.log")))

    def signal(self, stage: int, number: int = signal.SIGKILL) -> None:
        import os

        os.kill(self.pid(stage), number)

    def ask(self, text: str, on_piece: Callable[[int], None] = lambda count: None) -> str:
        """The whole answer; ``on_piece`` is told of each piece as it comes."""
        host, port = self.address[1], int(self.address[2])
        with socket.create_connection((host, port), timeout=120) as connection:
            request = {"SubmitPrompt": {"request_id": "r", "prompt_text": text, "max_tokens": TOKENS}}
            connection.sendall((json.dumps(request) + "\n").encode())
            pieces: list[str] = []
            with connection.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    kind, body = next(iter(json.loads(line).items()))
                    if kind == "TextDelta":
                        pieces.append(body["text"])
                        on_piece(len(pieces))
                    else:
                        assert kind == "Done", body
                        assert "".join(pieces) == body["final_text"]
                        return body["final_text"]
        raise AssertionError("the server closed without an end")

    def wait_until_back(self, stage: int, after: int, seconds: float = 100.0) -> float:
        """Seconds that it was away, as the command says."""
        self.wait_for(rf"stage-{stage} was lost \(.*\); starting another", seconds, after)
        return float(self.wait_for(rf"stage-{stage} is back after ([\d.]+) s", seconds, after)[1])


@pytest.fixture
def served(myelin) -> Iterator[Served]:
    serving = Served(myelin, "runtime.recover_attempts=1000", "runtime.stop_grace_s=1")
    yield serving
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(timeout=90) == 0, "".join(serving.lines)
    assert not myelin.wait_until_gone(15)


@pytest.mark.timeout(400)
def test_any_node_killed_or_stopped_at_any_moment_changes_nothing(served: Served) -> None:
    expected = served.ask(QUESTIONS[0])
    assert len(expected) > 50
    for stage in (0, 1, 2):
        moment, before = random.randint(1, 30), len(served.lines)

        def kill(count: int, stage: int = stage, moment: int = moment) -> None:
            if count == moment:
                served.signal(stage)

        assert served.ask(QUESTIONS[0], kill) == expected, f"stage {stage} at piece {moment}"
        served.wait_until_back(stage, before)

    # One that only stops answers to nobody, and is noticed by its silence.
    before, began = len(served.lines), time.monotonic()
    assert served.ask(QUESTIONS[0], lambda count: served.signal(1, signal.SIGSTOP) if count == 5 else None) == expected
    served.wait_until_back(1, before)
    assert time.monotonic() - began < 100
    found = [served.attempts(stage) for stage in range(STAGES)]
    assert all(count >= least for count, least in zip(found, (2, 3, 2), strict=True)), "".join(served.lines)


@pytest.mark.timeout(400)
def test_two_streams_and_two_losses_at_once_and_one_during_recovery(served: Served) -> None:
    expected = [served.ask(question) for question in QUESTIONS]
    answers: dict[int, str] = {}
    before = len(served.lines)

    def kill(count: int) -> None:
        if count == 8:
            served.signal(0)
            served.signal(2)

    def client(number: int) -> None:
        answers[number] = served.ask(QUESTIONS[number], kill if number == 0 else lambda count: None)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(2)]
    for thread in clients:
        thread.start()
    served.wait_for(r"stage-\d was lost", 100, before)
    served.signal(1)  # while the others are being replaced
    for thread in clients:
        thread.join(timeout=150)
    assert [answers[number] for number in range(2)] == expected
    for stage in range(STAGES):
        served.wait_until_back(stage, before)


@pytest.mark.timeout(400)
def test_what_is_given_up_leaves_nothing_running(myelin) -> None:
    served = Served(myelin, "runtime.recover_attempts=1", "runtime.stop_grace_s=1")
    served.signal(1)
    served.wait_until_back(1, 0)
    served.signal(1)
    assert served.process.wait(timeout=90) == 1
    text = "".join(served.lines)
    assert re.search(r"stage-1 ended while it served \(was killed.*tried 1 times within 300 s", text), text
    assert "Traceback" not in text
    assert not myelin.wait_until_gone(15)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("delay", [0.0, 0.7])
def test_an_interrupt_in_mid_recovery_leaves_nothing_running(myelin, delay: float) -> None:
    served = Served(myelin, "runtime.stop_grace_s=1")
    served.signal(2)
    served.wait_for("stage-2 was lost", 100)
    time.sleep(delay)
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(timeout=90) == 0
    assert not myelin.wait_until_gone(15)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_dozens_of_random_kills(served: Served) -> None:
    generator = random.Random(20261130)
    expected = [served.ask(question) for question in QUESTIONS]
    failures: list[str] = []
    done = threading.Event()

    def client(number: int) -> None:
        while not done.is_set():
            answer = served.ask(QUESTIONS[number])
            if answer != expected[number]:
                failures.append(answer)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(2)]
    for thread in clients:
        thread.start()
    for _ in range(36):
        time.sleep(generator.random() * 6)
        try:
            number = signal.SIGSTOP if generator.random() < 0.2 else signal.SIGKILL
            served.signal(generator.randrange(STAGES), number)
        except (ProcessLookupError, ValueError):
            continue  # it has died just now, or has not said who it is yet
    done.set()
    for thread in clients:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert failures == []
