"""A node's edges: opened to the next stage, epoch by epoch; served from the stage before, and from the orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from myelin.errors import EngineError, MyelinError, NodeError, TransportError, WireError
from myelin.telemetry import attributes
from myelin.telemetry.tracing import span
from myelin.transport.contract import EDGE_PROTOCOL, ORCHESTRATOR, Endpoint, MessageStream, Transport
from myelin.values import Epoch, NodeId
from myelin.wire.control_pb2 import EdgesOpen, Envelope, OpenEdges
from myelin.worker.context import NodeContext
from myelin.worker.control import failure
from myelin.worker.edge import EdgeLink
from myelin.worker.engine_thread import EngineThread
from myelin.worker.head import Head, scheduler_limits
from myelin.worker.link import close_quietly
from myelin.worker.stage import ActivationRoute, LoadedStage, LocalRoute, Route, SamplesRoute, Stage


class Edges:
    """The loaded stage between its edges. The event loop owns it.

    Args:
        node: Whose.
        start: Runs work until it is done or the node ends; None where it has ended.
        tell: Tells the orchestrator, if it listens.
        ending: Whether the node is about to end: edges that break then are no fault.

    Attributes:
        stage: What is between them; None until it is loaded.
        head: What batches requests; None unless it is the first stage.
    """

    def __init__(
        self,
        node: NodeContext,
        *,
        start: Callable[[Coroutine[None, None, None]], asyncio.Task[None] | None],
        tell: Callable[[Envelope], None],
        ending: Callable[[], bool],
    ) -> None:
        self._node = node
        self._start = start
        self._tell = tell
        self._ending = ending
        self.stage: Stage | None = None
        self.head: Head | None = None
        self._lock = asyncio.Lock()
        self._opening: asyncio.Task[None] | None = None
        self._upstream_attempt = 0

    @property
    def epoch(self) -> Epoch | None:
        """The newest epoch that was opened here."""
        return None if self.stage is None else self.stage.epoch

    def take(self, loaded: LoadedStage, thread: EngineThread) -> Stage:
        """The stage is loaded: edges may come to it from now on."""
        if loaded.index == 0:
            self.head = Head(scheduler_limits(loaded))
        self.stage = Stage(
            loaded,
            thread,
            on_fault=self._on_fault,
            on_samples=self.head.on_samples if self.head else lambda *_: None,
        )
        return self.stage

    def open(self, message: OpenEdges, traceparent: str, transport: Transport) -> None:
        """Begin to open an epoch; the orchestrator is told how that ended."""
        if self._opening is not None:  # an epoch that nobody waits for any more, perhaps at a dead neighbour
            self._opening.cancel()
        self._opening = self._start(self._open(message, traceparent, transport))

    async def _open(self, message: OpenEdges, traceparent: str, transport: Transport) -> None:
        epoch = Epoch(message.epoch)
        fields = {**self._node.fields, attributes.EPOCH: message.epoch}
        async with self._lock:
            try:
                with span(self._node.tracer, "worker.open_edges", fields, parent=traceparent):
                    await self._open_epoch(epoch, message, transport)
            except MyelinError as error:
                self._node.log.error("the edges can't be opened", epoch=message.epoch, reason=error.message)
                self._tell(failure(error, fatal=self.stage is not None and self.stage.dead, epoch=message.epoch))
            else:
                self._node.log.info("edges open", epoch=message.epoch)
                self._tell(Envelope(edges_open=EdgesOpen(epoch=message.epoch)))

    async def _open_epoch(self, epoch: Epoch, message: OpenEdges, transport: Transport) -> None:
        stage, head = self.stage, self.head
        if stage is None:
            raise NodeError("edges were to be opened before a stage was loaded", reason="not-provisioned")
        if stage.epoch == epoch:
            if not stage.working:
                raise NodeError(f"epoch {epoch} has failed here", "open a new one", reason="epoch-lost")
            return
        route: Route
        link: EdgeLink | None = None
        if stage.loaded.count == 1:
            assert head is not None
            route = LocalRoute(epoch, head.on_samples)
        else:
            endpoint = Endpoint(tuple(message.next_candidates))
            next_node = NodeId(message.next_node)
            link = EdgeLink(await transport.connect(endpoint, EDGE_PROTOCOL, expect=next_node))
            is_tail = stage.loaded.slice.is_tail
            route = SamplesRoute(epoch, link) if is_tail else ActivationRoute(epoch, link)
        try:
            stage.open(route)
        except MyelinError:
            if link is not None:
                await close_quietly(link.stream)
            raise
        if head is not None:
            head.open(stage)
        if link is not None:
            self._start(self._serve_downstream(stage, link))

    async def _serve_downstream(self, stage: Stage, link: EdgeLink) -> None:
        """Send on an edge that we opened, until it ends."""
        peer = link.stream.peer.node
        try:
            await link.serve_records(stage.receive_from_downstream)
            error: MyelinError = NodeError(f"{peer} closed the edge", "see its log", reason="edge-closed")
        except WireError as broken:
            error = broken
        except TransportError as broken:
            error = NodeError(f"the edge to {peer} broke: {broken.message}", "see its log", reason="edge-lost")
        finally:
            await close_quietly(link.stream)
        if stage.sends_on(link) and not self._ending():
            stage.fail(error)

    async def serve(self, stream: MessageStream) -> None:
        """Serve an edge that somebody opened to us."""
        link = EdgeLink(stream)
        peer = stream.peer.node
        if peer == ORCHESTRATOR:
            if self.head is None:
                self._node.log.warning("the orchestrator opened an edge to a node that is no head")
                return
            try:
                await self.head.serve(link)
            except MyelinError as error:
                self._node.log.warning("the orchestrator's edge ended", reason=error.message)
            return
        stage = self.stage
        if stage is None:
            self._node.log.warning("an edge came before a stage was loaded", peer=str(peer))
            return
        if stream.peer.attempt < self._upstream_attempt:
            # It was believed dead, has been replaced, and woke up: the one in its place must not lose its edge to it.
            self._node.log.warning(
                "an edge of a former attempt was refused", peer=str(peer), attempt=stream.peer.attempt
            )
            return
        self._upstream_attempt = stream.peer.attempt
        before = stage.attach_upstream(link)
        if before is not None:
            before.close()
        broken: MyelinError | None = None
        try:
            await link.serve_records(stage.receive)
        except WireError as error:
            broken = error
        except TransportError as error:
            broken = NodeError(f"the edge from {peer} broke: {error.message}", "see its log", reason="edge-lost")
        finally:
            current = stage.detach_upstream(link)
        if broken is not None and current and not self._ending():
            stage.fail(broken)

    def _on_fault(self, error: MyelinError, own: bool) -> None:
        """The pipeline can't go on in this epoch. What then is the orchestrator's to say; what is loaded stays."""
        fatal = self.stage is not None and self.stage.dead
        if fatal:
            cause = error.__cause__ or error if isinstance(error, EngineError) else None
            self._node.log.error(
                "the pipeline failed", error=cause, reason=error.reason, message=error.message, own=own
            )
        else:  # an epoch is over, and this node is well: should it end one day, these aren't its last words
            self._node.log.warning("the epoch has failed", reason=error.reason, message=error.message, own=own)
        if self.head is not None:
            self.head.fail(error)
        if own:
            self._tell(failure(error, fatal=fatal, epoch=self.epoch or 0))
