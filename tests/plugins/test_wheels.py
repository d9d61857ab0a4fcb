"""The wheels of this repository's packages: everything in them that is needed where only they are, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PACKAGES = sorted(path.parent for path in (Path(__file__).parents[2] / "packages").glob("*/pyproject.toml"))
NAMES = [package.name for package in PACKAGES]
BUILD = """
import json, os, sys
from hatchling.build import build_wheel
made = {}
for package in sys.argv[2:]:
    os.chdir(package)
    made[package] = build_wheel(sys.argv[1])
json.dump(made, sys.stdout)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, set[str]]:
    """What is in each package's wheel; all are built by one process."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-c", BUILD, str(folder), *map(str, PACKAGES)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    contents = {}
    for package, name in json.loads(found.stdout).items():
        with zipfile.ZipFile(folder / name) as wheel:
            contents[Path(package)] = set(wheel.namelist())
    return contents


@pytest.mark.parametrize("package", PACKAGES, ids=NAMES)
def test_a_wheel_holds_its_sources_its_licence_and_nothing_else(package: Path, wheels: dict[Path, set[str]]) -> None:
    names = wheels[package]
    files = {path.relative_to(package / "src").as_posix() for path in (package / "src").rglob("*") if path.is_file()}
    sources = {name for name in files if "__pycache__" not in name}
    (module,) = {name.split("/")[0] for name in sources}
    (info,) = {name.split("/")[0] for name in names} - {module}
    assert sources | {f"{module}/py.typed", f"{info}/licenses/LICENSE"} <= names
    extra = names - sources - {name for name in names if name.startswith(f"{info}/")}
    assert {name.split("/")[1] for name in extra} <= {"template", "node"}  # what is taken from the repository's root
    assert not [name for name in names if name.endswith(".pyc")]


def test_packages_ask_for_each_other_and_for_the_rest_with_one_bound_each() -> None:
    asked: dict[str, set[str]] = {}
    for package in PACKAGES:
        project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for words in project["dependencies"]:
            requirement = Requirement(words)
            asked.setdefault(requirement.name.lower(), set()).add(str(requirement.specifier))
            if requirement.name == "myelin-core":
                assert str(requirement.specifier) == f"=={project['version']}"
    assert {name: bounds for name, bounds in asked.items() if len(bounds) > 1} == {}
