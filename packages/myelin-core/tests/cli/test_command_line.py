"""The frame of the command line: options and their settings, signals, output, and what is imported when."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import myelin as package
from myelin import __version__
from myelin.cli.display import Display
from myelin.cli.inspect import _ranges
from myelin.cli.options import ALL_OPTIONS
from myelin.cli.output import human_bytes, table
from myelin.cli.running import Interrupted, run_to_end
from myelin.config.environment import every_name
from myelin.config.sections import CORE_SECTIONS
from myelin.orchestrator.events import NodeEvent, NodeState, PhaseEvent, ProgressEvent
from myelin.values import Attempt, NodeId

Myelin = Callable[..., tuple[int, str, str]]


def test_options_are_those_that_the_settings_name() -> None:
    declared = {name.key: name.flag for name in every_name(CORE_SECTIONS) if name.flag}
    assert {option.key: "/".join(option.flags) for option in ALL_OPTIONS} == declared
    flags = [flag for option in ALL_OPTIONS for flag in option.flags]
    assert len(flags) == len(set(flags))


def python(source: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


def test_help_imports_nothing_heavy() -> None:
    found = python(
        """
        import sys
        from myelin.cli.main import main
        assert main(["--help"]) == 0
        heavy = ("numpy", "pydantic_settings", "grpc", "opentelemetry", "pluggy", "stevedore", "tokenizers", "httpx",
                 "jinja2", "gguf", "numba", "huggingface_hub", "google.protobuf")
        print([name for name in heavy if name in sys.modules])
        """
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "[]"


def test_commands_that_texts_name_are_there(myelin: Myelin) -> None:
    """A remedy that names a command which isn't there would be none."""
    _, out, _ = myelin("--help")
    for path in Path(package.__file__).parent.rglob("*.py"):
        for command in re.findall(r"`myelin ([a-z]+)", path.read_text(encoding="utf-8")):
            assert re.search(rf"\b{command}\b", out), f"{path.name} names `myelin {command}`"


