"""docs/hooks.md and plugins/specs.py say the same."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from myelin.plugins import specs

PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()


def _specified() -> dict[str, str]:
    found = {}
    for name, function in vars(specs).items():
        if name.startswith("myelin_") and inspect.isfunction(function):
            found[name] = str(inspect.signature(function)).replace("'", "")
    return found


def test_the_page_has_every_hook_with_its_exact_signature_and_no_other():
    told = dict(re.findall(r"^### `(myelin_\w+)(\(.*\) -> .*)`$", PAGE, re.MULTILINE))
    assert told == _specified()


def test_the_page_has_every_group():
    assert set(re.findall(r"^\| `(myelin\.\w+)`", PAGE, re.MULTILINE)) == set(specs.GROUPS)


def test_the_page_has_every_state_of_failure():
    told = set(re.findall(r"^\| `([a-z]+)` \|", PAGE, re.MULTILINE))
    assert told == {"missing", "conflicting", "incompatible", "broken", "invalid", "disabled"}
