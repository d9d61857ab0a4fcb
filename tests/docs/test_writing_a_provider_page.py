"""docs/writing-a-provider.md is made of the example's files, whole and word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from myelin_testkit.new import create
from myelin_testkit.provider_compliance import Feature

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "myelin-provider-echo"
PAGE = (ROOT / "docs" / "writing-a-provider.md").read_text()

BLOCKS = dict(re.findall(r"^`([\w./-]+)`\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
"""The text of each block that has a file's name above it."""

SHOWN = sorted(
    str(path.relative_to(EXAMPLE))
    for path in EXAMPLE.rglob("*")
    if path.name == "pyproject.toml" or (path.suffix == ".py" and path.name != "__init__.py")
)


def test_the_page_shows_every_file_of_the_example_and_no_other():
    assert sorted(BLOCKS) == SHOWN
    assert len(SHOWN) == 5


@pytest.mark.parametrize("name", SHOWN)
def test_a_block_is_its_file(name):
    assert BLOCKS[name] == (EXAMPLE / name).read_text()


def test_no_code_stands_on_the_page_alone():
    assert len(re.findall(r"^```(?:python|toml)$", PAGE, re.MULTILINE)) == len(BLOCKS)


def test_the_commands_lead_to_where_they_say(tmp_path):
    name = re.search(r"^python -m myelin_testkit\.new (\S+)$", PAGE, re.MULTILINE)
    folder = re.search(r"^cd (\S+)$", PAGE, re.MULTILINE)
    assert name
    assert folder
    assert create(name[1], tmp_path).name == folder[1]
    provider = re.search(r"^myelin prompt .* --provider (\S+) -N 2$", PAGE, re.MULTILINE)
    assert provider
    assert f'\n{provider[1]} = "' in (tmp_path / folder[1] / "pyproject.toml").read_text()


def test_the_features_that_it_names_are_there():
    named = set(re.findall(r"Feature\.([A-Z_]+)", PAGE))
    assert "RECOVERY" in named
    assert named <= set(Feature.__members__)
