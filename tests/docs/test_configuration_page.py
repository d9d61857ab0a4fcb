"""docs/configuration.md has every setting, exactly as the sections declare them.

`python tests/docs/test_configuration_page.py` writes the tables anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from myelin.config.environment import RESERVED_VARIABLES
from myelin.config.explain import reference_table
from myelin.config.sections import CORE_SECTIONS
from myelin.plugins.registry import Registry

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
OURS = ("process", "docker", "vastai", "ray")


def tables() -> dict[str, str]:
    """The tables that belong on the page, by the name of their place."""
    plugins = {section.name: section.model for section in Registry.discover().config_sections() if section.name in OURS}
    return {"core settings": reference_table(CORE_SECTIONS), "plugin settings": reference_table(plugins)}


def written_anew(page: str) -> str:
    """The page with its tables as they should be."""
    for place, table in tables().items():
        pattern = re.compile(rf"(<!-- begin: {place} -->\n).*?(<!-- end: {place} -->)", re.DOTALL)
        assert pattern.search(page), place
        page = pattern.sub(lambda match, table=table: match[1] + table + match[2], page)
    return page


def test_the_tables_are_those_of_the_sections() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written_anew(page), "run `python tests/docs/test_configuration_page.py`"


def test_variables_that_are_no_settings_are_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [variable for variable in RESERVED_VARIABLES if f"`{variable}`" not in page] == []


def test_every_variable_that_the_sources_read_is_known() -> None:
    page = PAGE.read_text(encoding="utf-8")
    read: set[str] = set()
    for source in ROOT.glob("packages/*/src/**/*.py"):
        read |= set(re.findall(r"[\"'](MYELIN_[A-Z0-9_]+[A-Z0-9])[\"']", source.read_text(encoding="utf-8")))
    assert {variable for variable in read if f"`{variable}`" not in page} == set()


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
