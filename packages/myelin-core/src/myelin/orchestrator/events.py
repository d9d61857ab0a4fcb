"""What happens during a run, for whoever shows it: phases, the nodes' lives, progress, lines that nodes wrote."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from myelin.values import Attempt, NodeId


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """A phase of the bootstrap began (``state`` ``started``) or ended (``done``, ``failed``), after ``seconds``.

    Mending a pipeline that serves is told in the same way, as the phase ``recovery``.
    """

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


class NodeState(StrEnum):
    """Where an attempt is in its life, as it is told; each state at most once, in this order, but for ``lost``."""

    STARTING = "starting"
    """The provider has started it; ``detail`` is the offer."""
    ANNOUNCED = "announced"
    """It has said where it listens; ``detail`` is the address."""
    READY = "ready"
    """It was reached and has acknowledged."""
    LOADING = "loading"
    LOADED = "loaded"
    SERVING = "serving"
    """The chain serves, with it; told again after each recovery in which it stayed."""
    LOST = "lost"
    """It can't be counted on; ``detail`` says why."""
    REPLACED = "replaced"
    """It serves in the place of a lost one; ``seconds`` is what that took, from the loss on."""
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """An attempt of a node came into another state."""

    node: NodeId
    stage: int
    attempt: Attempt
    state: NodeState
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeLog:
    """A line that a node wrote."""

    node: NodeId
    stream: str
    text: str


class Observer(Protocol):
    """Told of everything, from the event loop, in order; must return at once."""

    def phase(self, event: PhaseEvent) -> None: ...

    def node(self, event: NodeEvent) -> None: ...

    def progress(self, event: ProgressEvent) -> None: ...

    def log(self, event: NodeLog) -> None: ...


class Silent:
    """An observer that shows nothing."""

    def phase(self, event: PhaseEvent) -> None:
        """Nothing."""

    def node(self, event: NodeEvent) -> None:
        """Nothing."""

    def progress(self, event: ProgressEvent) -> None:
        """Nothing."""

    def log(self, event: NodeLog) -> None:
        """Nothing."""
