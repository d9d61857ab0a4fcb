"""The GPU benchmark goes through everything on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_dry_run_checks_and_times_every_part(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    command = [sys.executable, str(BENCHMARK), "--dry-run", "--json", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found["dry_run"] is True
    assert found["failures"] == []
    kinds = [row["kind"] for row in found["results"]]
    assert set(kinds) == {"check", "copy", "kernel", "decode", "prompt"}
    assert all(row["ok"] for row in found["results"] if row["kind"] == "check")
    assert kinds.count("decode") == 4
