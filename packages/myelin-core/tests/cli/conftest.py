"""A command line without a pipeline behind it: what would come up is scripted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))


@pytest.fixture(autouse=True)
def empty_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings but those of the test: no variables, no file in the current folder."""
    import os

    for variable in list(os.environ):
        if variable.startswith(("MYELIN_", "HF_")):
            monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pipeline that every command gets."""
    from scripted_run import ScriptedRun

    run = ScriptedRun()
    monkeypatch.setenv("MYELIN_SERVE_HTTP", "127.0.0.1:0")
    monkeypatch.setattr("myelin.cli.composition.open_pipeline", run.open)
    monkeypatch.setattr("myelin.cli.composition.prompter", run.prompter)

    def encode(template: object, tokenizer: Any, messages: Sequence[Any]) -> list[int]:
        encoded: list[int] = tokenizer.encode("".join(f"[{one['role']}={one['content']}]" for one in messages))
        return encoded

    monkeypatch.setattr("myelin.serve.prompts.encode_chat", encode)
    return run


@pytest.fixture
def myelin(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process; gives its exit code, stdout and stderr."""
    from myelin.cli.main import main

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(words)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run
