"""The real thing, but for the GPU: `myelin prompt` over two nodes gives the reference engine's tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from myelin_testkit.engine_compliance import RECIPES
from myelin_testkit.synthetic import write_model

pytest.importorskip("myelin_provider_process")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def tokens(engine: str, model: Path, folder: Path) -> list[int]:
    """Greedy tokens of a prompt over two nodes."""
    words = ["prompt", "--raw", "-N", "2", "--engine", engine, "--model", str(model), "--max-tokens", "4"]
    command = [sys.executable, "-m", "myelin", *words, "--max-context", "64", "--json", "ab"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MYELIN_")}
    environment = {**kept, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [stage["engine"] for stage in answer["stages"]] == [engine] * 2
    found: list[int] = answer["tokens"]
    return found


def test_two_nodes_give_the_reference_engines_tokens(tmp_path: Path) -> None:
    model = write_model(replace(RECIPES["qwen2"], n_layers=2, ffn_width=256), tmp_path / "model.gguf")[0]
    expected = tokens("reference", model, tmp_path)
    assert len(expected) == 4
    assert tokens("triton", model, tmp_path) == expected
