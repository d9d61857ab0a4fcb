"""docs/architecture.md names every module of core in its room, every phase, and nothing that isn't there."""

from __future__ import annotations

import re
from pathlib import Path

import myelin
from myelin.telemetry.phases import PHASES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CORE = Path(myelin.__file__).parent


def rows_of(heading: str) -> list[tuple[str, str]]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w.]+)/` \| (.*) \|$", section, re.MULTILINE)


def rooms_of_the_page() -> dict[str, set[str]]:
    rows = rows_of("The rooms of core")
    return {room: set(re.findall(r"`(\w+\.(?:py|proto))`", text)) for room, text in rows}


def test_every_room_has_its_modules_and_no_other() -> None:
    rooms = {
        folder.name: {path.name for path in folder.iterdir() if path.suffix in (".py", ".proto")}
        - {"__init__.py", "control_pb2.py"}
        for folder in CORE.iterdir()
        if (folder / "__init__.py").exists()
    }
    assert rooms_of_the_page() == rooms


def test_every_folder_of_the_repository_is_there_with_its_own() -> None:
    rows = dict(rows_of("The repository"))
    assert all((ROOT / folder).is_dir() for folder in rows)
    tests = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")}
    assert set(re.findall(r"`(\w+)/`", rows["tests"])) == tests
    assert set(re.findall(r"`(\w+\.py)`", rows["benchmarks"])) == {path.name for path in ROOT.glob("benchmarks/*.py")}


def test_every_phase_is_there_in_order() -> None:
    (line,) = re.findall(r"^`(config → [^`]*)`$", PAGE.replace("→\n", "→ "), re.MULTILINE)
    assert line.split(" → ") == list(PHASES)
