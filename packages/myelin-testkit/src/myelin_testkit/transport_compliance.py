"""What every transport must do, as a test class: subclass :class:`TransportCompliance` in a test module.

::

    class TestMyTransport(TransportCompliance):
        def make_transport(self, options: TransportOptions) -> Transport:
            return MyTransport(options)

Addresses are ``host:port`` on loopback, as everywhere in Myelin; a transport of another kind maps its own onto them.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import pytest_asyncio
from pydantic import SecretStr

from myelin.plugin import (
    Attempt,
    Endpoint,
    Listener,
    MessageStream,
    NodeId,
    PeerIdentity,
    RunId,
    StreamClosed,
    Transport,
    TransportError,
    TransportOptions,
)

CONTROL_PROTOCOL = "myelin/control/1"
EDGE_PROTOCOL = "myelin/edge/1"
HEAD, TAIL = NodeId("stage-0"), NodeId("stage-1")
MIB = 1 << 20

Factory = Callable[[TransportOptions], Transport]


def options(node: NodeId, *, run: str = "run-1", secret: str = "a secret", limit: int = 64 * MIB) -> TransportOptions:
    """What a node's transport is made with."""
    identity = PeerIdentity(RunId(run), node, Attempt(1))
    return TransportOptions(identity, SecretStr(secret), max_message_bytes=limit, connect_timeout_s=30.0)


class Pair:
    """Both ends of one stream; the acceptor's handler stays until :meth:`leave` is called."""

    def __init__(self, dialled: MessageStream, accepted: MessageStream, listener: Listener, leave: asyncio.Event):
        self.dialled, self.accepted, self.listener, self.leave = dialled, accepted, listener, leave

    def ends(self, way: str) -> tuple[MessageStream, MessageStream]:
        """The sending and the receiving end, for messages out of the dialler or in to it."""
        return (self.dialled, self.accepted) if way == "out" else (self.accepted, self.dialled)


@asynccontextmanager
async def pair(make: Factory, limit: int = 64 * MIB) -> AsyncIterator[Pair]:
    """An open stream from the head to the tail."""
    arrived: asyncio.Future[MessageStream] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def handler(stream: MessageStream) -> None:
        arrived.set_result(stream)
        await leave.wait()

    listener = await make(options(TAIL, limit=limit)).listen("127.0.0.1:0", {EDGE_PROTOCOL: handler})
    stream = await make(options(HEAD, limit=limit)).connect(Endpoint((listener.address,)), EDGE_PROTOCOL, expect=TAIL)
    async with asyncio.timeout(60):
        yield Pair(stream, await arrived, listener, leave)
    leave.set()
    await stream.close()
    await listener.close()


async def echo(stream: MessageStream) -> None:
    """A handler that sends back what comes."""
    while True:
        await stream.send(await stream.receive())


async def fails(call: Awaitable[object], reason: str) -> TransportError:
    """The error with which a call fails, in words for people."""
    with pytest.raises(TransportError) as caught:
        await call
    assert caught.value.reason == reason
    assert caught.value.message
    assert "\n" not in caught.value.message
    return caught.value


