"""Transports among strangers: peers that say nothing, and peers that speak something else."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from pydantic import SecretStr

from myelin.errors import TransportError
from myelin.transport.accepting import close_server
from myelin.transport.contract import (
    EDGE_PROTOCOL,
    Endpoint,
    Listener,
    MessageStream,
    PeerIdentity,
    Transport,
    TransportOptions,
)
from myelin.transport.grpc import GrpcTransport
from myelin.transport.tcp import TcpTransport
from myelin.values import Attempt, NodeId, RunId


def options(node: str, connect_timeout_s: float = 30.0) -> TransportOptions:
    identity = PeerIdentity(RunId("run-1"), NodeId(node), Attempt(1))
    return TransportOptions(identity, SecretStr("a secret"), connect_timeout_s=connect_timeout_s)


async def echo(stream: MessageStream) -> None:
    while True:
        await stream.send(await stream.receive())


@pytest.fixture(params=[GrpcTransport, TcpTransport], ids=["grpc", "tcp"])
def kind(request: pytest.FixtureRequest) -> Callable[[TransportOptions], Transport]:
    made: Callable[[TransportOptions], Transport] = request.param
    return made


@pytest.fixture
async def listener(kind: Callable[[TransportOptions], Transport]) -> AsyncIterator[Listener]:
    transport = kind(options("stage-0"))
    yield await transport.listen("127.0.0.1:0", {EDGE_PROTOCOL: echo})
    await transport.close()


@pytest.fixture
async def dialler(kind: Callable[[TransportOptions], Transport]) -> AsyncIterator[Transport]:
    transport = kind(options("orchestrator"))
    yield transport
    await transport.close()


@pytest.fixture
async def hurried(kind: Callable[[TransportOptions], Transport]) -> AsyncIterator[Transport]:
    """A dialler that gives a candidate no time worth mentioning."""
    transport = kind(options("orchestrator", 0.7))
    yield transport
    await transport.close()


async def test_a_silent_candidate_costs_its_deadline_and_the_next_is_tried(
    kind: Callable[[TransportOptions], Transport], hurried: Transport, listener: Listener
) -> None:
    dialler = kind(options("orchestrator", 3.0))  # which is time enough for the candidate that answers
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)
        silent = f"127.0.0.1:{deaf.getsockname()[1]}"
        begun = asyncio.get_running_loop().time()
        try:
            stream = await dialler.connect(Endpoint((silent, listener.address)), EDGE_PROTOCOL)
            assert 2.5 < asyncio.get_running_loop().time() - begun < 30.0
            await stream.send(b"there?")
            assert await stream.receive() == b"there?"
        finally:
            await dialler.close()
        with pytest.raises(TransportError, match=r"no answer within 0\.7 s") as caught:
            await hurried.connect(Endpoint((silent,)), EDGE_PROTOCOL)
        assert caught.value.reason == "unreachable"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"\x00" * 64, b""])
async def test_a_server_of_another_kind_is_unreachable(hurried: Transport, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        with pytest.raises(TransportError) as caught:
            await hurried.connect(Endpoint((address,)), EDGE_PROTOCOL)
    finally:
        await close_server(server)  # it may be just dialling again
        await server.wait_closed()
    assert caught.value.reason in ("unreachable", "stream-lost")
    assert address in caught.value.message
    assert "\n" not in caught.value.message


async def test_a_listener_survives_garbage(dialler: Transport, listener: Listener) -> None:
    host, port = listener.address.split(":")
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(4096),
        b"",
    ):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        writer.close()
    stream = await dialler.connect(Endpoint((listener.address,)), EDGE_PROTOCOL)
    await stream.send(b"there?")
    assert await stream.receive() == b"there?"


async def test_an_http_proxy_is_not_asked(
    dialler: Transport, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    stream = await dialler.connect(Endpoint((listener.address,)), EDGE_PROTOCOL)
    await stream.close()
