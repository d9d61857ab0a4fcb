"""``python -m myelin_testkit.new``: a copy of the example under another name, which works at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from myelin.errors import UsageError
from myelin_testkit.new import create, main, renamed

PACKAGE = Path(__file__).parents[1]


def test_every_spelling_is_replaced() -> None:
    text = "myelin-provider-echo myelin_provider_echo EchoProvider MYELIN_ECHO_GRACE_S [echo] test_echo_provider.py"
    expected = (
        "myelin-provider-my-cloud myelin_provider_my_cloud MyCloudProvider MYELIN_MY_CLOUD_GRACE_S [my_cloud] "
        "test_my_cloud_provider.py"
    )
    assert renamed(text, "my-cloud") == renamed(text, "my_cloud") == expected


def test_nothing_of_the_old_name_is_left(tmp_path: Path) -> None:
    folder = create("my-cloud", tmp_path)
    assert folder == tmp_path / "myelin-provider-my-cloud"
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert set(files) == {
        "README.md",
        "pyproject.toml",
        "tests/test_my_cloud_provider.py",
        *(f"src/myelin_provider_my_cloud/{name}" for name in ("__init__.py", "node.py", "plugin.py", "provider.py")),
        "src/myelin_provider_my_cloud/py.typed",
    }
    assert not [name for name, text in files.items() if "echo" in (name + text).lower()]
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["entry-points"]["myelin.providers"] == {"my_cloud": "myelin_provider_my_cloud.plugin"}


def test_its_tests_pass_before_anything_is_changed(tmp_path: Path) -> None:
    folder = create("my-cloud", tmp_path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = kept | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stdout
    passed = re.search(r"(\d+) passed", found.stdout)
    assert passed
    assert int(passed[1]) >= 35


@pytest.mark.parametrize("name", ["", "My-Cloud", "1cloud", "a b", "../up", "cloud-", "class", "x" * 41])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="can't be a provider's name"):
        create(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "--into", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "myelin-provider-slurm") in said
    assert "--provider slurm" in said
    (tmp_path / "myelin-provider-slurm" / "README.md").write_text("mine")
    assert main(["slurm", "--into", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "myelin-provider-slurm" / "README.md").read_text() == "mine"


def test_the_wheel_carries_the_example_also_when_built_from_the_source_distribution(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, "--sdist", str(PACKAGE)], check=True, capture_output=True, timeout=120)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    subprocess.run([*build, "--wheel", str(unpacked)], check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened_wheel:
        opened_wheel.extractall(tmp_path / "site")
    site = tmp_path / "site"
    assert (site / "myelin_testkit" / "template" / "pyproject.toml").is_file()
    assert not list(site.rglob("__pycache__"))
    command = [sys.executable, "-m", "myelin_testkit.new", "slurm", "--into", str(tmp_path / "made")]
    environment = os.environ | {"PYTHONPATH": str(site)}
    subprocess.run(command, check=True, capture_output=True, timeout=60, env=environment, cwd=tmp_path)
    made = tmp_path / "made" / "myelin-provider-slurm" / "src" / "myelin_provider_slurm" / "provider.py"
    assert "class SlurmProvider" in made.read_text()
