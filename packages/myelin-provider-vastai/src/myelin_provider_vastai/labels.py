"""The label of a rented machine: who it is for, so that a listing alone is enough to find it again.

``myelin.1.<run>.<node>.<attempt>.<offer>``: the format's number, the launch key, and the offer. Runs and nodes are
letters, digits and ``-`` (at most 63), so the dots are unambiguous and the whole stays below Vast.ai's 256 characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256

from myelin.plugin import Attempt, LaunchKey, NodeId, RunId

MAX_LABEL_CHARACTERS = 256
_NAME = r"[A-Za-z0-9][A-Za-z0-9-]{0,62}"
_LABEL = re.compile(rf"myelin\.1\.({_NAME})\.({_NAME})\.([1-9][0-9]{{0,9}})\.({_NAME})")
_FIRST_PORT, _PORTS = 20_000, 12_000


@dataclass(frozen=True, slots=True)
class Label:
    """What a label says: the launch key, and the id of the offer that was taken."""

    key: LaunchKey
    offer: str


def write_label(key: LaunchKey, offer: str) -> str:
    """The label of one start. Pure.

    Raises:
        ValueError: A part of it can't be in a label.
    """
    label = f"myelin.1.{key.run}.{key.node}.{key.attempt}.{offer}"
    if read_label(label) != Label(key, offer):
        raise ValueError(f"{label!r} can't be a label")
    return label


def read_label(text: str | None) -> Label | None:
    """What a label says; None where it isn't one of ours. Pure."""
    match = _LABEL.fullmatch(text or "")
    if match is None:
        return None
    run, node, attempt, offer = match.groups()
    return Label(LaunchKey(RunId(run), NodeId(node), Attempt(int(attempt))), offer)


def port_for(label: str) -> int:
    """The port inside the node on which its worker listens, below Linux's ephemeral ones (32768 …). Pure.

    One for each label rather than one for all, so that an image's own services rarely have it, and a worker of an
    earlier attempt never.
    """
    return _FIRST_PORT + int.from_bytes(sha256(label.encode()).digest()[:4], "big") % _PORTS
