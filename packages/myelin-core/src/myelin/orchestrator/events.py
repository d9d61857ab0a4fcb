"""What happens during a run, for whoever shows it: phases, progress of each node, lines that nodes wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from myelin.values import NodeId


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """A phase of the bootstrap began (``state`` ``started``) or ended (``done``, ``failed``), after ``seconds``."""

    phase: str
    state: str
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How far a node is with its stage. ``phase``: ``open``, ``fetch``, ``compile``, ``load``; ``total`` 0 is
    unknown."""

    node: NodeId
    stage: int
    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class NodeLog:
    """A line that a node wrote."""

    node: NodeId
    stream: str
    text: str


class Observer(Protocol):
    """Told of everything, from the event loop, in order; must return at once."""

    def phase(self, event: PhaseEvent) -> None: ...

    def progress(self, event: ProgressEvent) -> None: ...

    def log(self, event: NodeLog) -> None: ...


class Silent:
    """An observer that shows nothing."""

    def phase(self, event: PhaseEvent) -> None:
        """Nothing."""

    def progress(self, event: ProgressEvent) -> None:
        """Nothing."""

    def log(self, event: NodeLog) -> None:
        """Nothing."""
