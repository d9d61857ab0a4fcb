"""A provider whose nodes are tasks of this process, and which goes wrong on demand.

A :class:`Cloud` is what a provider rents from: it outlives any provider object, as a real one would, so that a test can
throw a :class:`MemoryProvider` away and make another. Without faults the provider keeps the contract in every point
(it passes :class:`~myelin_testkit.provider_compliance.ProviderCompliance`); with them it breaks it as real ones do::

    cloud = Cloud()
    cloud.faults.next("launch", Fail(), LostAnswer())       # the first launch fails, of the second only the answer does
    with cloud.faults.during("leases", Hang()):             # and the listing hangs meanwhile
        ...
    cloud.faults.ask = lambda operation: generator.choice(…)  # or any rule, for randomised runs

Operations are ``offers``, ``launch``, ``leases`` and ``release``. Every use of a fault is noted in ``cloud.history``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from myelin.plugin import (
    BootSpec,
    Endpoint,
    LaunchKey,
    Lease,
    LeaseId,
    LeaseState,
    LogLine,
    Need,
    NodeId,
    Offer,
    ProviderError,
    RunId,
)
from myelin_testkit.clock import Clock, RealClock

Operation = Literal["offers", "launch", "leases", "release"]

Announce = Callable[[Endpoint], None]
Say = Callable[[str], None]
Life = Callable[[BootSpec, Announce, Say], Awaitable[None]]
"""A node's life: it may announce an endpoint and say something, and ends when it returns or raises."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The operation fails, and nothing has happened.

    Attributes:
        error: What is raised; a ProviderError is within the contract, anything else is a mistake of the provider's.
    """

    error: Exception = field(default_factory=lambda: ProviderError("no luck this time", "try again", reason="fault"))


@dataclass(frozen=True, slots=True)
class Hang:
    """The operation never ends, until it is cancelled; nothing has happened."""


@dataclass(frozen=True, slots=True)
class Late:
    """The operation happens, and is answered, after so many seconds of the cloud's clock."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LostAnswer:
    """The operation happens, but is answered with an error, as by a gateway that gave up (HTTP 504).

    Attributes:
        seconds: After how long. A caller who gives up earlier leaves what was started.
    """

    seconds: float = 0.0
    error: Exception = field(
        default_factory=lambda: ProviderError("no answer from the cloud (504)", "try again", reason="lost-answer")
    )


@dataclass(frozen=True, slots=True)
class Twice:
    """A launch starts two nodes with one key, as a request that is resent does; the first one is answered."""


@dataclass(frozen=True, slots=True)
class Stale:
    """A listing shows what the one before showed, as caches do."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A release is answered as done, and nothing has happened."""


Fault = Fail | Hang | Late | LostAnswer | Twice | Stale | Ignored


class Faults:
    """What goes wrong with the next operations.

    Attributes:
        ask: Asked at each operation for which nothing else is said; None is that all goes well.
    """

    def __init__(self) -> None:
        self.ask: Callable[[Operation], Fault | None] = lambda operation: None
        self._next: defaultdict[Operation, deque[Fault | None]] = defaultdict(deque)
        self._during: dict[Operation, Fault] = {}

    def next(self, operation: Operation, *faults: Fault | None) -> None:
        """One fault for each of the next calls of an operation; None is a call that goes well."""
        self._next[operation].extend(faults)

    @contextmanager
    def during(self, operation: Operation, fault: Fault) -> Iterator[None]:
        """Every call goes wrong as long as it lasts."""
        before = self._during.get(operation)
        self._during[operation] = fault
        try:
            yield
        finally:
            del self._during[operation]
            if before is not None:
                self._during[operation] = before

    def take(self, operation: Operation) -> Fault | None:
        """What is wrong with the call that is made now."""
        if operation in self._during:
            return self._during[operation]
        if self._next[operation]:
            return self._next[operation].popleft()
        return self.ask(operation)


