"""A server that closes while somebody connects leaves no half of a connection."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from typing import Any

import pytest
from pydantic import SecretStr

from myelin.transport.accepting import close_server
from myelin.transport.contract import EDGE_PROTOCOL, MessageStream, PeerIdentity, TransportOptions
from myelin.transport.tcp import TcpTransport
from myelin.values import Attempt, NodeId, RunId


class Greeter(asyncio.Protocol):
    """Knows whether the loop has told it of its connection."""

    def __init__(self) -> None:
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


@pytest.mark.parametrize("turns", range(6))
async def test_whoever_was_accepted_is_there_once_the_server_is_closed(turns: int) -> None:
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    loop.set_debug(True)  # or nothing is told of a connection that could not be made
    loop.slow_callback_duration = 60.0
    greeters: list[Greeter] = []

    def greeter() -> Greeter:
        greeters.append(Greeter())
        return greeters[-1]

    server = await loop.create_server(greeter, "127.0.0.1", 0)
    with warnings.catch_warnings(record=True) as warned, socket.socket() as client:
        warnings.simplefilter("always")
        client.connect(server.sockets[0].getsockname())
        for _ in range(turns):
            await asyncio.sleep(0)
        await close_server(server)
        transports = [each.transport for each in greeters]
        assert None not in transports
        assert turns < 3 or len(transports) == 1  # or it came too late to be accepted
        for transport in transports:
            transport.abort()  # type: ignore[union-attr]  # none of them is None, as was seen
        await asyncio.sleep(0)
        gc.collect()
    assert [each.message for each in warned] == []
    assert complaints == []
    await close_server(server)


@pytest.mark.parametrize("turns", range(7))
async def test_a_tcp_listener_that_closes_leaves_no_half_of_a_connection(turns: int) -> None:
    peer = PeerIdentity(RunId("run-1"), NodeId("stage-0"), Attempt(1))
    transport = TcpTransport(TransportOptions(peer, SecretStr("secret")))

    async def keep(stream: MessageStream) -> None:
        await asyncio.sleep(60)

    listener = await transport.listen("127.0.0.1:0", {EDGE_PROTOCOL: keep})
    host, _, port = listener.address.rpartition(":")
    with warnings.catch_warnings(record=True) as warned, socket.socket() as client:
        warnings.simplefilter("always")
        client.connect((host, int(port)))
        for _ in range(turns):
            await asyncio.sleep(0)
        await listener.close()
        await asyncio.sleep(0)
        gc.collect()
    await transport.close()
    assert [str(each.message) for each in warned] == []
