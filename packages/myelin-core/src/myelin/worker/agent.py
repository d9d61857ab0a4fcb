"""A node's life: it listens, is told what to load, opens its edges, answers for itself, and ends.

Everything that the orchestrator says comes on the control stream; what it means is decided here, message by message,
and each answer can be had again by asking again: a lost control stream is simply dialled anew.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from contextvars import copy_context
from pathlib import Path
from typing import Protocol

from myelin.cluster.provider import BootSpec
from myelin.engine.contract import Progress as EngineProgress
from myelin.errors import EngineError, MyelinError, NodeError, StreamClosed, TransportError, WireError
from myelin.telemetry import attributes
from myelin.telemetry.tracing import Tracing, configure_tracing, span
from myelin.transport.contract import (
    CONTROL_PROTOCOL,
    EDGE_PROTOCOL,
    ORCHESTRATOR,
    TELEMETRY_PROTOCOL,
    Endpoint,
    MessageStream,
    PeerIdentity,
    Transport,
    TransportOptions,
)
from myelin.values import Epoch, NodeId
from myelin.wire.codec import decode
from myelin.wire.control_pb2 import (
    EdgesOpen,
    Envelope,
    Goodbye,
    OpenEdges,
    Progress,
    Provision,
    Provisioned,
    ReadyAck,
    Status,
)
from myelin.worker.control import DEFAULT_PATIENCE, ControlLink, Patience, failure, refusal, welcome
from myelin.worker.edge import EdgeLink
from myelin.worker.engine_thread import EngineThread
from myelin.worker.head import Head, scheduler_limits
from myelin.worker.link import close_quietly
from myelin.worker.logs import WorkerLog
from myelin.worker.provision import StagePlugins, StageRequest, load_stage, node_cores, stage_request
from myelin.worker.resources import peak_resident_bytes, resident_bytes
from myelin.worker.stage import ActivationRoute, LoadedStage, LocalRoute, Route, SamplesRoute, Stage
from myelin.worker.telemetry import LoadSpans, NodeTelemetry

HELLO_SECONDS = 10.0
"""How long a new control stream may stay silent."""
PROGRESS_SECONDS = 0.15
"""Progress is told this often while a stage is being loaded."""
CLOSE_SECONDS = 2.0
"""How long the engine, and each stream, may take to end."""


class NodePlugins(StagePlugins, Protocol):
    """What an agent asks of the plugin registry."""

    def transport(self, name: str, options: TransportOptions) -> Transport:
        """Make the transport ``name``."""


Loader = Callable[[StageRequest, StagePlugins, Mapping[str, str], EngineProgress], LoadedStage]


class _Loading:
    """One provision: what is being loaded, how far it is, and how it ended."""

    def __init__(self, identifier: int, content: bytes) -> None:
        self.id = identifier
        self.content = content
        self.phase = "open"
        self.done = 0
        self.total = 0
        self.answer: Envelope | None = None

    @property
    def ok(self) -> bool:
        """Whether it is under way, or has ended well."""
        return self.answer is None or self.answer.WhichOneof("body") == "provisioned"

    def ask(self, identifier: int) -> None:
        """The same content was asked for, perhaps by another number: answers bear that one from now on."""
        self.id = identifier
        if self.answer is not None and self.ok:
            self.answer.provisioned.id = identifier

    def progress(self) -> Envelope:
        """How far it is."""
        return Envelope(progress=Progress(id=self.id, phase=self.phase, done=self.done, total=self.total))


class Agent:
    """One node.

    Args:
        boot: Who it is.
        plugins: The registry. Its engines and sources are asked on the engine's thread, and never two at once.
        log: Where it says what it does.
        tracing: Where its spans go, where it has no ``telemetry``.
        telemetry: What it tells of itself; None where nobody wants to know.
        patience: When it stops itself.
        loader: Loads a stage; blocking, on the engine's thread.
    """

    def __init__(
        self,
        boot: BootSpec,
        plugins: NodePlugins,
        *,
        log: WorkerLog | None = None,
        tracing: Tracing | None = None,
        telemetry: NodeTelemetry | None = None,
        patience: Patience = DEFAULT_PATIENCE,
        loader: Loader = load_stage,
    ) -> None:
        self._boot = boot
        self._plugins = plugins
        self._identity = PeerIdentity(boot.run, boot.node, boot.attempt)
        self._environment = {
            **os.environ,
            **{name: value.get_secret_value() for name, value in boot.environment.items()},
        }
        self._log = log or WorkerLog({"node": str(boot.node), "attempt": int(boot.attempt)}, self._environment)
        self._telemetry = telemetry
        self._tracer = (telemetry.tracing if telemetry else tracing or configure_tracing("", ())).tracer
        self._patience = patience
        self._loader = loader
        self._fields: dict[str, str | int] = {
            attributes.RUN: boot.run,
            attributes.NODE: boot.node,
            attributes.ATTEMPT: boot.attempt,
        }

        self._stopping = asyncio.Event()
        self._exit_code = 0
        self._transport: Transport | None = None
        self._thread: EngineThread | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._control: ControlLink | None = None
        self._control_lost: float | None = None
        self._loading: _Loading | None = None
        self._loaded: LoadedStage | None = None
        self._stage: Stage | None = None
        self._head: Head | None = None
        self._opening = asyncio.Lock()
        self._upstream_attempt = 0
        self._opening_edges: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def run(self, on_listening: Callable[[Endpoint], None]) -> int:
        """Live until told to stop, or until on one's own for too long.

        Returns:
            The exit code: 0 where it was told to stop, 1 where it had to stop by itself.

        Raises:
            TransportError: The address can't be listened on.
            PluginError: The transport can't be used.
        """
        options = TransportOptions(identity=self._identity, secret=self._boot.secret)
        transport = self._transport = self._plugins.transport(self._boot.transport, options)
        self._thread = EngineThread(asyncio.get_running_loop())
        try:
            accept = {CONTROL_PROTOCOL: self._serve_control, EDGE_PROTOCOL: self._serve_edge}
            if self._telemetry is not None:
                accept[TELEMETRY_PROTOCOL] = self._serve_telemetry
            listener = await transport.listen(self._boot.bind, accept)
            try:
                on_listening(Endpoint((listener.address,)))
                self._log.info("listening", address=listener.address, pid=os.getpid())
                async with asyncio.TaskGroup() as tasks:
                    self._tasks = tasks
                    watch = tasks.create_task(self._watch_patience(time.monotonic()))
                    await self._stopping.wait()
                    await self._say_goodbye()
                    watch.cancel()
                    for task in self._background:
                        task.cancel()
            finally:
                if self._stage is not None:
                    self._stage.close()
                await listener.close()
        finally:
            await self._close_engine()
            await transport.close()
        return self._exit_code

    def stop(self, reason: str, *, exit_code: int = 0) -> None:
        """End in good order. The first reason counts."""
        if not self._stopping.is_set():
            self._exit_code = exit_code
            self._log.info("stopping", reason=reason)
            self._stopping.set()

    @property
    def _epoch(self) -> Epoch | None:
        """The newest epoch that was opened here."""
        return None if self._stage is None else self._stage.epoch

    # The control stream.

    async def _serve_control(self, stream: MessageStream) -> None:
        link = ControlLink(stream)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = decode(await stream.receive())
            if first.WhichOneof("body") != "hello":
                raise WireError("a control stream must begin with Hello")
            if why := refusal(first.hello, self._identity, stream.peer):
                raise NodeError(f"a control stream was refused: {why}", reason="wrong-node")
        except StreamClosed:
            return
        except TimeoutError:
            self._log.warning("a control stream said nothing", peer=str(stream.peer.node))
            return
        except MyelinError as error:
            self._log.warning("a control stream was refused", reason=error.message)
            link.tell(failure(error))
            link.close()
            await self._flush(link)
            return

        previous, self._control = self._control, link
        if previous is not None:
            self._log.warning("another control stream replaces the first")
            previous.close()
        link.tell(welcome(self._identity, self._epoch))
        try:
            await link.serve(lambda message: self._on_control(link, message))
        except WireError as error:
            self._log.warning("the control stream sent what is no message", reason=error.message)
        except TransportError as error:
            self._log.warning("the control stream broke", reason=error.message)
        finally:
            if self._control is link:
                self._control = None
                self._control_lost = time.monotonic()

    async def _flush(self, link: ControlLink) -> None:
        """Let a closed link's last words leave."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await link.serve(lambda _: None)
        except (MyelinError, TimeoutError):
            pass

    def _tell(self, envelope: Envelope) -> None:
        """Tell the orchestrator, if it listens; it asks again where it doesn't."""
        if self._control is not None:
            self._control.tell(envelope)

    def _on_control(self, link: ControlLink, message: bytes) -> None:
        """One message from the orchestrator; nothing here waits.

        Raises:
            WireError: It isn't one.
        """
        envelope = decode(message)
        match envelope.WhichOneof("body"):
            case "ready_query":
                nonce = envelope.ready_query.nonce
                link.tell(Envelope(ready_ack=ReadyAck(nonce=nonce, attempt=self._identity.attempt)))
            case "provision":
                self._provision(link, envelope.provision, envelope.traceparent)
            case "open_edges":
                if (
                    self._opening_edges is not None
                ):  # an epoch that nobody waits for any more, perhaps at a dead neighbour
                    self._opening_edges.cancel()
                self._opening_edges = self._background_task(self._open_edges(envelope.open_edges, envelope.traceparent))
            case "status_query":
                link.tell(Envelope(status=self._status()))
            case "shutdown":
                self.stop(envelope.shutdown.reason or "shutdown")
            case "hello":
                link.tell(welcome(self._identity, self._epoch))
            case other:
                link.tell(failure(WireError(f"a node has no use for {other}", reason="unexpected-message")))

    def _status(self) -> Status:
        stage, head = self._stage, self._head
        return Status(
            resident_bytes=resident_bytes(),
            peak_resident_bytes=peak_resident_bytes(),
            steps=stage.steps if stage else 0,
            rows=stage.rows if stage else 0,
            busy_seconds=stage.busy_seconds if stage else 0.0,
            sequences_running=head.running if head else 0,
            sequences_waiting=head.waiting if head else 0,
        )

    async def _watch_patience(self, listening_since: float) -> None:
        patience = self._patience
        pause = max(0.01, min(1.0, patience.first_dial_s / 10, patience.dead_man_s / 10))
        while True:
            await asyncio.sleep(pause)
            why = patience.exhausted(
                now=time.monotonic(),
                listening_since=listening_since,
                lost_since=self._control_lost,
                attached=self._control is not None,
            )
            if why:
                self.stop(why, exit_code=1)
                return

    async def _serve_telemetry(self, stream: MessageStream) -> None:
        if self._telemetry is not None and stream.peer.node == ORCHESTRATOR:
            await self._telemetry.serve(stream)

    async def _say_goodbye(self) -> None:
        if self._telemetry is not None:
            await self._telemetry.finish()
        link = self._control
        if link is not None:
            link.tell(Envelope(goodbye=Goodbye()))
            link.close()
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await link.ended.wait()
            except TimeoutError:
                self._log.warning("the orchestrator did not take our goodbye")

    # Loading the stage.

    def _provision(self, link: ControlLink, message: Provision, traceparent: str) -> None:
        """Begin to load, or answer again what is known of it already."""
        loading, content = self._loading, _content(message)
        if loading is not None and loading.content == content and (loading.id == message.id or loading.ok):
            # Asked again; by another orchestrator, perhaps, which then need not wait for what is loaded already.
            loading.ask(message.id)
            link.tell(loading.answer or loading.progress())
            return
        if self._loaded is not None or (loading is not None and (loading.answer is None or loading.id == message.id)):
            error = NodeError(
                f"provision {message.id} came to a node that has provision {loading.id if loading else 0} at work",
                "start another node for another stage",
                reason="already-provisioned",
            )
            link.tell(failure(error))
            return
        self._loading = _Loading(message.id, content)
        link.tell(self._loading.progress())
        self._background_task(self._load(self._loading, message, traceparent))

    async def _load(self, loading: _Loading, message: Provision, traceparent: str) -> None:
        ticker = asyncio.create_task(self._tick(loading))
        began = time.perf_counter()
        try:
            with span(self._tracer, "worker.provision", self._fields, parent=traceparent) as current:
                request = stage_request(
                    message,
                    default_engine=self._boot.engine,
                    default_cache_dir=Path(self._environment.get("MYELIN_MODEL_CACHE_DIR") or _default_cache()),
                    default_threads=node_cores(self._environment),
                )
                current.set_attributes(
                    {
                        attributes.MODEL: request.model_uri,
                        attributes.ENGINE: request.engine,
                        attributes.STAGE: request.index,
                        attributes.FIRST_LAYER: request.first_layer,
                        attributes.END_LAYER: request.end_layer,
                    }
                )
                self._log.info(
                    "loading",
                    model=request.model_uri,
                    engine=request.engine,
                    stage=request.index,
                    layers=[request.first_layer, request.end_layer],
                )
                loaded = await self._load_on_thread(loading, request)
        except MyelinError as error:
            self._log.error("loading failed", reason=error.reason, message=error.message)
            loading.answer = failure(error)
        except Exception as error:
            self._log.error("loading failed", error=error)
            loading.answer = failure(error)
        else:
            seconds = time.perf_counter() - began
            self._take(loaded)
            self._log.info("loaded", seconds=round(seconds, 3), fetched_bytes=loaded.fetched_bytes)
            loading.answer = Envelope(
                provisioned=Provisioned(
                    id=loading.id,
                    weight_bytes=loaded.report.weight_bytes,
                    kv_bytes=loaded.report.kv_bytes,
                    fetched_bytes=loaded.fetched_bytes,
                    seconds=seconds,
                    threads=loaded.threads,
                )
            )
        finally:
            ticker.cancel()
        self._tell(loading.answer)

    async def _load_on_thread(self, loading: _Loading, request: StageRequest) -> LoadedStage:
        loop = asyncio.get_running_loop()

        def progress(phase: str, done: int, total: int) -> None:
            """On the engine's thread: note it; a new phase is told at once, the rest as the ticker comes by."""
            spans.progress(phase, done, total)
            changed = phase != loading.phase
            loading.phase, loading.done, loading.total = phase, max(0, done), max(0, total)
            if changed:
                loop.call_soon_threadsafe(self._tell, loading.progress())

        assert self._thread is not None
        with span(self._tracer, "worker.load", self._fields) as current:
            spans = LoadSpans(self._tracer, current, self._fields)
            try:
                loaded: LoadedStage = await self._thread.call(
                    copy_context().run, self._loader, request, self._plugins, self._environment, progress
                )
            except BaseException as error:
                spans.end(error)
                raise
            spans.end()
            current.set_attributes(
                {
                    attributes.WEIGHT_BYTES: loaded.report.weight_bytes,
                    attributes.KV_BYTES: loaded.report.kv_bytes,
                    attributes.FETCHED_BYTES: loaded.fetched_bytes,
                    attributes.SHARD_NETWORK_BYTES: loaded.network_bytes,
                    attributes.THREADS: loaded.threads,
                }
            )
            if loaded.shard is not None:
                current.set_attributes(
                    {
                        attributes.SHARD_RANGES: len(loaded.shard.ranges),
                        attributes.SHARD_BYTES: loaded.shard.range_bytes,
                        attributes.SHARD_FRACTION: loaded.shard.fraction,
                    }
                )
        return loaded

    async def _tick(self, loading: _Loading) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            self._tell(loading.progress())

    def _take(self, loaded: LoadedStage) -> None:
        assert self._thread is not None
        self._loaded = loaded
        if loaded.index == 0:
            self._head = Head(scheduler_limits(loaded))
        self._stage = Stage(
            loaded,
            self._thread,
            on_fault=self._on_fault,
            on_samples=self._head.on_samples if self._head else lambda *_: None,
        )
        if self._telemetry is not None:
            self._telemetry.attach(self._stage, self._head)

    # The edges.

    async def _open_edges(self, message: OpenEdges, traceparent: str) -> None:
        epoch = Epoch(message.epoch)
        fields = {**self._fields, attributes.EPOCH: message.epoch}
        async with self._opening:
            try:
                with span(self._tracer, "worker.open_edges", fields, parent=traceparent):
                    await self._open_epoch(epoch, message)
            except MyelinError as error:
                self._log.error("the edges can't be opened", epoch=message.epoch, reason=error.message)
                self._tell(failure(error, fatal=self._stage is not None and self._stage.dead, epoch=message.epoch))
            else:
                self._log.info("edges open", epoch=message.epoch)
                self._tell(Envelope(edges_open=EdgesOpen(epoch=message.epoch)))

    async def _open_epoch(self, epoch: Epoch, message: OpenEdges) -> None:
        stage, head = self._stage, self._head
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
            assert self._transport is not None
            endpoint = Endpoint(tuple(message.next_candidates))
            next_node = NodeId(message.next_node)
            link = EdgeLink(await self._transport.connect(endpoint, EDGE_PROTOCOL, expect=next_node))
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
            self._background_task(self._serve_downstream(stage, link))

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
        if stage.sends_on(link) and not self._stopping.is_set():
            stage.fail(error)

    async def _serve_edge(self, stream: MessageStream) -> None:
        """Serve an edge that somebody opened to us."""
        link = EdgeLink(stream)
        peer = stream.peer.node
        if peer == ORCHESTRATOR:
            if self._head is None:
                self._log.warning("the orchestrator opened an edge to a node that is no head")
                return
            try:
                await self._head.serve(link)
            except MyelinError as error:
                self._log.warning("the orchestrator's edge ended", reason=error.message)
            return
        stage = self._stage
        if stage is None:
            self._log.warning("an edge came before a stage was loaded", peer=str(peer))
            return
        if stream.peer.attempt < self._upstream_attempt:
            # It was believed dead, has been replaced, and woke up: the one in its place must not lose its edge to it.
            self._log.warning("an edge of a former attempt was refused", peer=str(peer), attempt=stream.peer.attempt)
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
        if broken is not None and current and not self._stopping.is_set():
            stage.fail(broken)

    def _on_fault(self, error: MyelinError, own: bool) -> None:
        """The pipeline can't go on in this epoch. What then is the orchestrator's to say; what is loaded stays."""
        fatal = self._stage is not None and self._stage.dead
        if fatal:
            cause = error.__cause__ or error if isinstance(error, EngineError) else None
            self._log.error("the pipeline failed", error=cause, reason=error.reason, message=error.message, own=own)
        else:  # an epoch is over, and this node is well: should it end one day, these aren't its last words
            self._log.warning("the epoch has failed", reason=error.reason, message=error.message, own=own)
        if self._head is not None:
            self._head.fail(error)
        if own:
            self._tell(failure(error, fatal=fatal, epoch=self._epoch or 0))

    # Ending.

    def _background_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None] | None:
        """Run ``work`` until it is done or the agent ends; what it raises is a fault of ours and ends the agent."""
        if self._tasks is None or self._stopping.is_set():
            work.close()
            return None
        try:
            task = self._tasks.create_task(work)
        except RuntimeError:  # the agent was cancelled, and its group is over
            work.close()
            return None
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _close_engine(self) -> None:
        """Free the engine on its own thread; one that is busy for long is left behind: its thread is a daemon."""
        thread, loaded = self._thread, self._loaded
        if thread is None:
            return
        if loaded is not None:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await thread.call(loaded.close)
            except TimeoutError:
                self._log.warning("the engine is still busy")
            except Exception as error:
                self._log.error("the engine did not close", error=error)
        thread.stop()


def _content(message: Provision) -> bytes:
    """What a provision asks for, whatever its number; equal for equal content within one version of the library."""
    content = Provision()
    content.CopyFrom(message)
    content.id = 0
    return content.SerializeToString(deterministic=True)


def _default_cache() -> str:
    import platformdirs

    return str(platformdirs.user_cache_path("myelin") / "models")
