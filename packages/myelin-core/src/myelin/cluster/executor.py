"""Doing to a provider what the reconciler decides: launching nodes, replacing them, releasing them.

The executor looks (a listing), asks :func:`~myelin.cluster.reconcile.reconcile` what follows, notes it in the book, and
does it; again and again, until there is nothing left to do. It decides nothing itself but which offer is taken.

Nothing is left behind: whatever is cancelled or fails, :meth:`Executor.release_all` ends every node of the run that the
provider lists, and believes that they are gone only once a listing says so.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from myelin.cluster.exits import exit_error, telling_text
from myelin.cluster.intents import Intent, IntentState, Spend, inherited, spend
from myelin.cluster.provider import Lease, LogLine, Need, Offer, Provider
from myelin.cluster.quote import Quote, choose
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
from myelin.cluster.spec import NodeSpec, in_turn, no_offer
from myelin.errors import MyelinError, ProviderError
from myelin.values import LeaseId, NodeId

_log = logging.getLogger("myelin.cluster")

__all__ = ["Book", "Executor", "LaunchTimes", "exit_error", "telling_text"]

LAUNCH_TRIES = 3
"""Attempts for one node, each on another offer where there is one."""
FASTEST_POLL_S = 0.02
SLOWEST_POLL_S = 0.25
RELEASE_HEAD_START_S = 1.0
"""How long a replacement waits for the node that it replaces to be gone: they may need the same memory."""
NOTHING_MADE = frozenset({"offer-taken", "not-confirmed", "cost-cap", "no-offer", "no-key"})
"""Reasons of a launch's error that say for certain that nothing was started."""
HOPELESS = frozenset({"no-offer", "not-confirmed", "cost-cap", "no-key"})
"""Reasons that another try can't mend."""


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """Deadlines and pauses, in seconds.

    Attributes:
        launch: For a provider's offers, its launch of one attempt, and for a listing to become readable.
        release: For releasing everything and seeing it gone.
        wait: Before the first retry of a launch; doubles each time.
        settle: How far the provider's listings may lag behind what it has started.
        release_each: On top of ``release`` for each node: providers that limit the rate of calls take them in turn.
        listing: Before another look at what is being released; the pauses grow up to it.
    """

    launch: float = 60.0
    release: float = 20.0
    wait: float = 0.2
    settle: float = 0.0
    release_each: float = 0.0
    listing: float = SLOWEST_POLL_S


