"""What every part of a node has: who it is, its variables, its log and its tracer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.trace import Tracer

from myelin.cluster.provider import BootSpec
from myelin.telemetry import attributes
from myelin.transport.contract import PeerIdentity
from myelin.worker.logs import WorkerLog


@dataclass(frozen=True, slots=True)
class NodeContext:
    """One node, as its parts know it.

    Attributes:
        boot: Who it is.
        environment: The process's variables, with the boot line's before its own.
        log: Where it says what it does.
        tracer: Where its spans go.
    """

    boot: BootSpec
    environment: Mapping[str, str]
    log: WorkerLog
    tracer: Tracer

    @property
    def identity(self) -> PeerIdentity:
        """The node on a stream."""
        return PeerIdentity(self.boot.run, self.boot.node, self.boot.attempt)

    @property
    def fields(self) -> dict[str, str | int]:
        """The node on a span."""
        return {
            attributes.RUN: self.boot.run,
            attributes.NODE: self.boot.node,
            attributes.ATTEMPT: self.boot.attempt,
        }
