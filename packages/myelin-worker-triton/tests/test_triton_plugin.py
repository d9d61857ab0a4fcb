"""The hooks: cheap to import, and honest where there is no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from myelin.engine_api import EngineOptions
from myelin_worker_triton import plugin
from myelin_worker_triton.engine import TritonEngine


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, myelin_worker_triton.plugin; print({'torch', 'triton', 'numpy'} & set(sys.modules) - {'numpy'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"


def test_the_interpreter_is_never_chosen() -> None:
    support = plugin.myelin_engine_support()
    assert support is not None
    assert support.name == "triton"
    assert support.rank < 50
    assert "interpreter" in support.unavailable


def test_no_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(plugin, "_DEVICES", ())
    support = plugin.myelin_engine_support()
    assert support is not None
    assert support.unavailable == "no GPU driver on this machine"


def test_the_engine_is_made_by_its_name_alone() -> None:
    assert plugin.myelin_engine("cpu", EngineOptions()) is None
    assert isinstance(plugin.myelin_engine("triton", EngineOptions()), TritonEngine)


def test_the_engine_says_that_there_is_no_gpu() -> None:
    code = (
        "from myelin.engine_api import EngineOptions, EngineError\n"
        "from myelin_worker_triton.plugin import myelin_engine\n"
        "import torch\n"
        "if torch.cuda.is_available(): raise SystemExit(77)\n"
        "try: myelin_engine('triton', EngineOptions())\n"
        "except EngineError as error: print(error.reason)\n"
    )
    environment = {"PATH": "/usr/bin", "HOME": "/tmp"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    if done.returncode == 77:
        pytest.skip("there is one")
    assert done.stdout.strip() == "no-gpu", done.stderr


@pytest.mark.parametrize("module", ["kernels.attention", "operators", "planes", "stage"])
def test_what_runs_on_a_bare_gpu_machine_imports_no_myelin(module: str) -> None:
    code = (
        f"import sys, myelin_worker_triton.{module}\n"
        "print([name for name in sys.modules if name == 'myelin' or name.startswith('myelin.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
