"""What both transports promise: the testkit's suite over gRPC and in memory."""

from __future__ import annotations

from myelin.transport.contract import EDGE_PROTOCOL, MessageStream, Transport, TransportOptions
from myelin.transport.grpc import GrpcTransport
from myelin.transport.grpc_stream import DialledStream
from myelin.transport.memory import MemoryTransport
from myelin_testkit.transport_compliance import TransportCompliance


class TestGrpcTransport(TransportCompliance):
    def make_transport(self, options: TransportOptions) -> Transport:
        return GrpcTransport(options)

    async def dial_without_handshake(
        self, transport: Transport, options: TransportOptions, address: str
    ) -> MessageStream | None:
        return DialledStream(options, address, EDGE_PROTOCOL)


class TestMemoryTransport(TransportCompliance):
    def make_transport(self, options: TransportOptions) -> Transport:
        return MemoryTransport(options)

    async def dial_without_handshake(
        self, transport: Transport, options: TransportOptions, address: str
    ) -> MessageStream | None:
        assert isinstance(transport, MemoryTransport)
        return await transport._open(address, EDGE_PROTOCOL)
