"""A node's life: it listens, is told what to load and which edges to open, answers for itself, and ends.

Everything that the orchestrator says comes on the control stream; whom it is for is decided here, message by message,
and each answer can be had again by asking again: a lost control stream is simply dialled anew.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from typing import Protocol

from myelin.cluster.provider import BootSpec
from myelin.errors import MyelinError, NodeError, StreamClosed, TransportError, WireError
from myelin.telemetry.tracing import Tracing, configure_tracing
from myelin.transport.contract import (
    CONTROL_PROTOCOL,
    EDGE_PROTOCOL,
    ORCHESTRATOR,
    TELEMETRY_PROTOCOL,
    Endpoint,
    MessageStream,
    Transport,
    TransportOptions,
)
from myelin.wire.codec import decode
from myelin.wire.control_pb2 import Envelope, Goodbye, ReadyAck, Status
from myelin.worker.context import NodeContext
from myelin.worker.control import DEFAULT_PATIENCE, ControlLink, Patience, failure, refusal, welcome
from myelin.worker.edges import Edges
from myelin.worker.engine_thread import EngineThread
from myelin.worker.loading import Loader, StageLoading
from myelin.worker.logs import WorkerLog
from myelin.worker.provision import StagePlugins, load_stage
from myelin.worker.resources import peak_resident_bytes, resident_bytes
from myelin.worker.stage import LoadedStage
from myelin.worker.telemetry import NodeTelemetry

HELLO_SECONDS = 10.0
"""How long a new control stream may stay silent."""
CLOSE_SECONDS = 2.0
"""How long the engine, and each stream, may take to end."""


class NodePlugins(StagePlugins, Protocol):
    """What an agent asks of the plugin registry."""

    def transport(self, name: str, options: TransportOptions) -> Transport:
        """Make the transport ``name``."""


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
        environment = {
            **os.environ,
            **{name: value.get_secret_value() for name, value in boot.environment.items()},
        }
        self._boot = boot
        self._plugins = plugins
        self._log = log or WorkerLog({"node": str(boot.node), "attempt": int(boot.attempt)}, environment)
        self._telemetry = telemetry
        self._patience = patience
        tracer = (telemetry.tracing if telemetry else tracing or configure_tracing("", ())).tracer
        node = NodeContext(boot, environment, self._log, tracer)
        self._identity = node.identity
        self._edges = Edges(node, start=self._background_task, tell=self._tell, ending=lambda: self._stopping.is_set())
        self._loading = StageLoading(
            node, plugins, loader, start=self._background_task, tell=self._tell, on_loaded=self._take
        )

        self._stopping = asyncio.Event()
        self._exit_code = 0
        self._transport: Transport | None = None
        self._thread: EngineThread | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._control: ControlLink | None = None
        self._control_lost: float | None = None
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
            accept = {CONTROL_PROTOCOL: self._serve_control, EDGE_PROTOCOL: self._edges.serve}
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
                if self._edges.stage is not None:
                    self._edges.stage.close()
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
        link.tell(welcome(self._identity, self._edges.epoch))
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
                assert self._thread is not None
                self._loading.begin(link, envelope.provision, envelope.traceparent, self._thread)
            case "open_edges":
                assert self._transport is not None
                self._edges.open(envelope.open_edges, envelope.traceparent, self._transport)
            case "status_query":
                link.tell(Envelope(status=self._status()))
            case "shutdown":
                self.stop(envelope.shutdown.reason or "shutdown")
            case "hello":
                link.tell(welcome(self._identity, self._edges.epoch))
            case other:
                link.tell(failure(WireError(f"a node has no use for {other}", reason="unexpected-message")))

    def _status(self) -> Status:
        stage, head = self._edges.stage, self._edges.head
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

    def _take(self, loaded: LoadedStage) -> None:
        """The stage is loaded."""
        assert self._thread is not None
        stage = self._edges.take(loaded, self._thread)
        if self._telemetry is not None:
            self._telemetry.attach(stage, self._edges.head)

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
        thread, loaded = self._thread, self._loading.loaded
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
