"""Packages that this repository doesn't know: picked up by ``pip install`` alone, and told apart where they are bad."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

Myelin = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the wheels of both packages, built here."""
    work = tmp_path_factory.mktemp("acme")
    wheels, target = work / "wheels", work / "site"
    for package in ("acme_planner", "acme_provider"):
        source = work / package
        shutil.copytree(HERE / package, source)
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(source)]
        subprocess.run(build, check=True, capture_output=True, timeout=120)
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, *map(str, sorted(wheels.glob("*.whl")))], check=True, capture_output=True, timeout=120)
    return target


def run_with(*folders: Path, cwd: Path) -> Myelin:
    """Runs the command line with more folders of installed packages, and no settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MYELIN_", "HF_"))}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "myelin", *words],
            env=environment | variables,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    return run


@pytest.fixture
def myelin(installed: Path, tmp_path: Path) -> Myelin:
    return run_with(installed, cwd=tmp_path)


def rows_of(found: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, Any]]:
    assert found.returncode == 0, found.stderr
    return {(row["group"], row["name"]): row for row in json.loads(found.stdout)}


def test_both_are_listed_with_their_distributions(myelin: Myelin) -> None:
    rows = rows_of(myelin("plugins", "--json"))
    assert rows["myelin.planners", "acme"] == {
        "group": "myelin.planners",
        "name": "acme",
        "distribution": "acme-planner",
        "version": "2.5",
        "state": "loaded",
        "reason": "",
    }
    assert rows["myelin.providers", "acme"]["state"] == "loaded"
    assert rows["myelin.planners", "pipeline"]["state"] == "loaded"


def test_without_installing_them_they_are_not_there(tmp_path: Path) -> None:
    rows = rows_of(run_with(cwd=tmp_path)("plugins", "--json"))
    assert not [name for _, name in rows if name == "acme"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from myelin_testkit.synthetic import Recipe, write_model

    (path,) = write_model(Recipe(n_layers=5), tmp_path_factory.mktemp("model") / "small.gguf")
    return path


def layers_of(found: subprocess.CompletedProcess[str]) -> tuple[str, list[list[int]]]:
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    return document["planner"], [stage["layers"] for stage in document["stages"]]


def test_the_planner_is_asked_before_the_built_in_one_and_may_decline(myelin: Myelin, model: Path) -> None:
    plan = ("plan", "--model", str(model), "-N", "3", "--json")
    assert layers_of(myelin(*plan)) == ("acme", [[0, 1], [1, 2], [2, 5]])
    assert layers_of(myelin(*plan, "--split", "2,2,1")) == ("pipeline", [[0, 2], [2, 4], [4, 5]])
    planner, layers = layers_of(myelin(*plan, "--set", "runtime.planner=pipeline"))
    assert planner == "pipeline"
    assert layers != [[0, 1], [1, 2], [2, 5]]
    planner, _ = layers_of(myelin(*plan, MYELIN_RUNTIME_DISABLED_PLUGINS="acme-planner"))
    assert planner == "pipeline"


def test_the_provider_and_its_section_are_used(myelin: Myelin, model: Path, tmp_path: Path) -> None:
    (tmp_path / "myelin.toml").write_text("[acme]\nregion = 'south'\n")
    prompt = ("prompt", "hi", "--model", str(model), "--provider", "acme")
    found = myelin(*prompt)
    assert (found.returncode, found.stdout) == (1, "")
    assert "all machines in the south are taken" in found.stderr
    assert "in the east" in myelin(*prompt, MYELIN_ACME_REGION="east").stderr
    assert "in the west" in myelin(*prompt, "--set", "acme.region=west", MYELIN_ACME_REGION="east").stderr


def test_its_settings_are_explained_checked_and_masked(myelin: Myelin) -> None:
    found = myelin("config", "--json", MYELIN_ACME_KEY="hush-hush", MYELIN_ACME_REGION="east")
    rows = {row["key"]: row for row in json.loads(found.stdout)["settings"]}
    assert rows["acme.region"] == {
        "key": "acme.region",
        "value": "east",
        "layer": "environment",
        "origin": "MYELIN_ACME_REGION",
    }
    assert rows["acme.key"]["value"] == "********"
    assert "hush-hush" not in found.stdout + found.stderr
    found = myelin("config", "--set", "acme.regoin=x")
    assert found.returncode == 2
    assert "did you mean acme.region?" in found.stderr


def install_by_hand(folder: Path, name: str, entries: str, *, requires: str = "myelin-core", **modules: str) -> None:
    """What pip leaves behind of a distribution, written directly."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requires}\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(entries))
    for module, text in modules.items():
        (folder / f"{module}.py").write_text("from myelin.plugin import hookimpl\n" + textwrap.dedent(text))


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """A folder with one package for each way to be bad."""
    folder = tmp_path / "zoo"
    install_by_hand(folder, "zoo-one", "[myelin.providers]\ntwin = zoo_twin\nbetween = zoo_well\n", zoo_well=PROVIDER)
    install_by_hand(folder, "zoo-two", "[myelin.providers]\ntwin = zoo_twin\n")
    install_by_hand(
        folder, "zoo-old", "[myelin.providers]\nold = zoo_old\n", requires="myelin-core>=99", zoo_old="1 / 0"
    )
    install_by_hand(
        folder, "zoo-broken", "[myelin.providers]\nbroken = zoo_broken\n", zoo_broken="import no_such_sdk\n"
    )
    install_by_hand(
        folder,
        "zoo-invalid",
        "[myelin.providers]\ninvalid = zoo_invalid\n",
        zoo_invalid="@hookimpl\ndef myelin_provider(nmae):\n    return None\n",
    )
    install_by_hand(folder, "zoo-off", "[myelin.providers]\noff = zoo_off\n", zoo_off="1 / 0")
    return folder


