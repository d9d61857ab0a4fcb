"""What every transport promises: the testkit's suite over TCP, on both event loops."""

from __future__ import annotations

import asyncio

import pytest

from myelin.transport.contract import EDGE_PROTOCOL, MessageStream, Transport, TransportOptions
from myelin.transport.tcp import TcpTransport, dial_address
from myelin_testkit.transport_compliance import TransportCompliance


class TestTcpTransport(TransportCompliance):
    def make_transport(self, options: TransportOptions) -> Transport:
        return TcpTransport(options)

    async def dial_without_handshake(
        self, transport: Transport, options: TransportOptions, address: str
    ) -> MessageStream | None:
        return await dial_address(options, address, EDGE_PROTOCOL)


class TestTcpTransportOnUvloop(TestTcpTransport):
    @pytest.fixture(scope="class")
    def event_loop_policy(self) -> asyncio.AbstractEventLoopPolicy:
        uvloop = pytest.importorskip("uvloop")
        policy: asyncio.AbstractEventLoopPolicy = uvloop.EventLoopPolicy()
        return policy

    async def test_it_runs_there(self) -> None:
        assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
