"""The choice of instructions, the hooks, and the cache of compiled kernels."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from myelin.engine_api import EngineError, EngineOptions, GgmlType
from myelin_worker_cpu import cache, isa, kernels, plugin, records
from myelin_worker_cpu.formats import FORMATS

PREPARE = """
import time
from myelin_worker_cpu import kernels
from myelin.engine_api import GgmlType
began, seen = time.perf_counter(), []
kernels.prepare([GgmlType.F32], 2, lambda *report: seen.append(report))
assert seen[0][1] == 0 and seen[-1][1] == seen[-1][2] == len(seen) - 1, seen
hits = sum(sum(getattr(made, "cache_hits", 0) for made in [compiled]) for compiled in kernels._COMPILED.values())
print(time.perf_counter() - began, hits, len(kernels._COMPILED))
"""


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE],
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[float, int, int]:
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0
    seconds, hits, count = output.split()
    return float(seconds), int(hits), int(count)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_processes_that_compile_at_once_share_one_compilation(tmp_path: Path) -> None:
    both = [finish(process) for process in [start(tmp_path), start(tmp_path)]]
    hits = sorted(hits for _, hits, _ in both)
    count = both[0][2]
    assert hits == [0, count]
    _, warm_hits, _ = finish(start(tmp_path))
    assert warm_hits == count
    (folder,) = [entry for entry in tmp_path.iterdir() if entry.is_dir()]
    assert len(list(folder.glob("*.done"))) == count


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, hits, count = finish(start(tmp_path / "file" / "cache"))
    assert hits == 0
    assert count > 0


FULL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # files can be made, but nothing written to them
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_full_disk_is_no_error(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FULL_DISK + PREPARE],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    _, hits, count = ran.stdout.split()
    assert int(hits) == 0
    assert int(count) > 0
    assert ran.stderr.count("compiled kernels cannot be kept") == 1
    assert not list(tmp_path.rglob("*.done"))


@pytest.mark.parametrize("failing", ["directory", "compile_lock", "save", "set"])
def test_whatever_cannot_be_written_kernels_are_compiled(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[tuple[str, bool]] = []

    class Made:
        address = 64

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def compiling(name: str) -> Callable[..., Made]:
        def compile_one(*_: object, cached: bool) -> Made:
            made.append((name, cached))
            if cached and failing == "save" and name == "layer":  # numba saves as the last step of compiling
                refuse()
            return Made()

        return compile_one

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "_COMPILED", {})
    for name in ("stage", "stop", "layer", "remember", "attend", "matmul"):
        monkeypatch.setattr(kernels, f"compile_{name}", compiling(name))
    if failing == "set":
        monkeypatch.setattr(cache.Markers, "set", refuse)
    elif failing != "save":
        monkeypatch.setattr(cache, failing, refuse)
    reports: list[tuple[int, int]] = []
    with caplog.at_level("WARNING"):
        ready = kernels.prepare([GgmlType.F32], 2, lambda _, done, total: reports.append((done, total)))
    assert ready.layer == 64
    assert len(ready.matmul) == len(records.WIDTHS)
    assert [done for done, _ in reports] == list(range(reports[0][1] + 1))
    # what the cache took part in, up to its failure; a kernel that is compiled already isn't again
    with_cache = {"save": 3, "set": 1}.get(failing, 0)
    without = reports[0][1] - {"save": 2, "set": 1}.get(failing, 0)
    assert [cached for _, cached in made] == [True] * with_cache + [False] * without
    (line,) = caplog.messages
    assert line.startswith("compiled kernels cannot be kept, so every start compiles them again: ")
    assert os.strerror(errno.ENOSPC) in line


def test_the_folder_names_python_and_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    folders = {cache.directory(one) for one in isa.Isa}
    assert len(folders) == len(isa.Isa)
    assert all(folder.is_dir() and folder.parent == tmp_path for folder in folders)


def test_the_lock_keeps_others_out(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from myelin_worker_cpu import cache\n"
        "with cache.compile_lock(Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.readline()\n"
    )
    taken = threading.Event()

    def take() -> None:
        with cache.compile_lock(tmp_path):
            taken.set()

    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        waiting = threading.Thread(target=take, daemon=True)
        waiting.start()
        assert not taken.wait(0.3)
        other.stdin.write("go\n")
        other.stdin.flush()
        assert taken.wait(60)
        waiting.join()


def old_folder(root: Path, number: int, days: float) -> Path:
    folder = root / f"py311-avx2-{number:016x}"
    folder.mkdir()
    (folder / "kernel.nbc").write_bytes(b"code")
    moment = time.time() - days * 86_400
    os.utime(folder, (moment, moment))
    return folder


def test_caches_that_nobody_uses_are_removed(tmp_path: Path) -> None:
    mine, recent, old = (old_folder(tmp_path, number, days) for number, days in enumerate((40, 20, 31)))
    foreign = tmp_path / "somebody's own"
    foreign.mkdir()
    os.utime(foreign, (0, 0))
    cache.prune(mine)
    assert mine.is_dir()
    assert time.time() - mine.stat().st_mtime < 60
    assert recent.is_dir()
    assert foreign.is_dir()
    assert not old.exists()


def test_only_the_newest_caches_are_kept(tmp_path: Path) -> None:
    folders = [old_folder(tmp_path, number, number / 10) for number in range(cache.FOLDERS + 3)]
    mine = folders[-1]
    cache.prune(mine)
    assert [folder for folder in folders if folder.exists()] == [*folders[: cache.FOLDERS - 1], mine]


def test_a_cache_that_is_being_filled_stays(tmp_path: Path) -> None:
    mine, other = old_folder(tmp_path, 0, 0), old_folder(tmp_path, 1, 99)
    with cache.compile_lock(other) as held:
        assert held
        os.utime(other, (0, 0))
        cache.prune(mine)
        assert other.is_dir()
    os.utime(other, (0, 0))
    cache.prune(mine)
    assert not other.exists()
    cache.prune(tmp_path / "gone")  # nothing there: nothing happens


def test_markers_are_for_one_processor(tmp_path: Path) -> None:
    mine, other = cache.Markers(tmp_path, "zen 4"), cache.Markers(tmp_path, "n1")
    mine.set("stage")
    assert mine.has("stage")
    assert not mine.has("layer")
    assert not other.has("stage")


def test_instructions_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isa.available()[-1] is isa.Isa.PLAIN
    for one in isa.available():
        monkeypatch.setenv(isa.VARIABLE, one.value.upper())
        assert isa.chosen() is one
    for nothing in ("", "auto"):
        monkeypatch.setenv(isa.VARIABLE, nothing)
        assert isa.chosen() is isa.available()[0]
    monkeypatch.setenv(isa.VARIABLE, "avx1024")
    with pytest.raises(EngineError, match="avx1024") as raised:
        isa.chosen()
    assert "plain" in raised.value.hint


def test_hooks() -> None:
    support = plugin.myelin_engine_support()
    assert support is not None
    assert support.name == "cpu"
    assert support.types == frozenset(FORMATS)
    assert support.architectures == {"llama", "qwen2", "qwen3", "gemma3"}
    assert support.unavailable == ""
    assert plugin.myelin_engine("another", EngineOptions()) is None
    assert plugin.myelin_engine("cpu", EngineOptions()) is not None


def test_importing_the_plugin_is_cheap() -> None:
    code = "import sys, myelin_worker_cpu.plugin; print([m for m in ('numba', 'llvmlite') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
