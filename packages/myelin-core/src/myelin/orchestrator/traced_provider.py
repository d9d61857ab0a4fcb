"""A provider whose calls are spans: what was asked, what came of it, and each try that failed as an event."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

from myelin.cluster.provider import BootSpec, LaunchKey, Lease, LogLine, Need, Offer, Provider
from myelin.errors import MyelinError
from myelin.telemetry import attributes
from myelin.telemetry.tracing import Tracing, span
from myelin.values import LeaseId


class TracedProvider:
    """Passes everything on to ``provider``. Listings, which are read several times a second, are not spans."""

    def __init__(self, provider: Provider, tracing: Tracing) -> None:
        self._provider = provider
        self._tracing = tracing
        self._keys: dict[LeaseId, LaunchKey] = {}

    def __getattr__(self, name: str) -> object:
        """What else the provider says of itself or can do (``same_host``, ``all_leases``)."""
        return getattr(self._provider, name)

    async def offers(self, need: Need) -> Sequence[Offer]:
        """See :class:`~myelin.cluster.provider.Provider`."""
        fields: dict[str, AttributeValue] = {
            attributes.NODE: str(need.node),
            attributes.OFFERS_EXCLUDED: len(need.exclude),
        }
        with span(self._tracing.tracer, "provider.offers", fields) as current:
            offers = await self._provider.offers(need)
            current.set_attribute(attributes.OFFERS, len(offers))
            return offers

    async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
        """See :class:`~myelin.cluster.provider.Provider`."""
        around = trace.get_current_span()
        fields: dict[str, AttributeValue] = {
            attributes.NODE: str(key.node),
            attributes.ATTEMPT: int(key.attempt),
            attributes.OFFER: offer.id,
            attributes.OFFER_PRICE: float(offer.dollars_per_hour),
        }
        try:
            with span(self._tracing.tracer, "provider.launch", fields) as current:
                lease = await self._provider.launch(offer, boot, key=key)
                current.set_attribute(attributes.LEASE, str(lease.id))
                self._keys[lease.id] = key
                return lease
        except MyelinError as error:
            around.add_event(
                "launch failed",
                {attributes.ATTEMPT: int(key.attempt), attributes.OFFER: offer.id, attributes.ERROR_TYPE: error.reason},
            )
            raise

    async def leases(self) -> Sequence[Lease]:
        """See :class:`~myelin.cluster.provider.Provider`."""
        leases = await self._provider.leases()
        self._keys.update((lease.id, lease.key) for lease in leases)
        return leases

    async def release(self, lease: LeaseId) -> None:
        """See :class:`~myelin.cluster.provider.Provider`."""
        fields: dict[str, AttributeValue] = {attributes.LEASE: str(lease)}
        if (key := self._keys.get(lease)) is not None:
            fields |= {attributes.NODE: str(key.node), attributes.ATTEMPT: int(key.attempt)}
        with span(self._tracing.tracer, "provider.release", fields):
            await self._provider.release(lease)

    def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        """See :class:`~myelin.cluster.provider.Provider`."""
        return self._provider.logs(lease)

    async def close(self) -> None:
        """See :class:`~myelin.cluster.provider.Provider`."""
        await self._provider.close()
