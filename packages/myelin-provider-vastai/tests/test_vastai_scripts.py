"""What runs on a machine: valid shell, without secrets; the dead-man's switch."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin_provider_vastai.scripts import MAX_ONSTART_CHARACTERS, boot_command, onstart_script, setup_command


@pytest.mark.parametrize("dead_man_s", [0.0, 1.0, 900.0])
def test_the_start_script_is_shell_and_short_enough(dead_man_s: float) -> None:
    script = onstart_script(dead_man_s, "https://console.vast.ai/")
    assert len(script) < MAX_ONSTART_CHARACTERS
    assert ".no_auto_tmux" in script
    assert ("CONTAINER_API_KEY" in script) == (dead_man_s > 0)
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0


def test_the_machines_own_key_is_in_no_argument() -> None:
    for line in onstart_script(900, "https://console.vast.ai").splitlines():
        if "CONTAINER_API_KEY" in line:
            assert line.strip().startswith("printf ")  # a shell builtin, whose arguments are in no process list


def test_setup_is_the_setting_or_pip_for_this_version() -> None:
    assert setup_command("make me", "python3", "cpu", "1.2") == "make me"
    found = setup_command("", "python3", "triton", "1.2")
    assert "myelin-core==1.2 myelin-worker-triton==1.2" in found
    assert "myelin-worker" not in setup_command("", "python3", "reference", "1.2")


def run(setup: str, python: str, tmp_path: object, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path, "HOME": str(tmp_path)}
    command = boot_command(python, setup, 900)
    return subprocess.run(
        ["sh", "-c", command],
        input="the line\n",
        text=True,
        capture_output=True,
        env=environment,
        check=False,
        timeout=90,
    )


def test_the_worker_reads_what_came_in_and_setup_does_not(tmp_path) -> None:
    python = tmp_path / "py thon"
    python.write_text('#!/bin/sh\nread -r line; echo "got $line for $*"\n')
    python.chmod(0o755)
    done = run("cat; echo installing", str(python), tmp_path)
    assert done.returncode == 0
    assert done.stdout == "got the line for -m myelin worker --boot-stdin\n"
    assert done.stderr == "installing\n"


def test_a_setup_that_fails_is_said(tmp_path) -> None:
    done = run("false", "python3", tmp_path)
    assert done.returncode == 97
    assert "setup of the node failed" in done.stderr


def test_last_words_are_told_however_late_they_are_read(tmp_path) -> None:
    """Those who read them begin a second after the worker has ended, as they may on a busy machine."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "tail").write_text('#!/bin/sh\nsleep 1\nexec /usr/bin/tail "$@"\n')
    (programs / "tail").chmod(0o755)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nread -r line; echo announced; echo the end >&2; exit 3\n")
    python.chmod(0o755)
    done = run(":", str(python), tmp_path, path=f"{programs}:/usr/bin:/bin")
    assert (done.returncode, done.stdout, done.stderr) == (3, "announced\n", "the end\n")


@settings(max_examples=20, deadline=None)
@given(st.text(st.characters(codec="ascii", exclude_characters="\0\n"), min_size=1, max_size=20))
def test_any_interpreter_is_quoted(python: str) -> None:
    assert subprocess.run(["sh", "-n", "-c", boot_command(python, ":", 0)], check=False).returncode == 0
