"""The nodes of a run as they come up: their leases, endpoints, output and control streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from myelin.cluster.executor import Executor, exit_error
from myelin.cluster.provider import Lease, LeaseState
from myelin.cluster.spec import NodeSpec
from myelin.errors import MyelinError, NodeError
from myelin.orchestrator.background import Background
from myelin.orchestrator.control import Loaded, NodeControl, fresh
from myelin.orchestrator.events import NodeLog, Observer
from myelin.orchestrator.pipeline import StageStatus
from myelin.planner.run_plan import StagePlan
from myelin.transport.contract import Endpoint
from myelin.values import LeaseId
from myelin.wire import control_pb2 as pb

KEPT_LINES = 20
DRAIN_S = 0.3
"""How long a node that has exited gets for its last lines to arrive."""
EXIT_NEWS_S = 0.2
"""How long the news of an exit may lag behind the break of its streams."""
_EDGE_REASONS = frozenset({"edge-lost", "edge-closed"})


@dataclass
class Node:
    """One node on its way up, and what is known of it. ``ready_by`` is the loop's time at which it must be ready."""

    spec: NodeSpec
    stage: StagePlan
    lease: Lease | None = None
    control: NodeControl | None = None
    loaded: Loaded | None = None
    ready_by: float = 0.0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    announced: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def live(self) -> Lease:
        """Its lease, once launched."""
        assert self.lease is not None
        return self.lease

    @property
    def reached(self) -> NodeControl:
        """Its control stream, once dialled."""
        assert self.control is not None
        return self.control

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens, once it has announced that."""
        assert self.live.endpoint is not None
        return self.live.endpoint


class Loss:
    """Whether the run has lost something that it can't do without. The first reason counts."""

    def __init__(self) -> None:
        self._error: MyelinError | None = None
        self._happened = asyncio.Event()

    @property
    def error(self) -> MyelinError | None:
        """The reason, once there is one."""
        return self._error

    def report(self, error: MyelinError) -> None:
        """Something is lost."""
        if self._error is None:
            self._error = error
            self._happened.set()

    async def wait(self) -> MyelinError:
        """Return once something is lost."""
        await self._happened.wait()
        assert self._error is not None
        return self._error


