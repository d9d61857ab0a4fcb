"""A headless Chromium for the tests of the page: what it writes to its console, what axe finds, and pictures."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
PICTURES = os.environ.get("DASHBOARD_PICTURES", "")
"""The folder for pictures of the page; a temporary one where it is empty."""


class Browser:
    """One Chromium, and all that its pages complained about."""

    def __init__(self, chromium: Any, folder: Path) -> None:
        self._chromium = chromium
        self._folder = folder
        self.complaints: list[str] = []

    def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light", **more: Any) -> Any:
        """A page in a window of its own, with nothing remembered."""
        context = self._chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, locale="en-GB", **more
        )
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(url)
        return page

    def picture(self, page: Any, name: str, *, whole: bool = True) -> None:
        """Keep how it looks."""
        self._folder.mkdir(parents=True, exist_ok=True)
        page.evaluate("window.scrollTo(0, 0)")
        page.screenshot(path=self._folder / f"{name}.png", full_page=whole, animations="disabled")

    def barriers(self, page: Any) -> list[str]:
        """What axe finds that would keep somebody out: serious and critical violations of WCAG 2.2 A and AA."""
        axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
        page.evaluate(axe)
        rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
        found = page.evaluate("rules => axe.run({runOnly: {type: 'tag', values: rules}})", rules)
        assert found["passes"], "axe has looked at nothing"
        return [
            f"{violation['impact']}: {violation['id']}: {node['target']} {node['failureSummary']}"
            for violation in found["violations"]
            if violation["impact"] in ("serious", "critical")
            for node in violation["nodes"]
        ]


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Debian's Chromium; where there is none (or no driver), the test is skipped."""
    sync_api = pytest.importorskip("playwright.sync_api")
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("there is no chromium")
    with sync_api.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=executable, args=list(FLAGS))
        try:
            yield Browser(launched, Path(PICTURES) if PICTURES else folder)
        finally:
            launched.close()


def sideways(page: Any) -> int:
    """By how many pixels the page is wider than its window."""
    found: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return found


def until(page: Any, condition: str, seconds: float = 60) -> None:
    """Wait until an expression is true. (The driver's own way needs ``eval``, which the page's policy forbids.)"""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)
