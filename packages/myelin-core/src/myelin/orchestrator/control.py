"""One node's control stream, from the orchestrator's side: who is there, are you ready, load this, open your edges.

A reader task takes every message as it comes; each conversation waits for its own kind of answer. When the stream is
lost, or the node says that it can't go on, every conversation fails at once with the same error.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import Message

from myelin import __version__
from myelin.errors import MyelinError, NodeError, StreamClosed, TransportError
from myelin.orchestrator.background import fresh
from myelin.orchestrator.provision import ProvisionState, Verdict, decide
from myelin.telemetry.tracing import traceparent
from myelin.transport.contract import CONTROL_PROTOCOL, Endpoint, MessageStream, Transport
from myelin.values import Attempt, Epoch, NodeId, RunId
from myelin.wire import control_pb2 as pb
from myelin.wire.codec import decode, encode

READY_RESEND_S = 0.25
DIAL_RETRY_S = 0.1
STATUS_TIMEOUT_S = 2.0

_REFUSED = frozenset({"wrong-node", "wrong-run", "refused-secret", "refused", "no-secret"})
"""Reasons for which dialling again is no use: somebody else is there."""

_ANSWERS = {"progress": "provisioned"}
"""Progress belongs to the conversation that ends with ``provisioned``; every other kind is its own."""

ProgressHandler = Callable[[str, int, int], None]
"""``handler(phase, done, total)``."""

FaultHandler = Callable[[Epoch, NodeError], None]
"""``handler(epoch, error)``."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a node says of its loaded stage: bytes held, reserved and read; seconds; compute threads; resent how
    often."""

    weight_bytes: int
    kv_bytes: int
    fetched_bytes: int
    seconds: float
    threads: int
    resends: int


class NodeControl:
    """A dialled node. :meth:`serve` must run for as long as it is used.

    Attributes:
        node, attempt: Who it is.
        welcome: What it said of itself, once :meth:`greet` is through.
        lost: Why the node is gone, once it is.
        engine_dead: Whether it said itself that it can't go on.
    """

    def __init__(self, stream: MessageStream, run: RunId, node: NodeId, attempt: Attempt) -> None:
        self._stream = stream
        self._run = run
        self.node = node
        self.attempt = attempt
        self.welcome = pb.Welcome()
        self.lost: NodeError | None = None
        self._answers: defaultdict[str, asyncio.Queue[Message | MyelinError]] = defaultdict(asyncio.Queue)
        self._waiting: Counter[str] = Counter()
        self.engine_dead = False
        self._ending = False
        self._nonce = 0
        self._opening: Epoch | None = None
        self._on_fault: FaultHandler = lambda epoch, error: None

    async def serve(
        self, on_lost: Callable[[NodeError], None], on_fault: FaultHandler = lambda epoch, error: None
    ) -> None:
        """Take the node's messages until its stream ends.

        Args:
            on_lost: Told where the stream ended without having been asked to, or the node can't go on.
            on_fault: Told of an epoch that can't go on, while the node can.
        """
        self._on_fault = on_fault
        try:
            while True:
                self._take(decode(await self._stream.receive()))
        except StreamClosed:
            self._lose(_lost(f"{self.node} closed its control stream"), on_lost)
        except TransportError as error:
            self._lose(_lost(f"{self.node} was lost: {error.message}"), on_lost)
        except NodeError as error:
            self._lose(error, on_lost)

    def _take(self, envelope: pb.Envelope) -> None:
        kind = envelope.WhichOneof("body")
        assert kind is not None  # decode refuses an envelope without one
        body: Message = getattr(envelope, kind)
        if isinstance(body, pb.Failure):
            self._take_failure(body)
        else:
            self._answers[_ANSWERS.get(kind, kind)].put_nowait(body)

    def _take_failure(self, failure: pb.Failure) -> None:
        """A fatal failure ends the node; one of an epoch ends that; another one fails whoever waits for an answer."""
        error = NodeError(f"{self.node}: {failure.message}", failure.hint, reason=failure.reason or "node-failed")
        if failure.fatal:
            self.engine_dead = True
            raise error
        if failure.epoch:
            if failure.epoch == self._opening:
                self._answers["edges_open"].put_nowait(error)
            else:
                self._on_fault(Epoch(failure.epoch), error)
            return
        if not self._waiting.total():
            raise error
        self._tell_all(error)

    def _tell_all(self, error: NodeError) -> None:
        """Every conversation that waits for an answer gets this one."""
        for kind in self._waiting.elements():
            self._answers[kind].put_nowait(error)

    def _lose(self, error: NodeError, on_lost: Callable[[NodeError], None]) -> None:
        self.lost = error
        self._tell_all(error)
        if not self._ending:
            on_lost(error)

    async def _send(self, **body: Message) -> None:
        try:
            # One field of the envelope, whose types the checker can't tell apart.
            await self._stream.send(encode(pb.Envelope(traceparent=traceparent(), **body)))  # type: ignore[arg-type]
        except TransportError as error:
            raise self.lost or _lost(f"{self.node} was lost: {error.message}") from None

    def _start(self, kind: str) -> None:
        """A conversation begins: what an earlier one was not there any more to hear is dropped."""
        if not self._waiting[kind]:
            self._answers[kind] = asyncio.Queue()

    async def _answer(self, kind: str) -> Message:
        """The next answer of a kind.

        Raises:
            NodeError: The node was lost, or answered with a failure.
        """
        queue = self._answers[kind]
        if self.lost is not None and queue.empty():
            raise fresh(self.lost)
        self._waiting[kind] += 1
        try:
            answer = await queue.get()
        finally:
            self._waiting[kind] -= 1
        if isinstance(answer, MyelinError):
            raise fresh(answer)
        return answer

    async def greet(self) -> pb.Welcome:
        """Say who is meant, and hear that it is who answers.

        Raises:
            NodeError: Another run, node or attempt answered (reason ``wrong-node``), or the node was lost.
        """
        await self._send(hello=pb.Hello(run=self._run, node=self.node, attempt=self.attempt, version=__version__))
        welcome = await self._answer("welcome")
        assert isinstance(welcome, pb.Welcome)
        if (welcome.run, welcome.node, welcome.attempt) != (self._run, self.node, self.attempt):
            raise NodeError(
                f"where {self.node} (attempt {self.attempt}) was expected, {welcome.node} (attempt {welcome.attempt}) "
                "answered",
                "something else listens on its address: stop it, or check the endpoint",
                reason="wrong-node",
            )
        self.welcome = welcome
        return welcome

    async def acknowledge(self) -> int:
        """Ask whether the node is ready, each 250 ms, until the matching answer is back.

        Returns:
            How often it was asked.

        Raises:
            NodeError: It was lost, or the answer is another attempt's (reason ``wrong-attempt``).
        """
        asked = 0
        self._start("ready_ack")
        while True:
            self._nonce += 1
            asked += 1
            await self._send(ready_query=pb.ReadyQuery(nonce=self._nonce))
            try:
                async with asyncio.timeout(READY_RESEND_S):
                    answer = await self._answer("ready_ack")
                    while not self._answers_ours(answer):
                        answer = await self._answer("ready_ack")
            except TimeoutError:
                continue
            return asked

    def _answers_ours(self, answer: Message) -> bool:
        """Whether it acknowledges any question of ours (a late answer to an earlier one is as good)."""
        assert isinstance(answer, pb.ReadyAck)
        if answer.attempt != self.attempt:
            raise NodeError(
                f"{self.node} answered as attempt {answer.attempt}, not {self.attempt}",
                "it was started anew meanwhile: run again",
                reason="wrong-attempt",
            )
        return 1 <= answer.nonce <= self._nonce

    async def provision(self, message: pb.Provision, on_progress: ProgressHandler, stall_s: float) -> Loaded:
        """Have the node load its stage; told again by the rules of :mod:`myelin.orchestrator.provision`.

        Raises:
            NodeError: It could not (with its own reason), it was lost, or it got no further for ``stall_s`` (reason
                ``load-stalled``).
        """
        state = ProvisionState(began=time.monotonic())
        self._start("provisioned")
        while True:
            decision = decide(state, time.monotonic(), stall_s)
            if decision.verdict is Verdict.STALLED:
                raise NodeError(
                    f"{self.node} got no further with loading its stage for {stall_s:g} s",
                    "look at what it wrote; a slow network needs a larger load_stall_s",
                    reason="load-stalled",
                )
            if decision.verdict is Verdict.SEND:
                await self._send(provision=message)
                state = state.after_send(time.monotonic())
                continue
            try:
                async with asyncio.timeout(max(0.0, decision.until - time.monotonic())):
                    answer = await self._answer("provisioned")
            except TimeoutError:
                continue
            if isinstance(answer, pb.Progress) and answer.id == message.id:
                state = state.after_progress(time.monotonic(), answer.phase, answer.done)
                on_progress(answer.phase, answer.done, answer.total)
            elif isinstance(answer, pb.Provisioned) and answer.id == message.id:
                return Loaded(
                    weight_bytes=answer.weight_bytes,
                    kv_bytes=answer.kv_bytes,
                    fetched_bytes=answer.fetched_bytes,
                    seconds=answer.seconds,
                    threads=answer.threads,
                    resends=state.sent - 1,
                )

    async def open_edges(self, epoch: Epoch, next_node: NodeId | None, endpoint: Endpoint | None) -> None:
        """Have the node dial its neighbour (nobody, where it is the only stage) and accept records of ``epoch``.

        Raises:
            NodeError: It could not, or it was lost.
        """
        candidates = endpoint.candidates if endpoint else ()
        message = pb.OpenEdges(epoch=epoch, next_node=next_node or "", next_candidates=list(candidates))
        self._start("edges_open")
        self._opening = epoch
        try:
            await self._send(open_edges=message)
            while True:
                answer = await self._answer("edges_open")
                assert isinstance(answer, pb.EdgesOpen)
                if answer.epoch == epoch:
                    return
        finally:
            self._opening = None

    async def status(self) -> pb.Status:
        """How the node is.

        Raises:
            NodeError: It was lost, or did not answer in time.
        """
        await self._send(status_query=pb.StatusQuery())
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                answer = await self._answer("status")
        except TimeoutError:
            raise NodeError(f"{self.node} did not answer", reason="status-timeout") from None
        assert isinstance(answer, pb.Status)
        return answer

    async def shut_down(self, reason: str) -> bool:
        """Ask the node to end by itself and wait until it says goodbye or is gone; never raises for a lost node.

        Returns:
            Whether it said goodbye.
        """
        self._ending = True
        try:
            await self._send(shutdown=pb.Shutdown(reason=reason))
            await self._answer("goodbye")
        except NodeError:
            return False
        return True

    def expect_the_end(self) -> None:
        """From now on, losing the node is nothing to tell anybody."""
        self._ending = True

    async def close(self) -> None:
        """Close the stream; one that is broken already is fine."""
        self._ending = True
        try:
            await self._stream.close()
        except TransportError:
            pass


async def dial(transport: Transport, endpoint: Endpoint, run: RunId, node: NodeId, attempt: Attempt) -> NodeControl:
    """Open a node's control stream, again and again until it answers; the caller sets the deadline.

    Raises:
        NodeError: Somebody else is there (reason ``wrong-node`` or the handshake's own).
    """
    while True:
        try:
            stream = await transport.connect(endpoint, CONTROL_PROTOCOL, expect=node)
        except TransportError as error:
            if error.reason in _REFUSED:
                raise NodeError(
                    f"{node} could not be reached: {error.message}", error.hint, reason=error.reason
                ) from None
            await asyncio.sleep(DIAL_RETRY_S)
        else:
            return NodeControl(stream, run, node, attempt)


def _lost(what: str) -> NodeError:
    """A node is gone, or can't be heard any more; why, only its own side can tell."""
    return NodeError(
        what,
        "check that its machine is up, not stopped and in reach; --log-level debug shows what it wrote",
        reason="node-lost",
    )
