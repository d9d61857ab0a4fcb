"""What a run would cost, which offer to take under a cap, and what is said where none fits. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from myelin.cluster.provider import Offer
from myelin.errors import ProviderError
from myelin.values import NodeId

HEADROOM = 1.5
"""How far above an agreed price a run may go when machines that were offered are gone, or are lost and replaced."""


@dataclass(frozen=True, slots=True)
class Quote:
    """What the nodes of a run would cost, by the offers there are now.

    Attributes:
        provider: Whose offers.
        offers: The offer for each node.
    """

    provider: str
    offers: tuple[tuple[NodeId, Offer], ...] = ()

    @property
    def dollars_per_hour(self) -> float:
        """Of all nodes together."""
        return sum(offer.dollars_per_hour for _, offer in self.offers)

    def ceiling(self, cap: float) -> float:
        """What the run may cost an hour once this is agreed to: the cap where there is one, otherwise
        :data:`HEADROOM` times the quote."""
        return cap if cap > 0 else self.dollars_per_hour * HEADROOM


Agree = Callable[[Quote, float], Awaitable[bool]]
"""Asks a person whether a run may cost what it would: the quote, and the dollars an hour it may come to at most."""


def choose(offers: Sequence[Offer], provider: str, committed: float, left: int, cap: float) -> Offer:
    """The offer to take: the best one that leaves the nodes which are still to come their share of the cap; where none
    does, the cheapest, if the cap allows it.

    Args:
        offers: At least one; best first.
        committed: Dollars an hour of what has been started.
        left: How many nodes are still to be started, this one included.
        cap: Dollars an hour for all together; 0 is no limit.

    Raises:
        ProviderError: Even the cheapest would cost more than the cap; it says how much.
    """
    if cap <= 0:
        return offers[0]
    share = (cap - committed) / max(1, left) + 1e-9
    fitting = next((offer for offer in offers if offer.dollars_per_hour <= share), None)
    if fitting is not None:
        return fitting
    cheapest = min(offers, key=lambda offer: offer.dollars_per_hour)
    total = committed + left * cheapest.dollars_per_hour
    if total > cap + 1e-9:
        raise ProviderError(
            f"the run would cost {dollars(total)}/h at the provider {provider}, more than the cap of {dollars(cap)}/h",
            "raise provider.max_dph_total (--max-cost), or use fewer or smaller nodes",
            reason="cost-cap",
        )
    return cheapest


def dollars(amount: float) -> str:
    """``$0.42``, ``$0.042``, ``$12.30``, ``under $0.001``."""
    if 0 < amount < 0.001:
        return "under $0.001"
    return f"${amount:.3f}" if 0 < amount < 0.1 else f"${amount:.2f}"
