"""What a stage is called on the cluster, so that a listing alone is enough to find it again. Pure.

The actor and its placement group have the same name, ``myelin.<run>.<node>.<attempt>``: the launch key. Ray refuses a
second one of a name within a namespace, which is what makes a launch idempotent, whoever asks and how often.
"""

from __future__ import annotations

import re

from myelin.plugin import Attempt, LaunchKey, NodeId, RunId

_NAME = r"[A-Za-z0-9][A-Za-z0-9-]{0,62}"
_PATTERN = re.compile(rf"myelin\.({_NAME})\.({_NAME})\.([1-9][0-9]{{0,9}})")


def write_name(key: LaunchKey) -> str:
    """The name of one start.

    Raises:
        ValueError: A part of the key can't be in a name.
    """
    name = f"myelin.{key}"
    if read_name(name) != key:
        raise ValueError(f"{name!r} can't be a name")
    return name


def read_name(text: str) -> LaunchKey | None:
    """The key in a name; None where it isn't one of ours."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    run, node, attempt = match.groups()
    return LaunchKey(RunId(run), NodeId(node), Attempt(int(attempt)))
