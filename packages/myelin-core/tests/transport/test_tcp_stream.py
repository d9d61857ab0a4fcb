"""What the TCP transport's streams offer beyond the contract that all share, and what becomes of them under strain."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil
import pytest
from pydantic import SecretStr

from myelin.errors import StreamClosed, TransportError
from myelin.transport.contract import (
    EDGE_PROTOCOL,
    DirectStream,
    Endpoint,
    MessageStream,
    PeerIdentity,
    TransportOptions,
)
from myelin.transport.frames import FrameKind, header, open_frame
from myelin.transport.memory import MemoryTransport
from myelin.transport.tcp import TcpTransport
from myelin.transport.tcp_stream import TcpStream
from myelin.values import Attempt, NodeId, RunId

LOOPS = ["asyncio", "uvloop"] if importlib.util.find_spec("uvloop") else ["asyncio"]


def options(node: str, *, keepalive_s: float = 2.0, connect_timeout_s: float = 30.0) -> TransportOptions:
    identity = PeerIdentity(RunId("run-1"), NodeId(node), Attempt(1))
    return TransportOptions(
        identity, SecretStr("a secret"), connect_timeout_s=connect_timeout_s, keepalive_s=keepalive_s
    )


@asynccontextmanager
async def pair(keepalive_s: float = 2.0) -> AsyncIterator[tuple[TcpStream, TcpStream]]:
    """The dialler's end and the acceptor's."""
    arrived: asyncio.Future[MessageStream] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def handler(stream: MessageStream) -> None:
        arrived.set_result(stream)
        await leave.wait()

    acceptor = TcpTransport(options("stage-1", keepalive_s=keepalive_s))
    dialler = TcpTransport(options("stage-0", keepalive_s=keepalive_s))
    try:
        listener = await acceptor.listen("127.0.0.1:0", {EDGE_PROTOCOL: handler})
        async with asyncio.timeout(120):
            dialled = await dialler.connect(Endpoint((listener.address,)), EDGE_PROTOCOL)
            accepted = await arrived
            assert isinstance(accepted, TcpStream)
            yield dialled, accepted
    finally:
        leave.set()
        await dialler.close()
        await acceptor.close()


def on_loop(name: str, test: Callable[[], object]) -> None:
    if name == "uvloop":
        import uvloop

        uvloop.run(test())
    else:
        asyncio.run(test())


def test_tcp_streams_are_direct_and_others_need_not_be() -> None:
    assert issubclass(TcpStream, DirectStream)
    assert not issubclass(type(MemoryTransport), DirectStream)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("size", [3, 70_000, 600_000])
def test_what_threads_and_the_loop_write_arrives_whole_and_in_their_order(loop: str, size: int) -> None:
    """Three threads post while the loop sends: nothing is torn, and each writer's messages keep their order."""
    count = 60 if size > 100_000 else 300

    async def test() -> None:
        async with pair() as (writer, reader):

            def post_all(name: int) -> None:
                for number in range(count):
                    writer.post(bytes([name]) + number.to_bytes(2, "big") + bytes([name]) * (size - 3))

            threads = [threading.Thread(target=post_all, args=(name,)) for name in (1, 2, 3)]
            for thread in threads:
                thread.start()

            async def send_all() -> None:
                for number in range(count):
                    await writer.send(bytes([4]) + number.to_bytes(2, "big") + bytes([4]) * (size - 3))

            sending = asyncio.create_task(send_all())
            seen: dict[int, int] = {1: 0, 2: 0, 3: 0, 4: 0}
            for _ in range(4 * count):
                message = await reader.receive()
                name, number = message[0], int.from_bytes(message[1:3], "big")
                assert len(message) == size
                assert message[3:] == bytes([name]) * (size - 3)
                assert number == seen[name]
                seen[name] += 1
            await sending
            for thread in threads:
                thread.join()

    on_loop(loop, test)


async def test_close_delivers_what_was_posted_before() -> None:
    async with pair() as (writer, reader):
        large = b"x" * 3_000_000  # more than the kernel takes at once

        def post_all() -> None:
            for _ in range(3):
                writer.post(large)
            writer.post(b"last")

        await asyncio.to_thread(post_all)
        receiving = asyncio.create_task(_all_of(reader))
        await writer.close()
        assert await receiving == [large, large, large, b"last"]


async def _all_of(reader: TcpStream) -> list[bytes]:
    received = []
    try:
        while True:
            received.append(await reader.receive())
    except StreamClosed:
        return received


async def test_what_is_posted_on_an_ended_stream_is_dropped() -> None:
    async with pair() as (one, other):
        await other.close()
        with pytest.raises(StreamClosed):
            await one.receive()
        one.post(b"too late")
        await one.close()
        one.post(b"much too late")


async def test_a_posted_message_above_the_limit_is_refused() -> None:
    async with pair() as (one, other):
        with pytest.raises(TransportError) as caught:
            one.post(bytes((64 << 20) + 1))
        assert caught.value.reason == "message-too-large"
        one.post(b"still there")
        assert await other.receive() == b"still there"


