"""How a container says what it is: its name, which the daemon keeps unique, and its labels. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from myelin.plugin import Attempt, LaunchKey, NodeId, RunId

RUN, NODE, ATTEMPT, OFFER = "myelin.run", "myelin.node", "myelin.attempt", "myelin.offer"


def container_name(key: LaunchKey) -> str:
    """The name of a key's container. Identifiers have no dots, so that no two keys share a name."""
    return f"myelin.{key.run}.{key.node}.{key.attempt}"


def labels_of(key: LaunchKey, offer: str) -> dict[str, str]:
    """Labels from which a lease can be rebuilt."""
    return {RUN: str(key.run), NODE: str(key.node), ATTEMPT: str(key.attempt), OFFER: offer}


def key_of(labels: Mapping[str, str] | None) -> LaunchKey | None:
    """The launch key in a container's labels; None where it isn't one of ours."""
    found = labels or {}
    run, node, attempt = found.get(RUN, ""), found.get(NODE, ""), found.get(ATTEMPT, "")
    if not run or not node or not (attempt.isascii() and attempt.isdecimal()):
        return None
    return LaunchKey(RunId(run), NodeId(node), Attempt(int(attempt)))


def of_run(run: RunId) -> dict[str, list[str]]:
    """The daemon's filter for the containers of one run."""
    return {"label": [f"{RUN}={run}"]}


OF_ANY_RUN: dict[str, list[str]] = {"label": [RUN]}
"""The daemon's filter for the containers of every run."""