def test_python_m_myelin_works_and_every_command_has_help() -> None:
    found = subprocess.run([sys.executable, "-m", "myelin", "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("myelin 0.")


@pytest.mark.skipif(sys.platform == "win32", reason="descriptors are closed in a shell's way")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_lead_to_nowhere(closed: str) -> None:
    """An event loop must never get their numbers: uvloop aborts the process over them."""
    source = "from myelin.cli.main import main; from myelin.cli.running import run_to_end; import asyncio, os, sys; "
    check = "assert main(['--version'] if not sys.argv[1:] else None) == 0; run_to_end(asyncio.sleep(0)); os.fstat(2)"
    command = ["sh", "-c", f'exec "$0" -c "$1" --version {closed}', sys.executable, source + check]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == ("" if ">&-" in closed.replace("2>&-", "") else f"myelin {__version__}\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_told_in_two_lines() -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "myelin", "plugins"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert found.returncode == 1
    assert found.stderr == (
        "Error: The answer could not be written: No space left on device\n"
        "Hint: free some space, or write it elsewhere\n"
    )


def test_characters_that_the_terminal_lacks_are_replaced() -> None:
    found = python(
        """
        from myelin.cli.output import answer, prepare_streams, tell
        prepare_streams()
        answer("a \\N{FOX FACE}")
        tell("b \\N{FOX FACE}")
        """,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert (found.stdout, found.stderr) == ("a ?\n", "b \\U0001f98a\n")


@pytest.mark.parametrize(
    "command", ["prompt", "chat", "serve", "plan", "inspect", "plugins", "config", "doctor", "worker", "bench"]
)
def test_every_command_has_help(myelin: Myelin, command: str) -> None:
    code, out, _ = myelin(command, "--help")
    assert code == 0
    assert "Usage: myelin " + command in out


def test_no_command_shows_help_and_is_no_success(myelin: Myelin) -> None:
    code, out, err = myelin()
    assert code == 2
    assert "Usage" in out + err


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_and_everything_is_released(number: int) -> None:
    released = []

    async def main() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.01)
            released.append(True)

    with pytest.raises(Interrupted) as caught:
        run_to_end(main())
    assert caught.value.signal == number
    assert released == [True]


def test_a_signal_that_is_dealt_with_cancels_nothing() -> None:
    seen: list[int] = []

    def intercept(number: int) -> bool:
        seen.append(number)
        return True

    async def main() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        return "done"

    assert run_to_end(main(), intercept=intercept) == "done"
    assert seen == [signal.SIGINT]


def test_a_second_signal_kills() -> None:
    found = python(
        """
        import asyncio, os, signal
        from myelin.cli.running import run_to_end
        async def main():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(30)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(30)
        run_to_end(main())
        """
    )
    assert found.returncode == -signal.SIGTERM


def test_what_main_gives_and_raises_comes_through() -> None:
    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_to_end(fails())


def test_a_reader_that_has_had_enough_is_no_traceback() -> None:
    found = subprocess.run(
        f"{sys.executable} -m myelin config | true", shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in found.stderr
    assert "Error" not in found.stderr


# Progress


def show(*events: tuple[float, ProgressEvent], level: str = "warning") -> list[str]:
    lines: list[str] = []
    now = [0.0]
    display = Display(level, bars=False, write=lines.append, clock=lambda: now[0])
    for when, event in events:
        now[0] = when
        display.progress(event)
    return lines


def progress(done: int, total: int, *, stage: int = 0, phase: str = "load") -> ProgressEvent:
    return ProgressEvent(NodeId(f"stage-{stage}"), stage, phase, done, total)


def test_plain_lines_are_few_and_end_with_the_whole() -> None:
    events = [(tick / 10, progress(tick * 1000, 100_000)) for tick in range(101)]
    lines = show(*events)
    assert lines[0] == "stage 0: loading 0 B of 100.0 kB"
    assert lines[-1] == "stage 0: loading 100.0 kB of 100.0 kB"
    assert len(lines) == 6


def test_plain_lines_do_not_repeat_themselves() -> None:
    lines = show(*[(float(tick), progress(1, 9, phase="compile")) for tick in range(31)])
    assert lines == ["stage 0: compiling 1 of 9"] * 3
    assert show((0.0, progress(9, 9)), (1.0, progress(9, 9)), (99.0, progress(9, 9))) == ["stage 0: loading 9 B of 9 B"]


def test_each_stage_and_phase_has_its_own_lines() -> None:
    lines = show(
        (0.0, progress(0, 0, phase="open")), (0.0, progress(1, 2)), (0.0, progress(3, 0, stage=1, phase="fetch"))
    )
    assert lines == ["stage 0: opening", "stage 0: loading 1 B of 2 B", "stage 1: fetching 3 B"]


def test_what_is_fetched_before_there_are_stages_is_the_models() -> None:
    assert show((0.0, progress(1, 2, stage=-1, phase="fetch"))) == ["model: fetching 1 B of 2 B"]


@pytest.mark.parametrize("bars", [False, True])
def test_a_lost_node_and_the_one_in_its_place_are_a_line_each(bars: bool) -> None:
    lines: list[str] = []
    display = Display(bars=bars, write=lines.append)

    def node(attempt: int, state: NodeState, detail: str = "", seconds: float = 0.0) -> None:
        display.node(NodeEvent(NodeId("stage-1"), 1, Attempt(attempt), state, detail, seconds))

    node(1, NodeState.STARTING, "here")
    display.phase(PhaseEvent("serving", "started"))
    node(1, NodeState.SERVING)
    node(1, NodeState.LOST, "was killed")
    node(2, NodeState.STARTING, "there")
    display.progress(progress(1, 2, stage=1))
    node(2, NodeState.SERVING)
    node(2, NodeState.REPLACED, seconds=2.14)
    node(2, NodeState.LOST, "was killed again, and is given up")
    assert [line for line in lines if line] == [
        "stage-1 was lost (was killed); starting another",
        "stage-1 is back after 2.1 s",
    ]
    assert (lines[0] == "") == bars  # off the line that an answer is written on


def test_bars_are_drawn_on_a_terminal_and_taken_away(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("info", bars=True) as display:
        display.progress(progress(1, 2))
        display.progress(progress(1, 2, stage=1, phase="compile"))
        display.phase(PhaseEvent("stage_provision", "done", 1.0))
        display.progress(progress(2, 2))
    output = capsys.readouterr()
    assert output.out == ""
    assert "stage_provision done (1.00 s)" in output.err


# Words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_bytes_for_people(count: int, words: str) -> None:
    assert human_bytes(count) == words


@given(st.integers(0, 10**15))
def test_bytes_have_at_most_three_digits_before_the_point(count: int) -> None:
    number = human_bytes(count).split()[0]
    assert len(number.split(".")[0]) <= 3 or count >= 10**15 - 10**11


def test_tables_are_aligned() -> None:
    assert table(("a", "bbb"), [("xx", 1), ("y", 222)], right=(1,)) == "a   bbb\nxx    1\ny   222"


@given(st.sets(st.integers(1, 30)))
def test_ranges_hold_exactly_their_numbers(numbers: set[int]) -> None:
    text = _ranges(sorted(numbers))
    found: set[int] = set()
    for part in text.split(", ") if text else []:
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers
