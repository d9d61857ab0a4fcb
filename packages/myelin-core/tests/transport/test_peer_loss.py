"""A peer that is killed, or only stopped, is noticed on both sides, whether or not anything is being sent."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from myelin.errors import StreamClosed, TransportError
from myelin.transport.contract import EDGE_PROTOCOL, Endpoint, MessageStream, PeerIdentity, Transport, TransportOptions
from myelin.transport.grpc import GrpcTransport
from myelin.transport.tcp import TcpTransport
from myelin.values import Attempt, NodeId, RunId

KEEPALIVE_S = 1.0
NOTICED_WITHIN_S = {signal.SIGKILL: 20.0, signal.SIGSTOP: 3 * KEEPALIVE_S + 20.0}
"""With room for a busy machine; with settings that don't work it takes a minute."""
TRANSPORTS: dict[str, Callable[[TransportOptions], Transport]] = {"grpc": GrpcTransport, "tcp": TcpTransport}
HELD_KEEPALIVES = {"grpc": 3.0, "tcp": 1.2}
"""For how long a peer's interpreter may be held: gRPC's own threads answer pings meanwhile, TCP's event loop can't."""
IDENTITY = PeerIdentity(RunId("run-1"), NodeId("this"), Attempt(1))
OPTIONS = TransportOptions(IDENTITY, SecretStr("a secret"), keepalive_s=KEEPALIVE_S)


@asynccontextmanager
async def other_process(name: str, *arguments: str) -> AsyncIterator[tuple[Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("loss_peer.py")), str(KEEPALIVE_S), name, *arguments, stdout=PIPE
    )
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await process.stdout.read()  # to its end, or the pipe outlives the event loop


@asynccontextmanager
async def stream_to_other_process(name: str, role: str) -> AsyncIterator[tuple[Process, MessageStream]]:
    """A stream on which this process is the ``dialler`` or the ``acceptor``."""
    transport = TRANSPORTS[name](OPTIONS)
    try:
        if role == "dialler":
            async with other_process(name, "listen") as (process, address):
                yield process, await transport.connect(Endpoint((address,)), EDGE_PROTOCOL)
            return
        arrived: asyncio.Future[MessageStream] = asyncio.get_running_loop().create_future()
        leave = asyncio.Event()

        async def handler(stream: MessageStream) -> None:
            arrived.set_result(stream)
            await leave.wait()

        listener = await transport.listen("127.0.0.1:0", {EDGE_PROTOCOL: handler})
        async with other_process(name, "dial", listener.address) as (process, _):
            yield process, await arrived
            leave.set()
    finally:
        await transport.close()


@pytest.mark.parametrize("traffic", ["idle", "busy"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["dialler", "acceptor"])
@pytest.mark.parametrize("name", TRANSPORTS)
async def test_a_lost_peer_is_noticed(name: str, role: str, end: signal.Signals, traffic: str) -> None:
    async with asyncio.timeout(120), stream_to_other_process(name, role) as (process, stream):
        await stream.send(b"there?")
        assert await stream.receive() == b"there?"

        async def send_on() -> None:
            while traffic == "busy":
                await stream.send(b"x" * 1000)
                await asyncio.sleep(0.01)

        async def receive_on() -> None:
            while True:
                await stream.receive()

        async def go_on() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(send_on())
                group.create_task(receive_on())

        begun = asyncio.get_running_loop().time()
        process.send_signal(end)
        with pytest.raises(ExceptionGroup) as caught:
            await go_on()
        seconds = asyncio.get_running_loop().time() - begun
        error = caught.value.exceptions[0]
        assert isinstance(error, TransportError)
        assert not isinstance(error, StreamClosed)
        assert error.reason == "stream-lost"
        assert "other" in error.message
        assert seconds < NOTICED_WITHIN_S[end]
        with pytest.raises(TransportError):
            await stream.send(b"still there?")


@pytest.mark.parametrize("role", ["dialler", "acceptor"])
@pytest.mark.parametrize("name", TRANSPORTS)
async def test_an_idle_peer_that_is_well_is_kept(name: str, role: str) -> None:
    """Keepalive pings alone, for many times the keepalive, do not make either side drop the other."""
    async with asyncio.timeout(120), stream_to_other_process(name, role) as (_, stream):
        await asyncio.sleep(4 * KEEPALIVE_S)
        await stream.send(b"there?")
        assert await stream.receive() == b"there?"


@pytest.mark.parametrize("role", ["dialler", "acceptor"])
@pytest.mark.parametrize("name", TRANSPORTS)
async def test_a_peer_that_computes_without_pause_is_kept(name: str, role: str) -> None:
    async with asyncio.timeout(120), stream_to_other_process(name, role) as (_, stream):
        begun = asyncio.get_running_loop().time()
        message = b"hold %g" % HELD_KEEPALIVES[name]
        await stream.send(message)
        assert await stream.receive() == message
        assert asyncio.get_running_loop().time() - begun >= HELD_KEEPALIVES[name] * KEEPALIVE_S