@dataclass(slots=True, eq=False)
class Machine:
    """A started node: a task, what it wrote, and what it announced."""

    id: LeaseId
    key: LaunchKey
    offer: Offer
    started: float
    lines: list[LogLine] = field(default_factory=list)
    endpoint: Endpoint | None = None
    end: str = ""
    """Why it was ended from outside."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] = field(init=False)

    @property
    def lease(self) -> Lease:
        """How it is now."""
        state, reason = LeaseState.STARTING, ""
        if self.task.done():
            state = LeaseState.EXITED
            error = None if self.task.cancelled() else self.task.exception()
            reason = (
                self.end or "killed" if self.task.cancelled() else f"exit code 1: {error}" if error else "exit code 0"
            )
        elif self.endpoint is not None:
            state = LeaseState.RUNNING
        dollars = self.offer.dollars_per_hour
        return Lease(self.id, self.key, state, self.offer.id, self.endpoint, dollars, reason)

    def tell(self) -> None:
        """Wake who follows the log."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class Cloud:
    """Where nodes run, for any number of provider objects.

    Args:
        life: What a node does; see :func:`listening_node` for the default.
        clock: A :class:`~myelin_testkit.clock.SimulatedClock` where a test moves time itself.

    Attributes:
        life: As given; may be changed at any time, for nodes started later.
        offers: What there is, best first.
        faults: What goes wrong.
        launch_seconds: How long a launch takes.
        started: The key of every launch that was asked for, in order; an idempotent repetition isn't one.
        running: What is not released, by lease.
        history: ``(operation, fault)`` of everything that went wrong.
        peak: The most nodes that there were at once.
    """

    def __init__(self, life: Life | None = None, *, clock: Clock | None = None) -> None:
        self.life: Life = life or listening_node
        self.clock: Clock = clock or RealClock()
        self.offers: list[Offer] = [Offer("here", "memory", "a task of this process")]
        self.faults = Faults()
        self.launch_seconds = 0.0
        self.started: list[LaunchKey] = []
        self.running: dict[LeaseId, Machine] = {}
        self.history: list[tuple[Operation, Fault]] = []
        self.peak = 0
        self._ids = itertools.count(1)
        self._locks: defaultdict[LaunchKey, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._released_dollars = 0.0

    def of(self, run: RunId) -> list[Machine]:
        """The machines of a run, oldest first."""
        return [machine for machine in self.running.values() if machine.key.run == run]

    def start(self, offer: Offer, boot: BootSpec, key: LaunchKey) -> Machine:
        """Start a node, whatever else there is."""
        machine = Machine(LeaseId(f"task-{next(self._ids)}"), key, offer, self.clock.time())

        def announce(endpoint: Endpoint) -> None:
            machine.endpoint = endpoint

        def say(text: str) -> None:
            machine.lines.append(LogLine("stderr", text, self.clock.time()))
            machine.tell()

        async def live() -> None:
            await self.life(boot, announce, say)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                task.exception()  # it is told by the lease, and isn't a surprise to anybody
            machine.tell()

        machine.task = asyncio.create_task(live(), name=f"node {key}")
        machine.task.add_done_callback(ended)
        self.running[machine.id] = machine
        self.peak = max(self.peak, len(self.running))
        return machine

    def kill(self, node: NodeId | LeaseId | str, reason: str = "killed") -> None:
        """End a node, or all that have its logical name, as SIGKILL would: without a word."""
        for machine in self.running.values():
            if node in (machine.key.node, machine.id):
                machine.end = reason
                machine.task.cancel()

    async def remove(self, lease: LeaseId) -> None:
        """End a node and give it back."""
        machine = self.running.get(lease)
        if machine is None:
            return
        machine.end = machine.end or "was released"
        machine.task.cancel()
        await asyncio.wait({machine.task})
        if self.running.pop(lease, None) is not None:
            self._released_dollars += self._dollars(machine)

    def spent(self) -> float:
        """Dollars, for everything that ever ran, up to now."""
        return self._released_dollars + sum(self._dollars(machine) for machine in self.running.values())

    async def operation(self, name: Operation) -> Fault | None:
        """Carry out what is wrong with the call that is made now, up to where the operation itself happens.

        Returns:
            The fault, where the operation has to go on with it.
        """
        fault = self.faults.take(name)
        if fault is not None:
            self.history.append((name, fault))
        match fault:
            case Fail(error):
                raise error
            case Hang():
                await asyncio.Event().wait()
            case Late(seconds):
                await self.clock.sleep(seconds)
        return fault

    async def answer(self, fault: Fault | None) -> None:
        """What is wrong with the answer, after the operation has happened."""
        if isinstance(fault, LostAnswer):
            await self.clock.sleep(fault.seconds)
            raise fault.error

    def lock(self, key: LaunchKey) -> asyncio.Lock:
        """Launches of one key go one after another."""
        return self._locks[key]

    def _dollars(self, machine: Machine) -> float:
        return (self.clock.time() - machine.started) / 3600 * machine.offer.dollars_per_hour


class MemoryProvider:
    """See :class:`myelin.plugin.Provider`, and this module's text.

    Attributes:
        cloud: Where its nodes run.
        closed: Whether it was closed.
    """

    def __init__(self, run: RunId, cloud: Cloud | None = None) -> None:
        self.cloud = cloud or Cloud()
        self.closed = False
        self._run = run
        self._last_listing: tuple[Lease, ...] = ()

    async def offers(self, need: Need) -> Sequence[Offer]:
        """Those of the cloud that weren't excluded and aren't known to be too small."""
        fault = await self.cloud.operation("offers")
        found = [offer for offer in self.cloud.offers if offer.id not in need.exclude]
        await self.cloud.answer(fault)
        return [offer for offer in found if not 0 < offer.memory_bytes < need.memory_bytes]

    async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
        """See :meth:`myelin.plugin.Provider.launch`."""
        async with self.cloud.lock(key):
            for machine in self.cloud.running.values():
                if machine.key == key:
                    return machine.lease
            self.cloud.started.append(key)
            fault = await self.cloud.operation("launch")
            await self.cloud.clock.sleep(self.cloud.launch_seconds)
            machine = self.cloud.start(offer, boot, key)
            if isinstance(fault, Twice):
                self.cloud.start(offer, boot, key)
            await self.cloud.answer(fault)
            return machine.lease

    async def leases(self) -> Sequence[Lease]:
        """See :meth:`myelin.plugin.Provider.leases`."""
        fault = await self.cloud.operation("leases")
        if isinstance(fault, Stale):
            return self._last_listing
        self._last_listing = tuple(machine.lease for machine in self.cloud.of(self._run))
        await self.cloud.answer(fault)
        return self._last_listing

    async def release(self, lease: LeaseId) -> None:
        """See :meth:`myelin.plugin.Provider.release`."""
        fault = await self.cloud.operation("release")
        if not isinstance(fault, Ignored):
            await self.cloud.remove(lease)
        await self.cloud.answer(fault)

    async def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        """See :meth:`myelin.plugin.Provider.logs`."""
        machine, seen = self.cloud.running.get(lease), 0
        while machine is not None:
            changed = machine.changed
            while seen < len(machine.lines):
                seen += 1
                yield machine.lines[seen - 1]
            if machine.task.done():
                return
            await changed.wait()

    async def close(self) -> None:
        """Nothing is held."""
        self.closed = True


async def listening_node(boot: BootSpec, announce: Announce, say: Say) -> None:
    """A node that listens where its boot spec says and serves nothing, until it is cancelled.

    Told to use a transport that there is not, it says so and fails, as the real worker does.
    """
    if boot.transport not in ("tcp", "grpc", "memory"):
        say(f"The transport {boot.transport!r} is not installed")
        raise RuntimeError(f"the transport {boot.transport!r} is not installed")
    host, _, port = boot.bind.rpartition(":")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), host, int(port), start_serving=False)
    async with server:  # a cancellation while it begins finds the socket in here
        await server.start_serving()
        address = f"{host}:{server.sockets[0].getsockname()[1]}"
        announce(Endpoint((address,)))
        say(f"{boot.node} listens on {address}")
        await asyncio.Event().wait()