async def test_messages_are_delivered_in_order_with_those_that_waited() -> None:
    async with pair() as (writer, reader):
        got: list[bytes] = []
        for number in range(5):
            writer.post(b"%d" % number)
        await asyncio.sleep(0.1)  # now they wait in the queue
        delivering = asyncio.create_task(reader.deliver_to(got.append))
        await asyncio.sleep(0.05)
        for number in range(5, 300):
            writer.post(b"%d" % number)
        await writer.close()
        with pytest.raises(StreamClosed):
            await delivering
        assert got == [b"%d" % number for number in range(300)]


async def test_a_cancelled_delivery_has_lost_nothing() -> None:
    async with pair() as (writer, reader):
        got: list[bytes] = []
        for turn in range(20):
            delivering = asyncio.create_task(reader.deliver_to(got.append))
            writer.post(b"%d" % (2 * turn))
            await asyncio.sleep(0.002 * (turn % 3))
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)
            writer.post(b"%d" % (2 * turn + 1))
            while len(got) < 2 * turn + 2:
                got.append(await reader.receive())
        assert got == [b"%d" % number for number in range(40)]


async def test_an_error_of_the_one_delivered_to_ends_the_delivery() -> None:
    async with pair() as (writer, reader):
        got: list[bytes] = []

        def take(message: bytes) -> None:
            if message == b"bad":
                raise ValueError("what is this?")
            got.append(message)

        for message in (b"good", b"bad", b"next"):
            writer.post(message)
        with pytest.raises(ValueError, match="what is this"):
            await reader.deliver_to(take)
        assert got == [b"good"]
        assert await reader.receive() == b"next"


async def test_a_lost_stream_ends_the_delivery() -> None:
    async with pair() as (writer, reader):
        delivering = asyncio.create_task(reader.deliver_to(lambda _: None))
        await asyncio.sleep(0.05)
        await writer.abort("a test")
        with pytest.raises(TransportError) as caught:
            await delivering
        assert caught.value.reason == "stream-lost"


async def test_two_cannot_receive_at_once() -> None:
    async with pair() as (_, reader):
        waiting = asyncio.create_task(reader.receive())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError):
            await reader.deliver_to(lambda _: None)
        waiting.cancel()


async def test_a_side_that_does_not_read_is_alive() -> None:
    """Held back for many times the keepalive, neither side drops the other, and nothing is lost."""
    async with pair(keepalive_s=0.1) as (writer, reader):
        message = b"x" * 1_000_000

        async def flood() -> None:
            for _ in range(30):
                await writer.send(message)

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(1.5)
        assert not flooding.done()
        for _ in range(30):
            assert await reader.receive() == message
        await flooding


async def test_a_process_that_stood_still_does_not_blame_its_peers() -> None:
    """Woken after a long stop, it reads what they have said meanwhile before it judges."""
    async with pair(keepalive_s=0.1) as (one, other):
        for _ in range(3):
            time.sleep(0.6)  # noqa: ASYNC251 # standing still is what is tested
            await asyncio.sleep(0.02)
        await one.send(b"there?")
        assert await other.receive() == b"there?"


async def test_nothing_large_is_taken_before_the_handshake() -> None:
    acceptor = TcpTransport(options("stage-1", connect_timeout_s=1.0))
    try:
        listener = await acceptor.listen("127.0.0.1:0", {EDGE_PROTOCOL: lambda stream: asyncio.sleep(0)})
        host, port = listener.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(open_frame(EDGE_PROTOCOL) + header(FrameKind.MESSAGE, 60 << 20))
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                writer.write(b"x" * 1_000_000)
                sent += 1_000_000
                await writer.drain()

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(flood(), 60)  # the deadline of the handshake ends it
        assert sent < 40_000_000
        assert reader.at_eof() or reader.exception()
        writer.close()
    finally:
        await acceptor.close()


async def test_who_says_nothing_is_dropped() -> None:
    acceptor = TcpTransport(options("stage-1", connect_timeout_s=1.0))
    try:
        listener = await acceptor.listen("127.0.0.1:0", {EDGE_PROTOCOL: lambda stream: asyncio.sleep(0)})
        host, port = listener.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(60):
            try:
                while await reader.read(1000):  # it says ALIVE until the deadline
                    pass
            except ConnectionResetError:
                pass
        writer.close()
    finally:
        await acceptor.close()


async def test_a_message_in_place_of_the_greeting_ends_the_connection() -> None:
    acceptor = TcpTransport(options("stage-1", connect_timeout_s=120.0))
    try:
        listener = await acceptor.listen("127.0.0.1:0", {EDGE_PROTOCOL: lambda stream: asyncio.sleep(0)})
        host, port = listener.address.split(":")
        for words in (header(FrameKind.MESSAGE, 2) + b"hi", header(FrameKind.OPEN, 4) + b"what"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(words)
            async with asyncio.timeout(60):
                try:
                    assert await reader.read(1000) == b""
                except ConnectionResetError:
                    pass
            writer.close()
    finally:
        await acceptor.close()


async def test_a_listen_that_is_cancelled_at_any_moment_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolved(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)  # in no thread, so that turns count
    before = psutil.Process().num_fds()
    for turns in range(8):
        transport = TcpTransport(options("stage-0"))
        task = asyncio.create_task(transport.listen("127.0.0.1:0", {}))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await transport.close()
    assert psutil.Process().num_fds() <= before
