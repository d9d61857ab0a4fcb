"""What the orchestrator wants: one node for each stage, whatever embodies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import SecretStr

from myelin.cluster.provider import BootSpec, LaunchKey, Need
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
    """

    run: RunId
    node: NodeId
    memory_bytes: int
    engine: str
    transport: str
    secret: SecretStr
    environment: Mapping[str, SecretStr] = field(default_factory=dict)

    def need(self, exclude: frozenset[str] = frozenset()) -> Need:
        """What to ask a provider for; offers in ``exclude`` have failed before."""
        return Need(self.node, self.memory_bytes, self.engine, exclude)

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
