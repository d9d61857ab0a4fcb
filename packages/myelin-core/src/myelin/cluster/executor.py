"""Doing to a provider what the reconciler decides: launching nodes, replacing them, releasing them.

The executor looks (a listing), asks :func:`~myelin.cluster.reconcile.reconcile` what follows, notes it in the journal,
and does it; again and again, until there is nothing left to do. It decides nothing itself; which offer is taken, the
launcher chooses.

Nothing is left behind: whatever is cancelled or fails, :meth:`Executor.release_all` ends every node of the run that the
provider lists, and believes that they are gone only once a listing says so.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace

from myelin.cluster.intents import Intent, IntentState, Spend, inherited
from myelin.cluster.journal import Book, Journal
from myelin.cluster.launcher import Launcher
from myelin.cluster.provider import Lease, LogLine, Provider
from myelin.cluster.provider_calls import (
    DEFAULT_TIMES,
    FASTEST_POLL_S,
    SLOWEST_POLL_S,
    LaunchTimes,
    ProviderCalls,
    retrieve,
)
from myelin.cluster.quote import Quote
from myelin.cluster.reconcile import (
    Action,
    Adopt,
    GiveUp,
    Gone,
    Launch,
    Listing,
    Observed,
    Policy,
    Release,
    Wait,
    Wanted,
    reconcile,
)
from myelin.cluster.spec import NodeSpec
from myelin.errors import MyelinError, ProviderError
from myelin.values import LeaseId, NodeId

__all__ = ["Executor", "LaunchTimes"]

LAUNCH_TRIES = 3
"""Attempts for one node, each on another offer where there is one."""
RELEASE_HEAD_START_S = 1.0
"""How long a replacement waits for the node that it replaces to be gone: they may need the same memory."""


class Executor:
    """Launches, replaces and releases the nodes of one run. The event loop owns it.

    Args:
        provider: Who starts them.
        name: The provider's name, for errors.
        times: Deadlines.
        book: Where intents are kept; None keeps them in memory only.
        cap: Dollars an hour that the run's nodes may cost together; 0 is no limit.
    """

    def __init__(
        self,
        provider: Provider,
        name: str,
        times: LaunchTimes = DEFAULT_TIMES,
        book: Book | None = None,
        cap: float = 0.0,
    ) -> None:
        self._times = times
        self._policy = Policy(LAUNCH_TRIES, times.wait, settle_s=times.settle)
        self._clock = steady_clock()
        self._calls = ProviderCalls(provider, name, times, self._clock)
        self._journal = Journal(book, self._clock)
        self._launcher = Launcher(self._calls, self._journal, self._clock, cap)
        self._wanted: dict[NodeId, Wanted] = {}
        self._tidying: asyncio.Task[None] | None = None

    @property
    def cap(self) -> float:
        """Dollars an hour that the run's nodes may cost together; 0 is no limit."""
        return self._launcher.cap

    @cap.setter
    def cap(self, dollars_per_hour: float) -> None:
        self._launcher.cap = dollars_per_hour

    # What the orchestrator asks for.

    async def quote(self, specs: Sequence[NodeSpec]) -> Quote:
        """What the nodes would cost, by the best offers there are now that fit under the cap; starts nothing.

        Raises:
            ProviderError: There is no offer for a node, none that the cap allows, or they can't be read in time.
        """
        return await self._launcher.quote(specs)

    async def launch(self, spec: NodeSpec) -> Lease:
        """Start a node, trying again on a :class:`ProviderError`; each try is an attempt with a number of its own.

        Returns:
            The lease, usually before the node has announced where it listens.

        Raises:
            ProviderError: Nothing could be started; nothing is left started.
        """
        return _lease(await self._bring(spec, self._journal.generation(spec.node) + 1))

    async def replace(self, spec: NodeSpec, lost: Lease, why: str) -> Lease:
        """Launch a new attempt in place of ``lost``, on another offer where there is one.

        ``lost`` is released meanwhile, and afterwards for as long as it takes until a listing shows it gone; as long as
        a start before it is still there too, it is waited for.

        Raises:
            ProviderError: As for :meth:`launch`.
        """
        generation = self._journal.generation(spec.node) + 1
        intent = self._journal.get(spec.node, lost.key.attempt)
        if intent is None:
            now = self._clock()
            intent = Intent(spec.node, lost.key.attempt, generation - 1, started=now).launched(lost, now)
        if intent.open:
            await self._journal.note(intent.unwanted(why, self._clock(), lost.id))
            await asyncio.wait({self._calls.release(lost.id)}, timeout=RELEASE_HEAD_START_S)
        return _lease(await self._bring(spec, generation))

    async def adopt(self, spec: NodeSpec) -> Lease | None:
        """The node that an orchestrator before us has started for this run, where it is still there.

        Returns:
            Its lease, or None: nothing is known of one, or a listing shows none, or it can't be taken.

        Raises:
            ProviderError: The listing can't be read in time: what there is, is unknown.
        """
        if not any(intent.node == spec.node for intent in self._journal.open()):
            await self._find_unknown(spec.node)
        return await self._bring(spec, max(1, self._journal.generation(spec.node)), adopt_only=True)

    async def _find_unknown(self, node: NodeId) -> None:
        """Note what is listed of a node and in no book, as if an orchestrator before us had left it."""
        listing = await self._calls.listing()
        if listing is None:
            raise self._calls.given_up(node, "its nodes can't be listed")
        now, generation = self._clock(), self._journal.generation(node) + 1
        for lease in listing.leases:
            if lease.key.node == node and self._journal.get(node, lease.key.attempt) is None:
                found = Intent(node, lease.key.attempt, generation, started=now).launched(lease, now)
                await self._journal.note(inherited(found, now))

    def spend(self) -> Spend:
        """What the run costs, by the prices of its offers."""
        return self._journal.spend()

    @property
    def intents(self) -> tuple[Intent, ...]:
        """Every start of this run, in the order in which they were meant."""
        return self._journal.intents

    async def watch(self, on_leases: Callable[[Sequence[Lease]], None]) -> None:
        """List the leases again and again and hand each listing over; ends when cancelled.

        It polls fast at first and ever slower, so that a node that starts in a second is not noticed a quarter late. A
        listing that can't be read is *unknown*, and skipped.
        """
        began = time.monotonic()
        while True:
            listing = await self._calls.listing()
            if listing is not None:
                on_leases(listing.leases)
            await asyncio.sleep(min(max((time.monotonic() - began) / 10, FASTEST_POLL_S), SLOWEST_POLL_S))

    async def lease(self, lease: LeaseId, timeout_s: float = 1.0) -> Lease | None:
        """What the provider says of a lease now; None where it doesn't list it, or can't say in time."""
        return await self._calls.lease(lease, timeout_s)

    def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        """What the node writes."""
        return self._calls.logs(lease)

    async def release_all(self) -> None:
        """Release every node of the run, known here or listed by the provider, all at once, until a listing shows none.

        Raises:
            ProviderError: Some could not be released in time; they are named.
        """
        self._wanted.clear()
        await self._stop_tidying()
        left = len(self._journal.open())
        actions: tuple[Action, ...] = ()
        first = True
        try:
            async with asyncio.timeout(self._times.release + self._times.release_each * left):
                pauses = self._calls.pauses()
                while actions := self._decide(await self._calls.listing(), ()):
                    releases = await self._apply(actions)
                    results = await asyncio.gather(*releases, return_exceptions=True)
                    if not first or not releases or any(isinstance(result, BaseException) for result in results):
                        await self._pause(actions, next(pauses))
                    first = False
        except TimeoutError:
            known = [(each.node, each.lease) for each in self._journal.open()]
            seen = [(each.node, each.lease) for each in actions if isinstance(each, Release)]
            names = [f"{node} ({lease or 'no lease yet'})" for node, lease in dict.fromkeys(known + seen)]
            problem = self._calls.problem
            why = f": {problem}" if isinstance(problem, MyelinError) else ""
            raise ProviderError(
                f"the provider {self._calls.name} could not show that its nodes are gone "
                f"({', '.join(names) or 'the listing'}){why}",
                "look at the provider's own list, and end them there; `myelin gc` tries again",
                reason="release-failed",
            ) from problem

    async def close(self) -> None:
        """Let go of the book, and free the provider's connections and tasks. Twice is fine."""
        await self._stop_tidying()
        await self._journal.close()
        await self._calls.close()

    # Looking, deciding, doing.

    async def _bring(self, spec: NodeSpec, generation: int, *, adopt_only: bool = False) -> Lease | None:
        """Look, decide and do until the node has a lease; None where it could only be had by a new start, and none is
        asked for."""
        node = spec.node
        patience = self._clock() + self._times.launch
        pauses = self._calls.pauses()
        self._calls.problem = None
        try:
            while True:
                listing = await self._calls.listing()
                wish = self._wanted[node] = Wanted(spec.need(), generation, patience)
                actions = self._decide(listing, (wish,), node)
                await self._apply(actions)
                due = next((action for action in actions if isinstance(action, (Adopt, Launch, GiveUp))), None)
                lease: Lease | None = None
                match due:
                    case None:
                        await self._pause(actions, next(pauses))
                        continue
                    case Adopt(intent, _):
                        lease = await self._launcher.adopt(spec, intent)
                    case Launch() | GiveUp() if adopt_only and listing is not None:
                        del self._wanted[node]
                        return None
                    case Launch():
                        lease = await self._launcher.launch(spec, due)
                    case GiveUp(_, reason):
                        raise self._calls.given_up(node, reason)
                if lease is not None:
                    return lease
                patience = self._clock() + self._times.launch
        except BaseException:
            self._wanted.pop(node, None)
            raise
        finally:
            self._tidy()

    def _decide(
        self, listing: Listing | None, wanted: Sequence[Wanted], node: NodeId | None = None
    ) -> tuple[Action, ...]:
        """What follows; for one node alone where it is named."""
        intents = self._journal.intents
        if node is not None:
            intents = tuple(intent for intent in intents if intent.node == node)
            if listing is not None:
                listing = replace(listing, leases=tuple(each for each in listing.leases if each.key.node == node))
        return reconcile(wanted, Observed(self._clock(), listing, intents), self._policy)

    async def _apply(self, actions: Iterable[Action]) -> list[asyncio.Task[None]]:
        """Note what is gone, and begin the releases; the tasks of these."""
        tasks = []
        for action in actions:
            match action:
                case Gone(intent, why):
                    await self._journal.note(intent.gone(self._clock(), why))
                case Release():
                    if action.ends is not None and action.ends.state is not IntentState.RELEASING:
                        await self._journal.note(action.ends.unwanted(action.why, self._clock(), action.lease))
                    tasks.append(self._calls.release(action.lease))
        return tasks

    def _leaving(self) -> set[NodeId]:
        """Nodes that are wanted, and have a start that is on its way out. (The others' end is for release_all.)"""
        return self._journal.leaving() & self._wanted.keys()

    def _tidy(self) -> None:
        """See to it that what was replaced goes, for as long as that takes."""
        if self._leaving() and (self._tidying is None or self._tidying.done()):
            self._tidying = asyncio.create_task(self._tidy_up(), name="release what was replaced")
            self._tidying.add_done_callback(retrieve)

    async def _tidy_up(self) -> None:
        pauses = self._calls.pauses()
        while self._leaving():
            listing = await self._calls.listing()
            for node in self._leaving():
                actions = self._decide(listing, (self._wanted[node],), node)
                await self._apply(action for action in actions if _is_about_a_leftover(action))
            await asyncio.sleep(next(pauses))

    async def _stop_tidying(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.gather(self._tidying, return_exceptions=True)

    async def _pause(self, actions: Iterable[Action], longest: float) -> None:
        """Until the earliest time that the decisions wait for, but no longer than that."""
        until = min((action.until for action in actions if isinstance(action, Wait)), default=math.inf)
        await asyncio.sleep(max(0.0, min(longest, until - self._clock())))


def _lease(lease: Lease | None) -> Lease:
    assert lease is not None
    return lease


def _is_about_a_leftover(action: Action) -> bool:
    """It is not about a start that serves: how that one ended is for its watchers to see, before it is released."""
    match action:
        case Gone(intent) | Release(ends=Intent() as intent):
            return intent.state is IntentState.RELEASING
        case Release():
            return True
    return False


def steady_clock() -> Callable[[], float]:
    """Unix seconds that go on evenly from now, whatever is done to the system's clock."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
