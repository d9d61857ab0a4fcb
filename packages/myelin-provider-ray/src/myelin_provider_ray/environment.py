"""Which variables of its actor's environment a worker gets.

Most of them: paths, locale, proxies, what Ray says of GPUs. Not Myelin's own settings, since the boot line tells a
worker what it must know, nor names that look like credentials, which no worker needs and a crash report may show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_CREDENTIAL = re.compile(
    r"(?:^|_)(?:API_?KEY|ACCESS_?KEY|KEYS?|TOKENS?|SECRETS?|PASS|PASSWORD|PASSWD|CREDENTIALS?|COOKIE|PRIVATE|AUTH)(?:_|$)"
    r"|APIKEY",
    re.IGNORECASE,
)


def inherited(name: str) -> bool:
    """Whether a worker gets the variable ``name``."""
    return not name.upper().startswith("MYELIN_") and not _CREDENTIAL.search(name)


def node_environment(parent: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: what it inherits of ``parent``, and ``additions``, which win."""
    kept = {name: value for name, value in parent.items() if inherited(name)}
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **additions}
