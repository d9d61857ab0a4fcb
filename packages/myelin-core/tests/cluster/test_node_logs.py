"""Kept output of nodes: cut at a size, read as it grows, forgotten at an age."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from myelin.cluster.node_logs import LogTail, NodeLogFile, forget_old_logs, kept_logs
from myelin.cluster.provider import LaunchKey
from myelin.values import Attempt, NodeId, RunId

RUN = RunId("run-1")


def key(node: str = "stage-0", attempt: int = 1, run: str = "run-1") -> LaunchKey:
    return LaunchKey(RunId(run), NodeId(node), Attempt(attempt))


def test_lines_are_kept_for_their_owner_alone(tmp_path: Path) -> None:
    file = NodeLogFile(tmp_path / "logs", key())
    file.write("1.0 stderr one\n")
    file.write("2.0 stderr zwei £\n")
    file.close()
    (log,) = kept_logs(tmp_path / "logs", RUN)
    assert list(log.lines()) == ["1.0 stderr one", "2.0 stderr zwei £"]
    assert stat.S_IMODE(log.paths[0].stat().st_mode) == 0o600
    again = NodeLogFile(tmp_path / "logs", key())
    again.write("3.0 stderr three\n")
    again.close()
    assert len(list(log.lines())) == 3


def test_a_log_never_takes_more_than_two_halves(tmp_path: Path) -> None:
    file = NodeLogFile(tmp_path, key(), largest=100)
    for number in range(100):
        file.write(f"{number}.0 stdout {'x' * 20}\n")
    file.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200
    (log,) = kept_logs(tmp_path, RUN)
    numbers = [int(line.split(".")[0]) for line in log.lines()]
    assert numbers == list(range(numbers[0], 100))
    assert len(log.paths) == 2


def test_logs_are_found_by_run_node_and_attempt(tmp_path: Path) -> None:
    for each in (key("stage-1"), key("stage-0", 2), key("stage-0", 10), key(run="run-10"), key(run="run-1-x")):
        NodeLogFile(tmp_path, each).close()
    (tmp_path / "run-1.note.log").write_text("")
    found = [(log.node, log.attempt) for log in kept_logs(tmp_path, RUN)]
    assert found == [("stage-0", 2), ("stage-0", 10), ("stage-1", 1)]
    assert kept_logs(tmp_path / "nowhere", RUN) == []


def test_a_tail_reads_whole_lines_across_a_cut(tmp_path: Path) -> None:
    file = NodeLogFile(tmp_path, key(), largest=60)
    file.write("1.0 a first\n")
    with LogTail(kept_logs(tmp_path, RUN)[0]) as tail:
        assert list(tail.lines()) == ["1.0 a first"]
        file.write("2.0 a half")
        assert list(tail.lines()) == []
        file.write(" and half\n")
        assert list(tail.lines()) == ["2.0 a half and half"]
        file.write("3.0 a last before the cut\n")
        file.write("4.0 a first after the cut\n")
        assert list(tail.lines()) == ["3.0 a last before the cut", "4.0 a first after the cut"]
        assert list(tail.lines()) == []
    file.close()


def test_old_logs_are_forgotten_and_nothing_else(tmp_path: Path) -> None:
    for name, age in (("run-1.stage-0.1.log", 100.0), ("run-1.stage-1.1.log.1", 100.0), ("run-1.stage-1.1.log", 1.0)):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (1000.0 - age, 1000.0 - age))
    (tmp_path / "notes.log").write_text("mine")
    os.utime(tmp_path / "notes.log", (0, 0))
    forget_old_logs(tmp_path, now=1000.0, kept_s=50.0)
    assert {path.name for path in tmp_path.iterdir()} == {"run-1.stage-1.1.log", "notes.log"}
    forget_old_logs(tmp_path / "nowhere")
