"""The actor's own class, without Ray: a worker is started, watched, ended, and its place given up."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import SecretStr

from myelin.plugin import Attempt, BootSpec, NodeId, RunId, boot_line
from myelin_provider_ray.host import WorkerHost, memory_kills
from myelin_testkit import tiny_worker

TINY_WORKER = (sys.executable, str(tiny_worker.__file__))
LINE = boot_line(BootSpec(RunId("run"), NodeId("stage-0"), Attempt(1), SecretStr("planted")))


class Left:
    """Whether a host has given up its place."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self) -> None:
        self.event.set()


@pytest.fixture
def make() -> Iterator[Callable[..., WorkerHost]]:
    made: list[WorkerHost] = []

    def host(command: tuple[str, ...] = TINY_WORKER, **more: Any) -> WorkerHost:
        made.append(WorkerHost(command, leave=more.pop("leave", Left()), **more))
        return made[-1]

    yield host
    for each in made:
        each.stop(0.5)


def until(host: WorkerHost, what: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (look := host.look())[what]:
            return look
        time.sleep(0.02)
    raise AssertionError(f"it never was {what}: {host.look()}, {host.lines(0)}")


def test_a_worker_is_started_at_the_address_and_ended_with_its_input(make: Callable[..., WorkerHost]) -> None:
    host = make(cores=3)
    assert host.look()["booted"] is False
    host.boot(LINE, "127.0.0.1")
    (address,) = until(host, "endpoint")["endpoint"]
    assert address.startswith("127.0.0.1:")
    host.boot(LINE, "127.0.0.2")  # once is enough
    assert host.look()["endpoint"] == [address]
    host.stop(5)
    look = host.look()
    assert look["ended"]
    assert look["status"] in (0, -15)
    told = host.lines(0)
    assert told["ended"]
    assert any("stage-0 listens on" in text for _, text, _ in told["lines"])
    assert "planted" not in repr(told) + repr(look)


def test_lines_are_told_from_where_they_are_asked_for(make: Callable[..., WorkerHost]) -> None:
    talk = "import sys; sys.stdin.readline(); print(*range(9), sep='\\n'); sys.stdin.read()"
    host = make((sys.executable, "-c", talk), log_lines=4)
    host.boot(LINE, "127.0.0.1")
    deadline = time.monotonic() + 60
    while host.lines(0)["next"] < 9 and time.monotonic() < deadline:
        time.sleep(0.02)
    told = host.lines(0)
    assert (told["first"], told["next"], told["ended"]) == (5, 9, False)
    assert [text for _, text, _ in told["lines"]] == ["5", "6", "7", "8"]
    assert [text for _, text, _ in host.lines(8)["lines"]] == ["8"]
    assert host.lines(9)["lines"] == []


def test_one_that_does_not_listen_to_reason_is_killed(make: Callable[..., WorkerHost]) -> None:
    deaf = (
        "import signal, sys, time; signal.signal(15, signal.SIG_IGN); sys.stdin.readline(); print('up'); time.sleep(99)"
    )
    host = make((sys.executable, "-c", deaf))
    host.boot(LINE, "127.0.0.1")
    deadline = time.monotonic() + 60
    while not host.lines(0)["lines"] and time.monotonic() < deadline:
        time.sleep(0.02)
    host.stop(0.2)
    assert host.look()["status"] == -9


def test_a_command_that_is_not_there_is_told_of(make: Callable[..., WorkerHost]) -> None:
    host = make(("/nowhere/python",))
    host.boot(LINE, "127.0.0.1")
    look = host.look()
    assert look["ended"]
    assert look["failure"] == "/nowhere/python: No such file or directory"


def test_one_that_is_stopped_before_its_boot_line_comes_is_never_started(make: Callable[..., WorkerHost]) -> None:
    host = make()
    host.stop(1)
    host.boot(LINE, "127.0.0.1")
    assert host.look()["endpoint"] == []
    look = host.look()
    assert look["status"] is None
    assert (look["ended"], look["failure"]) == (True, "it was stopped before it was started")


def test_a_place_without_a_boot_line_is_given_up_whoever_looks(make: Callable[..., WorkerHost]) -> None:
    left = Left()
    host = make(leave=left, boot_s=0.3)
    deadline = time.monotonic() + 60
    while not left.event.wait(0.05) and time.monotonic() < deadline:
        assert host.look()["booted"] is False
    assert left.event.is_set()


class Hours:
    """The host's time, which only a test moves; how long its threads sleep is real."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.time, self.sleep = time.time, lambda seconds: time.sleep(min(seconds, 0.05))

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    hours = Hours()
    monkeypatch.setattr("myelin_provider_ray.host.time", hours)
    return hours


def test_a_place_is_given_up_when_nobody_looks_at_an_ended_worker(
    make: Callable[..., WorkerHost], hours: Hours
) -> None:
    left = Left()
    host = make((sys.executable, "-c", "pass"), leave=left, linger_s=100)
    host.boot(LINE, "127.0.0.1")
    until(host, "ended")
    for _ in range(5):
        hours.now += 60
        time.sleep(0.15)
        host.look()
    assert not left.event.is_set(), "somebody looks"
    hours.now += 110
    assert left.event.wait(60)


def test_a_worker_that_runs_keeps_its_place_however_long_nobody_looks(
    make: Callable[..., WorkerHost], hours: Hours
) -> None:
    left = Left()
    host = make(leave=left, linger_s=100, boot_s=100)
    host.boot(LINE, "127.0.0.1")
    until(host, "endpoint")
    hours.now += 10_000
    assert not left.event.wait(1)


def test_kills_for_memory_are_counted(tmp_path: Any) -> None:
    table = tmp_path / "vmstat"
    table.write_text("nr_free 5\noom_kill 7\n")
    assert memory_kills(table) == 7
    assert memory_kills(tmp_path / "none") == 0
