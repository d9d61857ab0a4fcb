"""The provider: nodes as processes of this machine, children of the orchestrator.

**Restart.** A node of this provider can't outlive its orchestrator, however that one ends: the end of the node's
standard input and, on Linux, the kernel's parent-death signal see to it. So after a crash there is nothing to find
again: :meth:`ProcessProvider.leases` lists what this very object has started, and the empty list of a new one is the
truth.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence

from myelin.plugin import (
    CORE_SET_VARIABLE,
    CORES_VARIABLE,
    PARENT_VARIABLE,
    BootSpec,
    LaunchKey,
    Lease,
    LeaseId,
    LogLine,
    Need,
    NodeId,
    Offer,
    ProviderContext,
    ProviderError,
    boot_line,
)
from myelin_provider_process.environment import node_environment
from myelin_provider_process.machine import available_memory, cores
from myelin_provider_process.node import ProcessNode, start_node
from myelin_provider_process.placement import core_numbers, own_cores
from myelin_provider_process.section import ProcessSection

OFFER = "local"
"""The id of the only offer: this machine."""


class ProcessProvider:
    """See :class:`myelin.plugin.Provider`.

    Args:
        context: The run, and the section ``process``.
        command: What to run in place of ``python -m myelin worker --boot-stdin`` (tests).
    """

    same_host = True

    def __init__(self, context: ProviderContext, *, command: Sequence[str] = ()) -> None:
        section = context.section
        self._section = section if isinstance(section, ProcessSection) else ProcessSection()
        python = self._section.python or sys.executable
        self._command = tuple(command) or (python, "-m", "myelin", "worker", "--boot-stdin")
        self._nodes_of_run = max(1, context.nodes)
        self._places: dict[NodeId, int] = {}
        self._nodes: dict[LaunchKey, ProcessNode] = {}
        self._starting: dict[LaunchKey, _Start] = {}
        self._stopping: dict[LeaseId, asyncio.Task[None]] = {}

    async def offers(self, need: Need) -> Sequence[Offer]:
        """This machine, unless it was excluded or lacks the memory."""
        memory, count = available_memory(), cores()
        if OFFER in need.exclude or need.memory_bytes > memory:
            return ()
        description = f"{count} core{'s' if count > 1 else ''}, {memory / 1e9:.1f} GB free"
        return (Offer(OFFER, "process", description, memory),)

    async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
        """See :meth:`myelin.plugin.Provider.launch`. A node that has ended since is returned as such."""
        if node := self._nodes.get(key):
            return node.lease
        start = self._starting.get(key)
        if start is None:
            start = self._starting[key] = _Start(asyncio.create_task(self._start(offer, boot, key)))
        start.waiting += 1
        try:
            # Shielded: a process whose start is interrupted half-way could be lost sight of. It takes milliseconds.
            return (await asyncio.shield(start.task)).lease
        except asyncio.CancelledError:
            if start.waiting == 1:
                await self._abandon(start)
            raise
        finally:
            start.waiting -= 1

    async def leases(self) -> Sequence[Lease]:
        """What this object has started and not released; see the module's text."""
        return tuple(node.lease for node in self._nodes.values())

    async def release(self, lease: LeaseId) -> None:
        """See :meth:`myelin.plugin.Provider.release`. Goes on by itself where it is cancelled."""
        node = next((node for node in self._nodes.values() if node.id == lease), None)
        if node is None:
            return
        if lease not in self._stopping:
            self._stopping[lease] = asyncio.create_task(self._stop(node))
        await asyncio.shield(self._stopping[lease])

    async def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        """See :meth:`myelin.plugin.Provider.logs`. Only the last lines are kept; ends at once for an unknown lease."""
        node = next((node for node in self._nodes.values() if node.id == lease), None)
        if node is not None:
            async for line in node.log.follow():
                yield line

    async def close(self) -> None:
        """Wait for releases that are under way. Nodes that run go on running."""
        await asyncio.gather(*self._stopping.values(), return_exceptions=True)

    async def _start(self, offer: Offer, boot: BootSpec, key: LaunchKey) -> ProcessNode:
        environment = node_environment(os.environ, {PARENT_VARIABLE: str(os.getpid()), **self._cores_of(key.node)})
        try:
            node = await start_node(self._command, environment, boot_line(boot), key, offer.id, self._section.log_lines)
        except OSError as error:
            raise ProviderError(
                f"{key.node} could not be started: {self._command[0]}: {error.strerror or error}",
                "check process.python in the configuration",
                reason="launch-failed",
            ) from None
        finally:
            del self._starting[key]
        self._nodes[key] = node
        return node

    def _cores_of(self, node: NodeId) -> dict[str, str]:
        """What the node is told of its cores: how many, and which, where they are to be its own."""
        told = {CORES_VARIABLE: str(max(1, cores() // self._nodes_of_run))}
        place = self._places.setdefault(node, len(self._places))
        own = own_cores(core_numbers(), self._nodes_of_run, place) if self._section.own_cores else ()
        if own:
            told[CORE_SET_VARIABLE] = ",".join(map(str, own))
        return told

    async def _abandon(self, start: _Start) -> None:
        """End a start that nobody waits for any more."""
        try:
            node = await start.task
        except ProviderError:
            return
        await self.release(node.id)

    async def _stop(self, node: ProcessNode) -> None:
        try:
            await node.stop(self._section.grace_s)
        finally:
            self._nodes.pop(node.key, None)
            self._stopping.pop(node.id, None)


class _Start:
    """A launch that is under way, and how many calls wait for it."""

    def __init__(self, task: asyncio.Task[ProcessNode]) -> None:
        self.task = task
        self.waiting = 0
