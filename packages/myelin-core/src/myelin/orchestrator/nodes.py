"""The nodes of a run: logical ones, which last, and the attempts that embody them one after another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from pydantic import SecretStr

from myelin.cluster.provider import Lease
from myelin.cluster.spec import NodeSpec
from myelin.errors import MyelinError, NodeError
from myelin.orchestrator.control import Loaded, NodeControl
from myelin.orchestrator.pipeline import StageStatus
from myelin.orchestrator.planning import Planning
from myelin.planner.run_plan import StagePlan
from myelin.transport.contract import Endpoint
from myelin.wire import control_pb2 as pb

KEPT_LINES = 20


class Step(IntEnum):
    """How far an attempt is on its way; the steps follow one another, and each has a phase of the bootstrap."""

    LAUNCHED = 0
    """It has a lease."""
    ANNOUNCED = 1
    """It has said where it listens."""
    REACHED = 2
    """It was dialled, and is the one that was meant."""
    ACKNOWLEDGED = 3
    """It has answered that it is ready."""
    LOADED = 4
    """It holds its stage."""
    CONFIRMED = 5
    """What it holds is known."""


@dataclass(eq=False)
class NodeAttempt:
    """One start of a node, and what is known of it.

    Attributes:
        lease: As the last listing showed it.
        stage: What it is to hold.
        ready_by: The loop's time at which it must be ready.
        on_lost: Told once when it is lost.
        step: How far it is.
        control: Its control stream, once dialled.
        loaded: What it said when it had loaded.
        status: The stage as it was then.
        redialled: Whether its control stream was dialled anew since it last served.
        last_lines: What it wrote last.
        announced: Set once its endpoint is known.
        error: Why it is lost, once it is.
        lost: Set then.
    """

    lease: Lease
    stage: StagePlan
    ready_by: float
    on_lost: Callable[[MyelinError], None] = lambda error: None
    step: Step = Step.LAUNCHED
    control: NodeControl | None = None
    loaded: Loaded | None = None
    status: StageStatus | None = None
    redialled: bool = False
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    error: MyelinError | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens, once it has announced that."""
        assert self.lease.endpoint is not None
        return self.lease.endpoint

    @property
    def reached(self) -> NodeControl:
        """Its control stream, once dialled."""
        assert self.control is not None
        return self.control

    def lose(self, error: MyelinError) -> None:
        """It can't be counted on any more. The first reason stays."""
        if self.error is None:
            self.error = error
            self.lost.set()
            self.on_lost(error)

    def found(self, control: NodeControl) -> None:
        """It was lost, and has answered again on a new control stream."""
        self.control = control
        self.redialled = True
        self.step = Step.REACHED
        self.error = None
        self.lost = asyncio.Event()


@dataclass(eq=False)
class Node:
    """A node as it is wanted, whatever embodies it.

    Attributes:
        spec: What it must be.
        stage: What it holds.
        attempt: What embodies it now; None before the first launch, and between two.
        former: The attempt that was lost, until another one has taken its place.
        tries: Launches since it last served.
    """

    spec: NodeSpec
    stage: StagePlan
    attempt: NodeAttempt | None = None
    former: NodeAttempt | None = None
    tries: int = 0

    @property
    def live(self) -> NodeAttempt:
        """Its attempt, once launched."""
        assert self.attempt is not None
        return self.attempt

    def stands(self, step: Step) -> bool:
        """Whether it is there, and as far as ``step``."""
        return self.attempt is not None and self.attempt.error is None and self.attempt.step >= step


def wanted_nodes(plan: Planning, secret: SecretStr, environment: Mapping[str, SecretStr]) -> tuple[Node, ...]:
    """A node for each stage of a plan, which nothing embodies yet. Pure.

    Args:
        secret: The run's.
        environment: The variables that each of them gets.
    """
    return tuple(
        Node(
            NodeSpec(
                run=plan.request.run,
                node=stage.node,
                memory_bytes=stage.memory_bytes,
                engine=plan.engine.name,
                transport=plan.request.transport,
                secret=secret,
                environment=environment,
                offer=plan.offer_of(stage.node),
            ),
            stage,
        )
        for stage in plan.plan.stages
    )


def narrowed(endpoint: Endpoint, mask: str) -> Endpoint:
    """``endpoint`` with only the candidates that begin with ``mask``; all where it is empty. Pure.

    Raises:
        NodeError: None is left.
    """
    kept = tuple(candidate for candidate in endpoint.candidates if candidate.startswith(mask))
    if not kept:
        raise NodeError(
            f"none of the addresses {', '.join(endpoint.candidates)} matches the mask {mask!r}",
            "correct endpoint_addr_mask, or leave it empty",
            reason="no-address",
        )
    return Endpoint(kept)


def stage_status(attempt: NodeAttempt, provider: str, engine: str, status: pb.Status) -> StageStatus:
    """What is known of a loaded stage. Pure."""
    assert attempt.loaded is not None
    stage, loaded = attempt.stage, attempt.loaded
    return StageStatus(
        index=stage.index,
        layers=stage.layers,
        node=stage.node,
        provider=provider,
        engine=engine,
        planned_bytes=stage.weight_bytes,
        fetched_bytes=loaded.fetched_bytes,
        weight_bytes=loaded.weight_bytes,
        kv_bytes=loaded.kv_bytes,
        resident_bytes=status.resident_bytes,
        peak_resident_bytes=status.peak_resident_bytes,
        threads=loaded.threads,
        load_seconds=loaded.seconds,
        attempt=attempt.lease.key.attempt,
    )
