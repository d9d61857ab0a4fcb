"""Which of our environment variables a node gets.

A node needs most of what its parent has (paths, locale, proxies, ``OTEL_*``, settings of libraries), and an allow-list
would break on each machine in another way. So it inherits all but two kinds: names that look like credentials, and
Myelin's own ``MYELIN_*`` settings, since a node is told by its boot line what it must know. That is hygiene (a node's
crash report or log shouldn't hold the keys of a cloud), not a boundary: both processes belong to the same user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_CREDENTIAL = re.compile(
    r"(?:^|_)(?:API_?KEY|ACCESS_?KEY|KEY|KEYS|TOKEN|TOKENS|SECRET|SECRETS|PASS|PASSWORD|PASSWD|CREDENTIAL|CREDENTIALS|"
    r"COOKIE|PRIVATE|AUTH)(?:_|$)|APIKEY",
    re.IGNORECASE,
)
_OWN = "MYELIN_"


def inherited(name: str) -> bool:
    """Whether a node gets the variable ``name`` from its parent."""
    return not name.upper().startswith(_OWN) and not _CREDENTIAL.search(name)


def node_environment(parent: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """The environment of a node: what it inherits of ``parent``, and ``additions``, which win."""
    kept = {name: value for name, value in parent.items() if inherited(name)}
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **additions}
