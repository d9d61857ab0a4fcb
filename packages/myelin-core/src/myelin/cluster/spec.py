"""What the orchestrator wants: one node for each stage, whatever embodies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import SecretStr

from myelin.cluster.provider import BootSpec, LaunchKey, Need, Offer, Provider
from myelin.errors import ProviderError
from myelin.values import Attempt, NodeId, RunId


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node as it is wanted. It outlives the attempts that embody it.

    Attributes:
        run, node: Its name.
        memory_bytes: What its stage needs.
        engine: The engine it will run.
        transport: The transport it listens with.
        secret: The run's.
        environment: More variables for the worker; values may be secret.
        offer: The id of the offer that its stage was planned for; empty is any.
    """

    run: RunId
    node: NodeId
    memory_bytes: int
    engine: str
    transport: str
    secret: SecretStr
    environment: Mapping[str, SecretStr] = field(default_factory=dict)
    offer: str = ""

    def need(self, exclude: frozenset[str] = frozenset()) -> Need:
        """What to ask a provider for; offers in ``exclude`` have failed before."""
        return Need(self.node, self.memory_bytes, self.engine, exclude, self.offer)

    def key(self, attempt: Attempt) -> LaunchKey:
        """Names one start of it."""
        return LaunchKey(self.run, self.node, attempt)

    def boot(self, attempt: Attempt) -> BootSpec:
        """What the worker of one start is told."""
        return BootSpec(
            run=self.run,
            node=self.node,
            attempt=attempt,
            secret=self.secret,
            transport=self.transport,
            engine=self.engine,
            environment=self.environment,
        )


def in_turn(offers: Sequence[Offer], need: Need) -> Sequence[Offer]:
    """``offers`` with the one that ``need``'s stage was planned for at the front, where it is among them. Pure."""
    if not need.offer:
        return offers
    return sorted(offers, key=lambda offer: offer.id != need.offer)


def no_offer(provider: Provider, name: str, need: Need) -> ProviderError:
    """The error for a need that the provider called ``name`` has no offer for; what is lacking, where it can tell."""
    told = getattr(provider, "lacking", None)
    lacking = told(need) if callable(told) else ""
    return ProviderError(
        f"the provider {name} has nothing for {need.node}, which needs {need.memory_bytes >> 20} MiB"
        + (f": {lacking}" if lacking else ""),
        "use more stages, a smaller model or context, or another provider",
        reason="no-offer",
    )
