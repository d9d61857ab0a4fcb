"""A provider's calls, each in the time that it may take; what goes wrong is remembered for whoever has to say why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from myelin.cluster.provider import BootSpec, LaunchKey, Lease, LogLine, Need, Offer, Provider
from myelin.cluster.reconcile import Listing
from myelin.cluster.spec import in_turn, no_offer
from myelin.errors import ProviderError
from myelin.values import LeaseId, NodeId

FASTEST_POLL_S = 0.02
SLOWEST_POLL_S = 0.25


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


DEFAULT_TIMES = LaunchTimes()


class ProviderCalls:
    """What is asked of one provider. The event loop owns it.

    Args:
        provider: Who is asked.
        name: Its name, for errors.
        times: Deadlines.
        clock: Unix seconds.
    """

    def __init__(self, provider: Provider, name: str, times: LaunchTimes, clock: Callable[[], float]) -> None:
        self._provider = provider
        self.name = name
        self.times = times
        self._clock = clock
        self._releasing: dict[LeaseId, asyncio.Task[None]] = {}
        self.problem: Exception | None = None
        """The last thing that went wrong, for whoever has to say why something didn't work in time."""

    async def offers(self, need: Need) -> Sequence[Offer]:
        """The offers that aren't to be avoided, the one that was planned for first, then the best; where all are, all.

        Raises:
            ProviderError: There is none, or they can't be read in time.
        """
        async with self._deadline(f"did not say what it offers for {need.node}"):
            offers = await self._provider.offers(need)
            if not offers and need.exclude:
                offers = await self._provider.offers(replace(need, exclude=frozenset()))
            if not offers:
                raise no_offer(self._provider, self.name, need)
            return in_turn(offers, need)

    async def launch(self, offer: Offer, boot: BootSpec, key: LaunchKey) -> Lease:
        """Start a node.

        Raises:
            ProviderError: It could not be started, or not in time.
        """
        async with self._deadline(f"did not start {key.node}", "launch-timeout"):
            return await self._provider.launch(offer, boot, key=key)

    async def listing(self) -> Listing | None:
        """A listing; None where it can't be read, or not in time."""
        began = self._clock()
        try:
            async with self._deadline("did not list its nodes"):
                return Listing(began, tuple(await self._provider.leases()))
        except ProviderError as error:
            self.problem = error
            return None

    async def lease(self, lease: LeaseId, timeout_s: float) -> Lease | None:
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

    def release(self, lease: LeaseId) -> asyncio.Task[None]:
        """Release a lease, once at a time, however often it is asked for."""
        task = self._releasing.get(lease)
        if task is None:
            task = self._releasing[lease] = asyncio.create_task(self._release(lease), name=f"release {lease}")
            task.add_done_callback(retrieve)  # the next listing tells
        return task

    async def _release(self, lease: LeaseId) -> None:
        try:
            await self._provider.release(lease)
        except Exception as error:
            self.problem = error
            raise
        finally:
            del self._releasing[lease]

    def given_up(self, node: NodeId, reason: str) -> Exception:
        """The error for a node that can't be had: the last one, where there is one."""
        if isinstance(self.problem, ProviderError):
            return self.problem
        return ProviderError(
            f"the provider {self.name} could not start {node}: {reason}",
            "try again, or look at the provider's own status",
            reason="launch-failed",
        )

    def pauses(self) -> Iterator[float]:
        """Pauses between looks: short at first, then longer."""
        pause = FASTEST_POLL_S
        while True:
            yield min(pause, self.times.listing)
            pause *= 2

    async def close(self) -> None:
        """Wait for the releases that are under way, then free the provider's connections and tasks."""
        await asyncio.gather(*self._releasing.values(), return_exceptions=True)
        await self._provider.close()

    @asynccontextmanager
    async def _deadline(self, what: str, reason: str = "provider-timeout") -> AsyncIterator[None]:
        """One call to the provider, in the time that it may take."""
        try:
            async with asyncio.timeout(self.times.launch):
                yield
        except TimeoutError:
            raise ProviderError(
                f"the provider {self.name} {what} within {self.times.launch:g} s",
                "try again, or look at the provider's own status",
                reason=reason,
            ) from None


def retrieve(task: asyncio.Task[None]) -> None:
    """What a task raised is told elsewhere."""
    if not task.cancelled():
        task.exception()