PROVIDER = """
@hookimpl
def myelin_provider(name):
    return None
"""


def test_each_state_is_a_row_with_its_distribution_and_cause(zoo: Path, tmp_path: Path) -> None:
    found = run_with(zoo, cwd=tmp_path)(
        "plugins",
        "--json",
        MYELIN_RUNTIME_DISABLED_PLUGINS="off",
        MYELIN_NODE_PROVIDER="gone",
    )
    rows = {name: row for (group, name), row in rows_of(found).items() if group == "myelin.providers"}
    told = {name: (row["state"], row["distribution"]) for name, row in rows.items()}
    assert (
        told.items()
        >= {
            "gone": ("missing", ""),
            "twin": ("conflicting", "zoo-one, zoo-two"),
            "between": ("loaded", "zoo-one"),
            "old": ("incompatible", "zoo-old"),
            "broken": ("broken", "zoo-broken"),
            "invalid": ("invalid", "zoo-invalid"),
            "off": ("disabled", "zoo-off"),
        }.items()
    )
    causes = {
        "twin": "zoo-one 1.0 and zoo-two 1.0",
        "old": "myelin-core>=99",
        "broken": "no_such_sdk",
        "invalid": "nmae",
        "off": "runtime.disabled_plugins",
    }
    for name, cause in causes.items():
        assert cause in rows[name]["reason"]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("gone", "pip install myelin-provider-gone"),
        ("twin", "uninstall all but one of zoo-one, zoo-two"),
        ("old", "pip install --upgrade myelin-core zoo-old"),
        ("broken", "reinstall zoo-broken"),
        ("invalid", "upgrade zoo-invalid"),
        ("off", "runtime.disabled_plugins"),
    ],
)
def test_using_one_is_an_error_of_two_lines_with_the_remedy(zoo: Path, tmp_path: Path, name: str, remedy: str) -> None:
    found = run_with(zoo, cwd=tmp_path)("prompt", "hi", "--provider", name, MYELIN_RUNTIME_DISABLED_PLUGINS="off")
    assert (found.returncode, found.stdout) == (1, "")
    what, how = found.stderr.splitlines()
    assert what.startswith("Error: The provider")
    assert name in what
    assert remedy in how


def test_bad_plugins_that_nobody_asked_for_are_in_nobodys_way(zoo: Path, tmp_path: Path, model: Path) -> None:
    found = run_with(zoo, cwd=tmp_path)("plan", "--model", str(model), "-N", "2", "--json")
    assert layers_of(found)[0] == "pipeline"
