"""The provider's pure parts: cutting lines, choosing variables, wording exits, reading limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin_provider_process.environment import inherited, node_environment
from myelin_provider_process.exits import exit_reason
from myelin_provider_process.lines import LineSplitter
from myelin_provider_process.machine import available_memory, cores, memory_kills
from myelin_provider_process.placement import core_numbers, own_cores


@given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"a", b"\n")), max_size=20))
def test_lines_do_not_depend_on_how_the_bytes_were_cut(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    at_once, in_pieces = LineSplitter(), LineSplitter()
    expected = at_once.feed(whole) + at_once.finish()
    found = [line for piece in pieces for line in in_pieces.feed(piece)] + in_pieces.finish()
    assert found == expected


@given(st.text(alphabet=st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=200))
def test_a_line_of_text_comes_back(text: str) -> None:
    splitter = LineSplitter(limit=10_000)
    assert splitter.feed(text.encode() + b"\r\nrest") == [text]
    assert splitter.finish() == ["rest"]


@given(st.lists(st.text(alphabet="ab\n", max_size=100), max_size=20), st.integers(1, 30))
def test_no_line_is_longer_than_the_limit_and_nothing_is_lost(pieces: list[str], limit: int) -> None:
    splitter = LineSplitter(limit)
    lines = [line for piece in pieces for line in splitter.feed(piece.encode())] + splitter.finish()
    assert all(len(line) <= limit for line in lines)
    assert "".join(lines) == "".join(pieces).replace("\n", "")


@pytest.mark.parametrize(
    "name",
    ["VAST_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "PGPASSWORD_FILE_PASS", "DB_PASSWORD",
     "OPENAI_APIKEY", "MYELIN_PIPELINE_STAGES", "ssh_private", "MY_AUTH"],
)  # fmt: skip
def test_credentials_and_our_own_settings_are_not_inherited(name: str) -> None:
    assert not inherited(name)


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "LANG", "PYTHONPATH", "OTEL_EXPORTER_OTLP_HEADERS", "NUMBA_CACHE_DIR", "KEYBOARD", "XAUTHOR"],
)
def test_ordinary_variables_are_inherited(name: str) -> None:
    assert inherited(name)


def test_additions_win() -> None:
    found = node_environment({"PATH": "/bin", "HF_TOKEN": "x"}, {"PATH": "/usr/bin", "MYELIN_X": "1"})
    assert found["PATH"] == "/usr/bin"
    assert found["MYELIN_X"] == "1"
    assert "HF_TOKEN" not in found


@pytest.mark.parametrize(
    ("status", "kills", "words"),
    [
        (0, 0, "ended by itself (status 0)"),
        (1, 0, "exited with status 1: boom"),
        (-9, 0, "was killed (SIGKILL): by hand, or by the system for want of memory"),
        (-9, 1, "was killed by the system, which ran out of memory (SIGKILL)"),
        (-11, 0, "crashed (SIGSEGV)"),
        (-15, 0, "was ended by SIGTERM"),
        (-200, 0, "was ended by signal 200"),
    ],
)
def test_exits_in_words(status: int, kills: int, words: str) -> None:
    assert exit_reason(status, "  boom \n", memory_kills=kills) == words


def test_memory_of_a_control_group(tmp_path: Path) -> None:
    free = available_memory(tmp_path)
    assert free > 0
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert available_memory(tmp_path) == 600
    (tmp_path / "memory.current").write_text("4000\n")
    assert available_memory(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 1_000_000
    assert cores() >= 1


def test_memory_kills(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 17\noom_kill 3\nnr_x 1\n")
    assert memory_kills(tmp_path / "vmstat") == 3
    assert memory_kills(tmp_path / "missing") is None


@given(st.lists(st.integers(0, 500), min_size=1, max_size=64, unique=True), st.integers(1, 12))
def test_cores_are_divided_between_the_nodes(numbers: list[int], nodes: int) -> None:
    parts = [own_cores(numbers, nodes, place) for place in range(nodes)]
    if nodes == 1 or nodes > len(numbers):
        assert not any(parts)
    else:
        assert [number for part in parts for number in part] == numbers
        assert min(map(len, parts)) == len(numbers) // nodes
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert own_cores(numbers, nodes, nodes) == ()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system places processes by itself")
def test_threads_of_one_core_are_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    for number, (socket, core) in enumerate([("0", "0"), ("1", "0"), ("0", "0"), ("1", "0")]):  # nothing of 4
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(socket + "\n")
        (topology / "core_id").write_text(core + "\n")
    assert core_numbers(tmp_path) == (0, 2, 4, 1, 3)
    assert core_numbers(tmp_path / "missing") == (0, 1, 2, 3, 4)
