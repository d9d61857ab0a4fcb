"""The provider contract: what it can offer, how a node is launched, listed and released.

A provider never decides how many nodes there are or when one is replaced: the orchestrator does, and the provider
carries it out. Every method may be cancelled at any await; a cancelled launch leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, SecretStr

from myelin.transport.contract import Endpoint
from myelin.values import Attempt, LeaseId, NodeId, RunId


@dataclass(frozen=True, slots=True)
class Need:
    """What one node must have.

    Attributes:
        node: Which logical node it is for.
        memory_bytes: Weights, keys and values, scratch; without the worker's own fixed overhead.
        engine: The engine it will run (``cpu``, ``triton``, ``reference``).
        exclude: Ids of offers that must not be used again (a machine that failed).
        offer: The id of the offer that its stage was planned for; empty where it was planned for none in particular.
    """

    node: NodeId
    memory_bytes: int
    engine: str
    exclude: frozenset[str] = frozenset()
    offer: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a provider could start.

    Attributes:
        id: The provider's own name for it.
        provider: The entry point's name.
        description: For people: ``2 cores, 22.1 GB free``.
        memory_bytes: What a stage may use there; 0 is unknown.
        dollars_per_hour: 0 where it costs nothing.
        details: Anything else worth showing.
        bandwidth: Bytes per second of the memory that a stage computes from; 0 is unknown.
        room: How many nodes of a run can be started from it; 0 is not limited.
        shared: Whether they share ``memory_bytes``; otherwise each has as much.
    """

    id: str
    provider: str
    description: str
    memory_bytes: int = 0
    dollars_per_hour: float = 0.0
    details: Mapping[str, str] = field(default_factory=dict)
    bandwidth: float = 0.0
    room: int = 0
    shared: bool = True


@dataclass(frozen=True, slots=True)
class LaunchKey:
    """Names one start of one logical node; launching the same key twice gives the same lease."""

    run: RunId
    node: NodeId
    attempt: Attempt

    def __str__(self) -> str:
        return f"{self.run}.{self.node}.{self.attempt}"


@dataclass(frozen=True, slots=True)
class BootSpec:
    """What the worker on the new node must be told, through a channel that only the node can read.

    Attributes:
        run, node, attempt: Who it is; also in the launch key.
        secret: The run's secret.
        transport: Which transport plugin it listens with.
        engine: Which engine plugin it will be asked to load.
        bind: ``host:port`` to listen on; port 0 takes a free one.
        environment: More variables for the worker (telemetry, caches, ``HF_TOKEN``); values may be secret.
    """

    run: RunId
    node: NodeId
    attempt: Attempt
    secret: SecretStr
    transport: str = "tcp"
    engine: str = "cpu"
    bind: str = "127.0.0.1:0"
    environment: Mapping[str, SecretStr] = field(default_factory=dict)


class LeaseState(StrEnum):
    """Where a started node is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    """It has announced its endpoint."""
    EXITED = "exited"
    """It ended by itself; :attr:`Lease.exit_reason` says why. It is still listed until it is released."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A started node, which must be released.

    Attributes:
        id: The provider's name for it (a process id, a container, an instance).
        key: What it was launched for.
        state: See :class:`LeaseState`.
        endpoint: Where it listens, once it has announced that.
        offer: The id of the offer it came from.
        dollars_per_hour: What it costs.
        exit_reason: For people, where it has exited.
        detail: For people, what it waits for, where it isn't running yet.
    """

    id: LeaseId
    key: LaunchKey
    state: LeaseState
    offer: str = ""
    endpoint: Endpoint | None = None
    dollars_per_hour: float = 0.0
    exit_reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a node wrote. ``stream`` is ``stdout``, ``stderr`` or ``provider``; ``time`` is Unix seconds."""

    stream: str
    text: str
    time: float


@dataclass(frozen=True, slots=True)
class ProviderContext:
    """What a provider is made with.

    Attributes:
        run: Whose nodes it starts.
        section: Its own configuration section, a validated model.
        nodes: How many nodes the run has: a provider whose nodes share a machine gives each its part of the cores.
        model_files: The model's files on this machine, absolute, which every node opens at the same paths; empty where
            nodes fetch it themselves.
    """

    run: RunId
    section: BaseModel | None = None
    nodes: int = 1
    model_files: tuple[Path, ...] = ()


class Provider(Protocol):
    """Starts nodes somewhere.

    A provider may say more of itself by attributes and methods that are all optional:

    - ``same_host = True``: its nodes are processes of the orchestrator's own machine, with its files, and end with it.
      They are then told of files that they can append to (``--trace-file``).
    - ``listing_lag_s``: how many seconds its listings may lag behind what it has started; 0 where that isn't said. For
      so long after a start, its absence from a listing proves nothing.
    - ``price_agreed = True``: a person has agreed to the price already, by this provider's own settings; otherwise they
      are asked once for the whole run, where its offers cost anything.
    - ``async def all_leases(self) -> Sequence[Lease]``: as :meth:`leases`, of all runs that the provider can see;
      ``myelin gc`` finds with it what no ledger remembers.
    - ``found_by``: settings of its own section (names of fields, and texts) that another process needs to find its
      leases: an address, a namespace, never a secret. They are kept in the ledger in clear, so that ``myelin down`` and
      ``myelin gc`` needn't be told again what ``myelin serve`` was told.
    - ``packed = True``: it means to take as few machines as can be; stages are planned for as many as can be otherwise.
    - ``lacking(need) -> str``: asked after :meth:`offers` gave nothing; what would have to be there, and what there is,
      as a part of a sentence.
    """

    async def offers(self, need: Need) -> Sequence[Offer]:
        """What could be started for ``need``, best first; empty where nothing fits. Changes nothing."""

    async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
        """Start a node and return promptly, usually before it has announced itself.

        Idempotent by ``key``, also for two calls at once. If it raises (or is cancelled), nothing stays started.

        Raises:
            ProviderError: It could not be started.
        """

    async def leases(self) -> Sequence[Lease]:
        """All live leases of this run, and those that exited and were not released: enough to rebuild after a crash.

        Raises:
            ProviderError: The listing can't be read. That is *unknown*, never *empty*.
        """

    async def release(self, lease: LeaseId) -> None:
        """End the node and give it back; returns once it is gone. Releasing an unknown lease succeeds."""

    def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        """What the node wrote, from the beginning, then as it comes, until it has ended."""

    async def close(self) -> None:
        """Free connections and tasks; nodes are not touched. Twice is fine."""
