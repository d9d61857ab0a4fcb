"""Every Markdown page: its links lead somewhere, and a reader who begins at the README finds it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "packages", "examples", "tests", "benchmarks")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "changelog.d").glob("*.md")]
    + [page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md") if "node_modules" not in page.parts]
)
FRAGMENTS = [page for page in PAGES if page.parent.name == "changelog.d"]


def prose(page: Path) -> str:
    """A page's text without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may end in, as GitHub makes it: lower case, hyphens, no punctuation."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in words}


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """The page's relative links: as written, the file, the anchor. Fragments become part of the root's changelog."""
    folder = ROOT if page in FRAGMENTS else page.parent
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield target, (folder / path).resolve() if path else page, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for written, file, anchor in links(page):
        assert file.exists(), written
        assert file.is_relative_to(ROOT), written
        if anchor:
            assert anchor in anchors(file), written


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_in_passing_are_there(page: Path) -> None:
    bases = {ROOT, page.parent, *(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))}
    for name in re.findall(r"`((?:docs|packages|tests|benchmarks|examples)/[\w./-]+)`", prose(page)):
        assert any((base / name).exists() for base in bases), name


def test_every_page_is_found_from_the_readme() -> None:
    found, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in found and page.suffix == ".md":
            found.add(page)
            ahead += [file for _, file, _ in links(page)]
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in found and not unlinked(page)] == []


def unlinked(page: Path) -> bool:
    """Pages that nothing needs to lead to."""
    return page in FRAGMENTS or page == ROOT / "CHANGELOG.md" or ROOT / "tests" in page.parents
