"""The provider: which nodes there are."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence

from myelin.plugin import BootSpec, LaunchKey, Lease, LeaseId, LogLine, Need, Offer, ProviderError
from myelin_provider_echo.node import Node, start_node
from myelin_provider_echo.plugin import EchoSection

OFFER = Offer("here", "echo", "a process of this machine")
WORKER = (sys.executable, "-m", "myelin", "worker", "--boot-stdin")


class EchoProvider:
    """Nodes end with the process that started them, so what this object has started is all that there is."""

    def __init__(self, section: EchoSection) -> None:
        self._section = section
        self._nodes: dict[LaunchKey, Node] = {}
        self._launching = asyncio.Lock()

    async def offers(self, need: Need) -> Sequence[Offer]:
        """This machine, unless it was excluded. How much memory it has isn't known here."""
        return () if OFFER.id in need.exclude else (OFFER,)

    async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
        """One launch at a time: a second call with the same key finds what the first one has started."""
        async with self._launching:
            if key not in self._nodes:
                command = self._section.command or WORKER
                try:
                    self._nodes[key] = await start_node(command, boot, key, offer.id, self._section.log_lines)
                except OSError as error:
                    raise ProviderError(
                        f"{key.node} could not be started: {command[0]}: {error.strerror}",
                        "check echo.command in the configuration",
                        reason="launch-failed",
                    ) from None
            return self._nodes[key].lease

    async def leases(self) -> Sequence[Lease]:
        """All that were started and not released, those that have ended too."""
        return tuple(node.lease for node in self._nodes.values())

    async def release(self, lease: LeaseId) -> None:
        """The node is forgotten once it is gone, and not before: this may be cancelled, and called again."""
        if node := self._find(lease):
            await node.stop(self._section.grace_s)
            self._nodes.pop(node.key, None)

    async def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        """What the node wrote."""
        if node := self._find(lease):
            async for line in node.log.follow():
                yield line

    async def close(self) -> None:
        """There is no connection to free."""

    def _find(self, lease: LeaseId) -> Node | None:
        return next((node for node in self._nodes.values() if node.id == lease), None)
