"""Boot lines and announcements: round trips, refusals without secrets in them, and the end of orphans."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from myelin.cluster.boot import (
    MAX_BOOT_LINE_BYTES,
    PARENT_VARIABLE,
    announcement,
    boot_line,
    die_with_parent,
    parse_announcement,
    read_boot_line,
)
from myelin.cluster.provider import BootSpec
from myelin.errors import WireError
from myelin.transport.contract import Endpoint
from myelin.values import Attempt, NodeId, RunId

identifiers = st.from_regex(r"[a-z0-9][A-Za-z0-9-]{0,62}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)
specs = st.builds(
    BootSpec,
    run=identifiers.map(RunId),
    node=identifiers.map(NodeId),
    attempt=st.integers(1, 2**32 - 1).map(Attempt),
    secret=texts.map(SecretStr),
    transport=texts,
    engine=texts,
    bind=texts,
    environment=st.dictionaries(
        st.from_regex(r"[A-Z_][A-Z0-9_]{0,20}", fullmatch=True), texts.map(SecretStr), max_size=3
    ),
)
SPEC = BootSpec(
    RunId("run-1"), NodeId("stage-0"), Attempt(2), SecretStr("hush"), environment={"HF_TOKEN": SecretStr("t0k")}
)


@given(specs)
def test_a_boot_line_is_one_line_and_comes_back(spec: BootSpec) -> None:
    line = boot_line(spec)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert read_boot_line(line) == spec


@given(st.binary(max_size=200))
def test_any_other_line_is_a_wire_error(line: bytes) -> None:
    with pytest.raises(WireError):
        read_boot_line(line)


@given(st.data())
def test_a_damaged_boot_line_is_a_spec_or_a_wire_error(data: st.DataObject) -> None:
    line = bytearray(boot_line(SPEC))
    for _ in range(3):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    text = ""
    try:
        read_boot_line(bytes(line))
    except WireError as error:
        text = error.message
    assert "hush" not in text
    assert "t0k" not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run", ""), ("run", "a/b"), ("run", "x" * 64), ("node", None), ("attempt", 0), ("attempt", True),
        ("attempt", "1"), ("secret", ""), ("secret", 5), ("bind", "a\0b"), ("environment", []),
        ("environment", {"A=B": "c"}), ("environment", {"A": 1}), ("environment", {"A": "\0"}), ("myelin-boot", 2),
    ],
)  # fmt: skip
def test_a_malformed_field_is_named_and_no_secret_is(name: str, value: object) -> None:
    document = {**json.loads(boot_line(SPEC)), name: value}
    with pytest.raises(WireError) as caught:
        read_boot_line(json.dumps(document).encode())
    assert name in caught.value.message
    assert caught.value.hint
    assert "hush" not in caught.value.message


def test_no_line_a_huge_one_and_a_deep_one() -> None:
    for line in (b"", b"\n", b" " * (MAX_BOOT_LINE_BYTES + 1) + b"{", b"[" * 100_000):
        with pytest.raises(WireError):
            read_boot_line(line)


def test_a_spec_does_not_show_its_secrets() -> None:
    assert "hush" not in repr(SPEC)
    assert "t0k" not in repr(read_boot_line(boot_line(SPEC)))


@given(st.lists(st.from_regex(r"[!-~]{1,40}", fullmatch=True), min_size=1, max_size=5).map(tuple))
def test_an_announcement_is_one_line_and_comes_back(candidates: tuple[str, ...]) -> None:
    line = announcement(Endpoint(candidates))
    assert "\n" not in line
    assert parse_announcement(line) == Endpoint(candidates)
    assert parse_announcement(f"  {line}\r") == Endpoint(candidates)


@given(st.text(max_size=100))
def test_other_lines_are_no_announcement(line: str) -> None:
    assert parse_announcement(line) is None
    assert parse_announcement('{"myelin-listening": 1, ' + line) is None or "candidates" in line


@pytest.mark.parametrize(
    "candidates", [None, [], "127.0.0.1:1", [1], [""], ["a b"], ["x" * 256], ["a:1"] * 65, [["a:1"]]]
)
def test_malformed_announcements(candidates: object) -> None:
    assert parse_announcement(json.dumps({"myelin-listening": 1, "candidates": candidates})) is None


def test_nobody_dies_with_a_parent_that_did_not_ask() -> None:
    assert die_with_parent({}) is False
    assert die_with_parent({PARENT_VARIABLE: "x"}) is False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent-death signal")
def test_a_process_whose_parent_is_gone_already_exits_at_once() -> None:
    program = "from myelin.cluster.boot import die_with_parent; print(die_with_parent())"
    for parent, status, output in ((os.getpid(), 0, "True"), (1 << 22, 1, "")):
        environment = {**os.environ, PARENT_VARIABLE: str(parent)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout.strip()) == (status, output)