class Book(Protocol):
    """Where intents are kept (:class:`myelin.cluster.ledger.RunBook`). Blocking; called in a thread."""

    def intents(self) -> tuple[Intent, ...]:
        """What had been started before this executor."""

    def put(self, intent: Intent) -> None:
        """Keep an intent, new or changed; it is kept when this returns."""

    def close(self, *, ended: bool) -> None:
        """No more comes; ``ended`` says that nothing is left of the run."""


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
        times: LaunchTimes = LaunchTimes(),
        book: Book | None = None,
        cap: float = 0.0,
    ) -> None:
        self._provider = provider
        self._name = name
        self._times = times
        self._book = book
        self._writer = ThreadPoolExecutor(1, "myelin-book") if book is not None else None
        """One thread, so that what is noted later is also kept later."""
        self.cap = cap
        self._expected = 0
        self._policy = Policy(LAUNCH_TRIES, times.wait, settle_s=times.settle)
        self._clock = steady_clock()
        kept = book.intents() if book is not None else ()
        self._intents = {(intent.node, intent.attempt): intent for intent in kept}
        self._wanted: dict[NodeId, Wanted] = {}
        self._releasing: dict[LeaseId, asyncio.Task[None]] = {}
        self._tidying: asyncio.Task[None] | None = None
        self._choosing = asyncio.Lock()
        self._problem: Exception | None = None
        """The last thing that went wrong, for whoever has to say why something didn't work in time."""

    # What the orchestrator asks for.

    async def quote(self, specs: Sequence[NodeSpec]) -> Quote:
        """What the nodes would cost, by the best offers there are now that fit under the cap; starts nothing.

        Raises:
            ProviderError: There is no offer for a node, none that the cap allows, or they can't be read in time.
        """
        self._expected = len(specs)
        quote = Quote(self._name)
        for left, spec in zip(range(len(specs), 0, -1), specs, strict=True):
            async with self._deadline(f"did not say what it offers for {spec.node}"):
                offers = await self._offers(spec.need())
            offer = choose(offers, self._name, quote.dollars_per_hour, left, self.cap)
            quote = Quote(self._name, (*quote.offers, (spec.node, offer)))
        return quote

    async def launch(self, spec: NodeSpec) -> Lease:
        """Start a node, trying again on a :class:`ProviderError`; each try is an attempt with a number of its own.

        Returns:
            The lease, usually before the node has announced where it listens.

        Raises:
            ProviderError: Nothing could be started; nothing is left started.
        """
        return _lease(await self._bring(spec, self._generation(spec.node) + 1))

    async def replace(self, spec: NodeSpec, lost: Lease, why: str) -> Lease:
        """Launch a new attempt in place of ``lost``, on another offer where there is one.

        ``lost`` is released meanwhile, and afterwards for as long as it takes until a listing shows it gone; as long as
        a start before it is still there too, it is waited for.

        Raises:
            ProviderError: As for :meth:`launch`.
        """
        generation = self._generation(spec.node) + 1
        intent = self._intents.get((spec.node, lost.key.attempt))
        if intent is None:
            now = self._clock()
            intent = Intent(spec.node, lost.key.attempt, generation - 1, started=now).launched(lost, now)
        if intent.open:
            await self._note(intent.unwanted(why, self._clock(), lost.id))
            await asyncio.wait({self._release(lost.id)}, timeout=RELEASE_HEAD_START_S)
        return _lease(await self._bring(spec, generation))

    async def adopt(self, spec: NodeSpec) -> Lease | None:
        """The node that an orchestrator before us has started for this run, where it is still there.

        Returns:
            Its lease, or None: nothing is known of one, or a listing shows none, or it can't be taken.

        Raises:
            ProviderError: The listing can't be read in time: what there is, is unknown.
        """
        if not any(intent.open for intent in self._intents.values() if intent.node == spec.node):
            await self._find_unknown(spec.node)
        return await self._bring(spec, max(1, self._generation(spec.node)), adopt_only=True)

    async def _find_unknown(self, node: NodeId) -> None:
        """Note what is listed of a node and in no book, as if an orchestrator before us had left it."""
        listing = await self._list()
        if listing is None:
            raise self._given_up(node, "its nodes can't be listed")
        now, generation = self._clock(), self._generation(node) + 1
        for lease in listing.leases:
            if lease.key.node == node and (node, lease.key.attempt) not in self._intents:
                found = Intent(node, lease.key.attempt, generation, started=now).launched(lease, now)
                await self._note(inherited(found, now))

    def spend(self) -> Spend:
        """What the run costs, by the prices of its offers."""
        return spend(tuple(self._intents.values()), self._clock())

    @property
    def intents(self) -> tuple[Intent, ...]:
        """Every start of this run, in the order in which they were meant."""
        return tuple(self._intents.values())

    async def watch(self, on_leases: Callable[[Sequence[Lease]], None]) -> None:
        """List the leases again and again and hand each listing over; ends when cancelled.

        It polls fast at first and ever slower, so that a node that starts in a second is not noticed a quarter late. A
        listing that can't be read is *unknown*, and skipped.
        """
        began = time.monotonic()
        while True:
            listing = await self._list()
            if listing is not None:
                on_leases(listing.leases)
            await asyncio.sleep(min(max((time.monotonic() - began) / 10, FASTEST_POLL_S), SLOWEST_POLL_S))

    async def lease(self, lease: LeaseId, timeout_s: float = 1.0) -> Lease | None:
        """What the provider says of a lease now; None where it doesn't list it, or can't say in time."""
        try:
            async with asyncio.timeout(timeout_s):
                listed = await self._provider.leases()
        except (ProviderError, TimeoutError):
            return None
        return next((each for each in listed if each.id == lease), None)

    def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        """What the node writes."""
        return self._provider.logs(lease)

    async def release_all(self) -> None:
        """Release every node of the run, known here or listed by the provider, all at once, until a listing shows none.

        Raises:
            ProviderError: Some could not be released in time; they are named.
        """
        self._wanted.clear()
        await self._stop_tidying()
        left = sum(intent.open for intent in self._intents.values())
        actions: tuple[Action, ...] = ()
        first = True
        try:
            async with asyncio.timeout(self._times.release + self._times.release_each * left):
                pauses = self._pauses()
                while actions := self._decide(await self._list(), ()):
                    releases = await self._apply(actions)
                    results = await asyncio.gather(*releases, return_exceptions=True)
                    if not first or not releases or any(isinstance(result, BaseException) for result in results):
                        await self._pause(actions, next(pauses))
                    first = False
        except TimeoutError:
            known = [(each.node, each.lease) for each in self._intents.values() if each.open]
            seen = [(each.node, each.lease) for each in actions if isinstance(each, Release)]
            names = [f"{node} ({lease or 'no lease yet'})" for node, lease in dict.fromkeys(known + seen)]
            problem = self._problem
            why = f": {problem}" if isinstance(problem, MyelinError) else ""
            raise ProviderError(
                f"the provider {self._name} could not show that its nodes are gone "
                f"({', '.join(names) or 'the listing'}){why}",
                "look at the provider's own list, and end them there; `myelin gc` tries again",
                reason="release-failed",
            ) from problem

    async def close(self) -> None:
        """Let go of the book, and free the provider's connections and tasks. Twice is fine."""
        await self._stop_tidying()
        book, self._book = self._book, None
        if book is not None and self._writer is not None:
            ended = not any(intent.open for intent in self._intents.values())
            try:
                await asyncio.wrap_future(self._writer.submit(book.close, ended=ended))
            except MyelinError as error:
                _log.warning("the end of the run was not noted: %s", error)
            finally:
                self._writer.shutdown(wait=False)
        await asyncio.gather(*self._releasing.values(), return_exceptions=True)
        await self._provider.close()

    # Looking, deciding, doing.

    async def _bring(self, spec: NodeSpec, generation: int, *, adopt_only: bool = False) -> Lease | None:
        """Look, decide and do until the node has a lease; None where it could only be had by a new start, and none is
        asked for."""
        node = spec.node
        patience = self._clock() + self._times.launch
        pauses = self._pauses()
        self._problem = None
        try:
            while True:
                listing = await self._list()
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
                        lease = await self._adopt(spec, intent)
                    case Launch() | GiveUp() if adopt_only and listing is not None:
                        del self._wanted[node]
                        return None
                    case Launch():
                        lease = await self._launch(spec, due)
                    case GiveUp(_, reason):
                        raise self._given_up(node, reason)
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
        intents = tuple(self._intents.values())
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
                    await self._note(intent.gone(self._clock(), why))
                case Release():
                    if action.ends is not None and action.ends.state is not IntentState.RELEASING:
                        await self._note(action.ends.unwanted(action.why, self._clock(), action.lease))
                    tasks.append(self._release(action.lease))
        return tasks

    async def _launch(self, spec: NodeSpec, launch: Launch) -> Lease | None:
        """One try; None where it failed in a way that another may mend."""
        now = self._clock()
        intent = Intent(spec.node, launch.attempt, launch.generation, since=now, started=now)
        try:
            async with self._choosing:  # so that two launches can't pass under the cap together
                async with self._deadline(f"did not say what it offers for {spec.node}"):
                    offers = await self._offers(launch.need)
                offer = choose(offers, self._name, self._committed(), self._left(), self.cap)
                intent = replace(intent, offer=offer.id, dollars_per_hour=offer.dollars_per_hour)
                await self._note(intent, must=True)
        except ProviderError as error:
            await self._note(intent.gone(self._clock(), error.message))
            self._failed(error)
            return None
        except BaseException as error:
            self._note_now(intent.gone(self._clock(), f"not begun ({type(error).__name__})"))
            raise
        return await self._call(spec, intent, offer)

    async def _adopt(self, spec: NodeSpec, intent: Intent) -> Lease | None:
        """Take what an earlier call has made, by repeating it: launching is idempotent by key."""
        offer = Offer(intent.offer, self._name, "", dollars_per_hour=intent.dollars_per_hour)
        await self._note(intent.called(self._clock()))
        lease = await self._call(spec, intent, offer, adopting=True)
        if lease is None:
            current = self._intents[intent.node, intent.attempt]
            await self._note(current.unwanted(current.failure, self._clock()))
        return lease

    async def _call(self, spec: NodeSpec, intent: Intent, offer: Offer, *, adopting: bool = False) -> Lease | None:
        """Call the provider, whose answer is noted whatever it is."""
        key = spec.key(intent.attempt)
        try:
            async with self._deadline(f"did not start {spec.node}", "launch-timeout"):
                lease = await self._provider.launch(offer, spec.boot(intent.attempt), key=key)
        except ProviderError as error:
            certain = error.reason in NOTHING_MADE and not adopting
            now = self._clock()
            await self._note(intent.gone(now, error.message) if certain else intent.doubted(error.message, now))
            self._failed(error)
            return None
        except BaseException as error:
            # Cancelled, or a mistake of the provider's. No more than noted: whoever waits for our end is in a hurry.
            self._note_now(intent.doubted(f"the call was broken off ({type(error).__name__})", self._clock()))
            raise
        await self._note(intent.launched(lease, self._clock()))
        return lease

    def _failed(self, error: ProviderError) -> None:
        """Remember why a try failed; raise it where no other can mend it."""
        self._problem = error
        if error.reason in HOPELESS:
            raise error

    def _given_up(self, node: NodeId, reason: str) -> Exception:
        """The error for a node that can't be had: the last one, where there is one."""
        if isinstance(self._problem, ProviderError):
            return self._problem
        return ProviderError(
            f"the provider {self._name} could not start {node}: {reason}",
            "try again, or look at the provider's own status",
            reason="launch-failed",
        )

    async def _offers(self, need: Need) -> Sequence[Offer]:
        """The offers that aren't to be avoided, the one that was planned for first, then the best; where all are, all.

        Raises:
            ProviderError: There is none.
        """
        offers = await self._provider.offers(need)
        if not offers and need.exclude:
            offers = await self._provider.offers(replace(need, exclude=frozenset()))
        if not offers:
            raise no_offer(self._provider, self._name, need)
        return in_turn(offers, need)

    def _paid(self) -> list[Intent]:
        """The starts that count against the cap: not those that are on their way out."""
        return [each for each in self._intents.values() if each.open and each.state is not IntentState.RELEASING]

    def _committed(self) -> float:
        """Dollars an hour of what has been started."""
        return sum(intent.dollars_per_hour for intent in self._paid())

    def _left(self) -> int:
        """How many nodes are still to be started with what the cap leaves, the next one included."""
        return max(1, self._expected - len({intent.node for intent in self._paid()}))

    async def _list(self) -> Listing | None:
        """A listing; None where it can't be read, or not in time."""
        began = self._clock()
        try:
            async with self._deadline("did not list its nodes"):
                return Listing(began, tuple(await self._provider.leases()))
        except ProviderError as error:
            self._problem = error
            return None

    def _release(self, lease: LeaseId) -> asyncio.Task[None]:
        """Release a lease, once at a time, however often it is asked for."""
        task = self._releasing.get(lease)
        if task is None:
            task = self._releasing[lease] = asyncio.create_task(self._release_one(lease), name=f"release {lease}")
            task.add_done_callback(_retrieve)  # the next listing tells
        return task

    async def _release_one(self, lease: LeaseId) -> None:
        try:
            await self._provider.release(lease)
        except Exception as error:
            self._problem = error
            raise
        finally:
            del self._releasing[lease]

    def _leaving(self) -> set[NodeId]:
        """Nodes that are wanted, and have a start that is on its way out. (The others' end is for release_all.)"""
        leaving = {intent.node for intent in self._intents.values() if intent.state is IntentState.RELEASING}
        return leaving & self._wanted.keys()

    def _tidy(self) -> None:
        """See to it that what was replaced goes, for as long as that takes."""
        if self._leaving() and (self._tidying is None or self._tidying.done()):
            self._tidying = asyncio.create_task(self._tidy_up(), name="release what was replaced")
            self._tidying.add_done_callback(_retrieve)

    async def _tidy_up(self) -> None:
        pauses = self._pauses()
        while self._leaving():
            listing = await self._list()
            for node in self._leaving():
                actions = self._decide(listing, (self._wanted[node],), node)
                await self._apply(action for action in actions if _is_about_a_leftover(action))
            await asyncio.sleep(next(pauses))

    async def _stop_tidying(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.gather(self._tidying, return_exceptions=True)

    async def _note(self, intent: Intent, *, must: bool = False) -> None:
        """Keep an intent; it is on disk when this returns.

        Raises:
            MyelinError: It can't be kept, and must be, since something is to be started on its account. What has
                happened already is not undone by a full disk.
        """
        self._intents[intent.node, intent.attempt] = intent
        if self._book is None or self._writer is None:
            return
        try:
            await asyncio.wrap_future(self._writer.submit(self._book.put, intent))
        except MyelinError as error:
            if must:
                raise
            _log.warning("what became of %s is not noted: %s", intent.node, error)

    def _note_now(self, intent: Intent) -> None:
        """As :meth:`_note`, where we may not wait."""
        self._intents[intent.node, intent.attempt] = intent
        if self._book is not None and self._writer is not None:
            self._writer.submit(self._book.put, intent)

    def _generation(self, node: NodeId) -> int:
        """The generation of the newest wish for a node; 0 where there was none."""
        return max((intent.generation for intent in self._intents.values() if intent.node == node), default=0)

    def _pauses(self) -> Iterator[float]:
        """Pauses between looks: short at first, then longer."""
        pause = FASTEST_POLL_S
        while True:
            yield min(pause, self._times.listing)
            pause *= 2

    async def _pause(self, actions: Iterable[Action], longest: float) -> None:
        """Until the earliest time that the decisions wait for, but no longer than that."""
        until = min((action.until for action in actions if isinstance(action, Wait)), default=math.inf)
        await asyncio.sleep(max(0.0, min(longest, until - self._clock())))

    @asynccontextmanager
    async def _deadline(self, what: str, reason: str = "provider-timeout") -> AsyncIterator[None]:
        """One call to the provider, in the time that it may take."""
        try:
            async with asyncio.timeout(self._times.launch):
                yield
        except TimeoutError:
            raise ProviderError(
                f"the provider {self._name} {what} within {self._times.launch:g} s",
                "try again, or look at the provider's own status",
                reason=reason,
            ) from None


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


def _retrieve(task: asyncio.Task[None]) -> None:
    """What a task raised is told elsewhere."""
    if not task.cancelled():
        task.exception()


def steady_clock() -> Callable[[], float]:
    """Unix seconds that go on evenly from now, whatever is done to the system's clock."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