class TransportCompliance(ABC):
    """Subclass it as ``Test…`` and say how a transport is made."""

    pytestmark = pytest.mark.asyncio

    @abstractmethod
    def make_transport(self, options: TransportOptions) -> Transport:
        """A new transport, in an event loop that runs."""

    async def dial_without_handshake(
        self, transport: Transport, options: TransportOptions, address: str
    ) -> MessageStream | None:
        """A stream of the edge protocol to ``address`` on which nothing was said yet; None where there is no way."""
        return None

    @pytest_asyncio.fixture
    async def make(self) -> AsyncIterator[Factory]:
        """Makes transports; all are closed at the end, and no task may be left over."""
        before = asyncio.all_tasks()
        made: list[Transport] = []

        def factory(given: TransportOptions) -> Transport:
            made.append(self.make_transport(given))
            return made[-1]

        yield factory
        for transport in reversed(made):
            await transport.close()
            await transport.close()
        left = asyncio.all_tasks() - before - {asyncio.current_task()}
        if left:
            _, left = await asyncio.wait(left, timeout=20.0)
        assert not left, "a closed transport leaves no task"

    @pytest.mark.parametrize("way", ["out", "in"])
    async def test_messages_arrive_whole_and_in_order(self, make: Factory, way: str) -> None:
        sent = [bytes([size % 256]) * size for size in [0, 1, 2, 3, 255, 256, 1000, 16_384, 70_000, 300_000, 0, 5]]
        sent += [b"\xff", b"\xff\xff", b"\xff" * 1000, b"\x00"]
        async with pair(make) as both:
            sender, receiver = both.ends(way)

            async def send_all() -> None:
                for message in sent:
                    await sender.send(message)

            async with asyncio.TaskGroup() as group:
                group.create_task(send_all())
                received = [await receiver.receive() for _ in sent]
        assert received == sent

    async def test_both_sides_know_each_other(self, make: Factory) -> None:
        async with pair(make) as both:
            assert both.dialled.peer == PeerIdentity(RunId("run-1"), TAIL, Attempt(1))
            assert both.accepted.peer == PeerIdentity(RunId("run-1"), HEAD, Attempt(1))

    async def test_any_buffer_may_be_sent_and_changed_afterwards(self, make: Factory) -> None:
        async with pair(make) as both:
            data = bytearray(b"activations")
            await both.dialled.send(data)
            await both.dialled.send(memoryview(data)[:3])
            await both.dialled.send(memoryview(b"\x01\x00\x00\x00\x02\x00\x00\x00").cast("i"))
            data[:] = b"-----------"
            received = [await both.accepted.receive() for _ in range(3)]
        assert received == [b"activations", b"act", b"\x01\x00\x00\x00\x02\x00\x00\x00"]

    async def test_a_large_message(self, make: Factory) -> None:
        message = bytes(range(256)) * (32 * MIB // 256)
        async with pair(make) as both, asyncio.TaskGroup() as group:
            group.create_task(both.dialled.send(message))
            received = await both.accepted.receive()
        assert received == message

    async def test_a_message_above_the_limit_is_refused_and_the_stream_lives_on(self, make: Factory) -> None:
        async with pair(make, limit=1000) as both:
            await fails(both.dialled.send(b"x" * 1001), "message-too-large")
            await fails(both.accepted.send(b"x" * 1001), "message-too-large")
            await both.dialled.send(b"\xff" * 1000)
            assert await both.accepted.receive() == b"\xff" * 1000

    async def test_a_message_above_the_receivers_limit_breaks_the_stream(self, make: Factory) -> None:
        arrived: asyncio.Future[TransportError] = asyncio.get_running_loop().create_future()

        async def handler(stream: MessageStream) -> None:
            try:
                await stream.receive()
            except TransportError as error:
                arrived.set_result(error)

        listener = await make(options(TAIL, limit=1000)).listen("127.0.0.1:0", {EDGE_PROTOCOL: handler})
        stream = await make(options(HEAD)).connect(Endpoint((listener.address,)), EDGE_PROTOCOL)
        await stream.send(b"x" * 5000)
        async with asyncio.timeout(60):
            assert not isinstance(await arrived, StreamClosed)
            with pytest.raises(TransportError):
                await stream.receive()

    async def test_streams_are_independent(self, make: Factory) -> None:
        listener = await make(options(TAIL)).listen("127.0.0.1:0", {EDGE_PROTOCOL: echo, CONTROL_PROTOCOL: echo})
        dialler = make(options(HEAD))
        endpoint = Endpoint((listener.address,))

        async def talk(number: int) -> list[bytes]:
            protocol = EDGE_PROTOCOL if number % 2 else CONTROL_PROTOCOL
            stream = await dialler.connect(endpoint, protocol)
            answers = []
            for turn in range(20):
                await stream.send(b"%d %d" % (number, turn))
                answers.append(await stream.receive())
            await stream.close()
            return answers

        async with asyncio.timeout(60):
            results = await asyncio.gather(*(talk(number) for number in range(8)))
        assert results == [[b"%d %d" % (number, turn) for turn in range(20)] for number in range(8)]

    @pytest.mark.parametrize("way", ["out", "in"])
    async def test_a_receiver_that_does_not_read_holds_the_sender(self, make: Factory, way: str) -> None:
        message = b"x" * MIB
        async with pair(make) as both:
            sender, receiver = both.ends(way)
            taken = 0
            begun = asyncio.Event()

            async def flood() -> None:
                nonlocal taken
                for _ in range(100):
                    await sender.send(message)
                    taken += 1
                    begun.set()

            flooding = asyncio.create_task(flood())
            await begun.wait()
            await asyncio.sleep(0.7)
            assert taken < 60
            for _ in range(100):
                assert await receiver.receive() == message
            await flooding
            assert taken == 100

    async def test_a_cancelled_receive_loses_nothing(self, make: Factory) -> None:
        async with pair(make) as both:
            for number in range(20):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.002):
                        await both.accepted.receive()
                await both.dialled.send(b"%d" % number)
                assert await both.accepted.receive() == b"%d" % number

    @pytest.mark.parametrize("way", ["out", "in"])
    async def test_close_delivers_what_was_sent(self, make: Factory, way: str) -> None:
        sent = [b"x" * 100_000 for _ in range(10)] + [b"last"]
        async with pair(make) as both:
            closer, other = both.ends(way)
            for message in sent:
                await closer.send(message)
            await closer.close()
            await closer.close()
            assert [await other.receive() for _ in sent] == sent
            with pytest.raises(StreamClosed):
                await other.receive()
            with pytest.raises(StreamClosed):
                await other.receive()
            with pytest.raises(TransportError):
                await other.send(b"too late")
            await fails(closer.send(b"too late"), "closed")
            await fails(closer.receive(), "closed")
            await other.close()

    @pytest.mark.parametrize("way", ["out", "in"])
    async def test_close_wakes_who_waits_on_either_side(self, make: Factory, way: str) -> None:
        async with pair(make) as both:
            closer, other = both.ends(way)
            waiting = [asyncio.create_task(closer.receive()), asyncio.create_task(other.receive())]
            await asyncio.sleep(0.05)
            await closer.close()
            results = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(results[0], TransportError)
        assert results[0].reason == "closed"
        assert isinstance(results[1], StreamClosed)

    async def test_both_sides_close_at_once(self, make: Factory) -> None:
        async with pair(make) as both:
            await asyncio.gather(both.dialled.send(b"a"), both.accepted.send(b"b"))
            begun = asyncio.get_running_loop().time()
            await asyncio.gather(both.dialled.close(), both.accepted.close())
            assert asyncio.get_running_loop().time() - begun < 4.0  # well within the time for lingering

    @pytest.mark.parametrize("way", ["out", "in"])
    async def test_close_while_the_peer_still_sends(self, make: Factory, way: str) -> None:
        async with pair(make) as both:
            closer, other = both.ends(way)

            async def flood() -> None:
                while True:
                    await other.send(b"x" * 200_000)

            flooding = asyncio.create_task(flood())
            await closer.receive()
            await asyncio.sleep(0.1)
            await closer.close()
            with pytest.raises(TransportError):
                await flooding

    async def test_a_handler_that_returns_closes_its_stream(self, make: Factory) -> None:
        async def handler(stream: MessageStream) -> None:
            await stream.send(b"goodbye")

        listener = await make(options(TAIL)).listen("127.0.0.1:0", {EDGE_PROTOCOL: handler})
        stream = await make(options(HEAD)).connect(Endpoint((listener.address,)), EDGE_PROTOCOL)
        assert await stream.receive() == b"goodbye"
        with pytest.raises(StreamClosed):
            await stream.receive()

    async def test_a_handler_that_fails_breaks_its_stream_and_no_other(
        self, make: Factory, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def handler(stream: MessageStream) -> None:
            if await stream.receive() == b"fail":
                raise ValueError("a bug")
            await echo(stream)

        listener = await make(options(TAIL)).listen("127.0.0.1:0", {EDGE_PROTOCOL: handler})
        dialler = make(options(HEAD))
        good, bad = [await dialler.connect(Endpoint((listener.address,)), EDGE_PROTOCOL) for _ in range(2)]
        await good.send(b"go")
        await bad.send(b"fail")
        with pytest.raises(TransportError) as caught:
            await bad.receive()
        assert not isinstance(caught.value, StreamClosed)
        assert "a bug" in caplog.text
        await good.send(b"still there")
        assert await good.receive() == b"still there"

    async def test_a_wrong_secret_never_reaches_a_handler(self, make: Factory) -> None:
        reached: list[MessageStream] = []

        async def handler(stream: MessageStream) -> None:
            reached.append(stream)

        listener = await make(options(TAIL)).listen("127.0.0.1:0", {EDGE_PROTOCOL: handler})
        endpoint = Endpoint((listener.address,))
        error = await fails(make(options(HEAD, secret="another")).connect(endpoint, EDGE_PROTOCOL), "refused-secret")
        assert error.hint
        assert "another" not in error.message.replace("another secret", "")
        await fails(make(options(HEAD, run="run-2")).connect(endpoint, EDGE_PROTOCOL), "wrong-run")
        await fails(make(options(HEAD)).connect(endpoint, EDGE_PROTOCOL, expect=HEAD), "wrong-node")
        await asyncio.sleep(0.05)
        assert not reached

    async def test_an_unknown_protocol(self, make: Factory) -> None:
        listener = await make(options(TAIL)).listen("127.0.0.1:0", {EDGE_PROTOCOL: echo})
        connecting = make(options(HEAD)).connect(Endpoint((listener.address,)), CONTROL_PROTOCOL)
        assert CONTROL_PROTOCOL in (await fails(connecting, "unknown-protocol")).message

    async def test_candidates_are_tried_in_order(self, make: Factory) -> None:
        listener = await make(options(TAIL)).listen("127.0.0.1:0", {EDGE_PROTOCOL: echo})
        other = await make(options(NodeId("stage-2"))).listen("127.0.0.1:0", {EDGE_PROTOCOL: echo})
        free = unused_port()
        endpoint = Endpoint((f"127.0.0.1:{free}", other.address, listener.address))
        stream = await make(options(HEAD)).connect(endpoint, EDGE_PROTOCOL, expect=TAIL)
        assert stream.peer.node == TAIL

    async def test_nobody_there(self, make: Factory) -> None:
        first, second = unused_port(), unused_port()
        endpoint = Endpoint((f"127.0.0.1:{first}", f"127.0.0.1:{second}"))
        error = await fails(make(options(HEAD)).connect(endpoint, EDGE_PROTOCOL, expect=TAIL), "unreachable")
        assert str(first) in error.message
        assert str(second) in error.message
        assert "nobody listens there" in error.message
        assert TAIL in error.message
        assert error.hint

    async def test_an_endpoint_without_addresses(self, make: Factory) -> None:
        await fails(make(options(HEAD)).connect(Endpoint(()), EDGE_PROTOCOL), "unreachable")

    async def test_a_port_in_use(self, make: Factory) -> None:
        listener = await make(options(TAIL)).listen("127.0.0.1:0", {EDGE_PROTOCOL: echo})
        error = await fails(make(options(HEAD)).listen(listener.address, {EDGE_PROTOCOL: echo}), "address-in-use")
        assert listener.address in error.message
        assert error.hint

    async def test_an_address_that_is_none(self, make: Factory) -> None:
        for bind in ["", "127.0.0.1", "127.0.0.1:", ":80", "host:port", "127.0.0.1:99999", "::1:80"]:
            await fails(make(options(TAIL)).listen(bind, {EDGE_PROTOCOL: echo}), "bind")

    async def test_a_closed_listener_frees_its_port_and_ends_its_streams(self, make: Factory) -> None:
        transport, dialler = make(options(TAIL)), make(options(HEAD))
        ended: list[str] = []

        async def handler(stream: MessageStream) -> None:
            try:
                await echo(stream)
            finally:
                ended.append(stream.peer.node)

        listener = await transport.listen("127.0.0.1:0", {EDGE_PROTOCOL: handler})
        endpoint = Endpoint((listener.address,))
        stream = await dialler.connect(endpoint, EDGE_PROTOCOL)
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        await listener.close()
        await listener.close()
        assert ended == [HEAD]
        with pytest.raises(TransportError):
            await stream.receive()
        await fails(dialler.connect(endpoint, EDGE_PROTOCOL), "unreachable")
        again = await transport.listen(listener.address, {EDGE_PROTOCOL: echo})
        assert again.address == listener.address

    async def test_a_listener_closes_on_a_handler_that_does_not_end(self, make: Factory) -> None:
        entered, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(stream: MessageStream) -> None:
            entered.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        listener = await make(options(TAIL)).listen("127.0.0.1:0", {EDGE_PROTOCOL: handler})
        await make(options(HEAD)).connect(Endpoint((listener.address,)), EDGE_PROTOCOL)
        await entered.wait()
        begun = asyncio.get_running_loop().time()
        await listener.close(grace_s=0.2)
        assert cancelled.is_set()
        assert asyncio.get_running_loop().time() - begun < 4.0

    async def test_a_handler_may_close_its_own_listener(self, make: Factory) -> None:
        listeners: list[Listener] = []
        done = asyncio.Event()

        async def handler(stream: MessageStream) -> None:
            await stream.receive()
            await listeners[0].close(grace_s=0.2)
            done.set()

        listeners.append(await make(options(TAIL)).listen("127.0.0.1:0", {EDGE_PROTOCOL: handler}))
        stream = await make(options(HEAD)).connect(Endpoint((listeners[0].address,)), EDGE_PROTOCOL)
        await stream.send(b"shut down")
        async with asyncio.timeout(60):
            await done.wait()
            with pytest.raises(TransportError):
                await stream.receive()

    async def test_a_dialler_that_greets_and_falls_silent_is_dropped(self, make: Factory) -> None:
        """A peer that never ends its handshake reaches no handler and holds nothing for longer than the deadline."""
        reached: list[MessageStream] = []

        async def handler(stream: MessageStream) -> None:
            reached.append(stream)

        given = replace(options(TAIL), connect_timeout_s=0.3)
        listener = await make(given).listen("127.0.0.1:0", {EDGE_PROTOCOL: handler})
        raw = await self.dial_without_handshake(make(options(HEAD)), options(HEAD), listener.address)
        if raw is None:
            pytest.skip("the transport offers no way to dial without its handshake")
        await raw.send(b"anything")
        async with asyncio.timeout(60):
            with pytest.raises(TransportError):
                await raw.receive()
        await raw.close()
        assert not reached

    async def test_a_cancelled_connect_leaves_nothing(self, make: Factory) -> None:
        """The fixture asserts that no task is left; here nobody answers, so that connecting takes its whole time."""
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(0)
            dialler = make(options(HEAD))
            attempt = asyncio.create_task(
                dialler.connect(Endpoint((f"127.0.0.1:{deaf.getsockname()[1]}",)), EDGE_PROTOCOL)
            )
            await asyncio.sleep(0.1)
            attempt.cancel()
            with pytest.raises((asyncio.CancelledError, TransportError)):
                await attempt


def unused_port() -> int:
    """A port of loopback on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