class NodeWatch:
    """Follows the leases and the output of all nodes and reports what ends by itself.

    Args:
        nodes: Whom.
        executor: Lists leases, and gives their output.
        background: Owns the tasks.
        observer: Is shown the output.
        loss: Is told.
        log_dir: Where the output is kept.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        executor: Executor,
        background: Background,
        observer: Observer,
        loss: Loss,
        log_dir: Path | None,
    ) -> None:
        self._nodes = tuple(nodes)
        self._executor = executor
        self._background = background
        self._observer = observer
        self._loss = loss
        self._log_dir = log_dir
        self._logs: dict[LeaseId, asyncio.Task[None]] = {}
        self._reported: set[LeaseId] = set()
        self._polling: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Poll the leases until :meth:`end`."""
        self._polling = self._background.start(self._executor.watch(self._take), "watch leases")

    def end(self) -> None:
        """The control streams tell from now on."""
        if self._polling is not None:
            self._polling.cancel()

    def launched(self, node: Node, lease: Lease) -> None:
        """A node has a lease: follow its output."""
        node.lease = lease
        self._logs[lease.id] = self._background.start(self._follow(node, lease.id), f"output of {lease.key}")
        self._note(node, lease)

    def _take(self, leases: Sequence[Lease]) -> None:
        """A listing came."""
        listed = {lease.id: lease for lease in leases}
        for node in self._nodes:
            if node.lease is not None and node.lease.id in listed:
                self._note(node, listed[node.lease.id])

    def _note(self, node: Node, lease: Lease) -> None:
        node.lease = lease
        if lease.endpoint is not None:
            node.announced.set()
        if lease.state is LeaseState.EXITED and lease.id not in self._reported:
            self._reported.add(lease.id)
            self._background.start(self._report_exit(node, lease), f"exit of {lease.key}")

    async def _report_exit(self, node: Node, lease: Lease) -> None:
        await self._drain(lease.id)
        self._loss.report(exit_error(lease, tuple(node.last_lines), "while it started"))

    async def _drain(self, lease: LeaseId) -> None:
        """Let the last lines of a node arrive."""
        following = self._logs.get(lease)
        if following is not None:
            await asyncio.wait({following}, timeout=DRAIN_S)

    def control_lost(self, node: Node, error: NodeError) -> None:
        """A control stream ended unasked, or the node told of a failure: find out more, then report."""
        if error.reason in _EDGE_REASONS:
            self.edge_lost(error)
        else:
            self._background.start(self._report_loss(node, error), f"loss of {node.spec.node}")

    async def _report_loss(self, node: Node, error: NodeError) -> None:
        """An exit says more than a broken stream does; where the provider has none to tell soon, the stream's error
        counts."""
        if error.reason == "node-lost":
            loop = asyncio.get_running_loop()
            deadline = loop.time() + EXIT_NEWS_S
            while (left := deadline - loop.time()) > 0:
                lease = await self._executor.lease(node.live.id, timeout_s=left)
                if lease is not None and lease.state is LeaseState.EXITED:
                    await self._drain(lease.id)
                    doing = "while it served" if node.loaded else "while it started"
                    self._loss.report(exit_error(lease, tuple(node.last_lines), doing))
                    return
                await asyncio.sleep(EXIT_NEWS_S / 10)
        self._loss.report(fresh(error))

    def edge_lost(self, error: MyelinError) -> None:
        """The edge to the head ended, or the head reported a fault.

        Where an edge broke, the end of a node is the likely cause and the better explanation: leave it time to be
        noticed.
        """
        if error.reason in _EDGE_REASONS:
            self._background.start(self._report_later(error), "loss of an edge")
        else:
            self._loss.report(error)

    async def _report_later(self, error: MyelinError) -> None:
        await asyncio.sleep(2 * EXIT_NEWS_S)
        self._loss.report(error)

    async def _follow(self, node: Node, lease: LeaseId) -> None:
        """Show, keep and remember what a node writes. That it can't be read is no reason to end anything."""
        with suppress(MyelinError, OSError):
            file = self._log_file(node)
            try:
                async for line in self._executor.logs(lease):
                    if line.stream != "provider":
                        node.last_lines.append(line.text)
                    self._observer.log(NodeLog(node.spec.node, line.stream, line.text))
                    if file is not None:
                        file.write(f"{line.time:.3f} {line.stream} {line.text}\n")
                        file.flush()
            finally:
                if file is not None:
                    file.close()

    def _log_file(self, node: Node) -> TextIO | None:
        if self._log_dir is None:
            return None
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return (self._log_dir / f"{node.live.key}.log").open("a", encoding="utf-8")


def narrowed(endpoint: Endpoint, mask: str) -> Endpoint:
    """``endpoint`` with only the candidates that begin with ``mask``; all where it is empty. Pure.

    Raises:
        NodeError: None is left.
    """
    kept = tuple(candidate for candidate in endpoint.candidates if candidate.startswith(mask))
    if not kept:
        raise NodeError(
            f"none of the addresses {', '.join(endpoint.candidates)} matches the mask {mask!r}",
            "correct endpoint_addr_mask, or leave it empty",
            reason="no-address",
        )
    return Endpoint(kept)


def stage_status(node: Node, provider: str, engine: str, status: pb.Status) -> StageStatus:
    """What is known of a loaded stage. Pure."""
    assert node.loaded is not None
    return StageStatus(
        index=node.stage.index,
        layers=node.stage.layers,
        node=node.spec.node,
        provider=provider,
        engine=engine,
        planned_bytes=node.stage.weight_bytes,
        fetched_bytes=node.loaded.fetched_bytes,
        weight_bytes=node.loaded.weight_bytes,
        kv_bytes=node.loaded.kv_bytes,
        resident_bytes=status.resident_bytes,
        peak_resident_bytes=status.peak_resident_bytes,
        threads=node.loaded.threads,
        load_seconds=node.loaded.seconds,
    )
