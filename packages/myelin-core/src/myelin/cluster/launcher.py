"""One start of a node: its offer is taken under the run's cap, its intent noted, the provider called, and what came of
it noted in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from myelin.cluster.intents import Intent
from myelin.cluster.journal import Journal
from myelin.cluster.provider import Lease, Offer
from myelin.cluster.provider_calls import ProviderCalls
from myelin.cluster.quote import Quote, choose
from myelin.cluster.reconcile import Launch
from myelin.cluster.spec import NodeSpec
from myelin.errors import ProviderError

NOTHING_MADE = frozenset({"offer-taken", "not-confirmed", "cost-cap", "no-offer", "no-key"})
"""Reasons of a launch's error that say for certain that nothing was started."""
HOPELESS = frozenset({"no-offer", "not-confirmed", "cost-cap", "no-key"})
"""Reasons that another try can't mend."""


class Launcher:
    """Starts the nodes of one run, one attempt at a time. The event loop owns it.

    Args:
        calls: Of the provider that starts them.
        journal: Where intents are noted.
        clock: Unix seconds.
        cap: Dollars an hour that the run's nodes may cost together; 0 is no limit.
    """

    def __init__(self, calls: ProviderCalls, journal: Journal, clock: Callable[[], float], cap: float) -> None:
        self._calls = calls
        self._journal = journal
        self._clock = clock
        self.cap = cap
        self._expected = 0
        self._choosing = asyncio.Lock()

    async def quote(self, specs: Sequence[NodeSpec]) -> Quote:
        """What the nodes would cost, by the best offers there are now that fit under the cap; starts nothing.

        Raises:
            ProviderError: There is no offer for a node, none that the cap allows, or they can't be read in time.
        """
        self._expected = len(specs)
        name = self._calls.name
        quote = Quote(name)
        for left, spec in zip(range(len(specs), 0, -1), specs, strict=True):
            offers = await self._calls.offers(spec.need())
            offer = choose(offers, name, quote.dollars_per_hour, left, self.cap)
            quote = Quote(name, (*quote.offers, (spec.node, offer)))
        return quote

    async def launch(self, spec: NodeSpec, launch: Launch) -> Lease | None:
        """One try; None where it failed in a way that another may mend.

        Raises:
            ProviderError: It failed in a way that none can mend.
            MyelinError: The intent can't be kept; nothing was started.
        """
        now = self._clock()
        intent = Intent(spec.node, launch.attempt, launch.generation, since=now, started=now)
        try:
            async with self._choosing:  # so that two launches can't pass under the cap together
                offers = await self._calls.offers(launch.need)
                offer = choose(offers, self._calls.name, self._committed(), self._left(), self.cap)
                intent = replace(intent, offer=offer.id, dollars_per_hour=offer.dollars_per_hour)
                await self._journal.note(intent, must=True)
        except ProviderError as error:
            await self._journal.note(intent.gone(self._clock(), error.message))
            self._failed(error)
            return None
        except BaseException as error:
            self._journal.note_now(intent.gone(self._clock(), f"not begun ({type(error).__name__})"))
            raise
        return await self._call(spec, intent, offer)

    async def adopt(self, spec: NodeSpec, intent: Intent) -> Lease | None:
        """Take what an earlier call has made, by repeating it: launching is idempotent by key.

        Returns:
            Its lease; None where it can't be taken, and is unwanted from now on.

        Raises:
            ProviderError: As for :meth:`launch`.
        """
        offer = Offer(intent.offer, self._calls.name, "", dollars_per_hour=intent.dollars_per_hour)
        await self._journal.note(intent.called(self._clock()))
        lease = await self._call(spec, intent, offer, adopting=True)
        if lease is None:
            current = self._journal.get(intent.node, intent.attempt)
            assert current is not None
            await self._journal.note(current.unwanted(current.failure, self._clock()))
        return lease

    async def _call(self, spec: NodeSpec, intent: Intent, offer: Offer, *, adopting: bool = False) -> Lease | None:
        """Call the provider, whose answer is noted whatever it is."""
        try:
            lease = await self._calls.launch(offer, spec.boot(intent.attempt), spec.key(intent.attempt))
        except ProviderError as error:
            certain = error.reason in NOTHING_MADE and not adopting
            now = self._clock()
            await self._journal.note(intent.gone(now, error.message) if certain else intent.doubted(error.message, now))
            self._failed(error)
            return None
        except BaseException as error:
            # Cancelled, or a mistake of the provider's. No more than noted: whoever waits for our end is in a hurry.
            why = f"the call was broken off ({type(error).__name__})"
            self._journal.note_now(intent.doubted(why, self._clock()))
            raise
        await self._journal.note(intent.launched(lease, self._clock()))
        return lease

    def _failed(self, error: ProviderError) -> None:
        """Remember why a try failed; raise it where no other can mend it."""
        self._calls.problem = error
        if error.reason in HOPELESS:
            raise error

    def _committed(self) -> float:
        """Dollars an hour of what has been started."""
        return sum(intent.dollars_per_hour for intent in self._journal.paid())

    def _left(self) -> int:
        """How many nodes are still to be started with what the cap leaves, the next one included."""
        return max(1, self._expected - len({intent.node for intent in self._journal.paid()}))
