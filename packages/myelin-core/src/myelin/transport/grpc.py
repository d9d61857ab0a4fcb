"""The transport ``grpc``: each stream is one long-lived bidirectional call (:mod:`myelin.transport.grpc_stream`).

A protocol's name is the call's method (``/myelin/edge/1``), so an acceptor that doesn't serve it answers UNIMPLEMENTED
by itself. Each stream has a connection of its own: nothing waits behind another stream's large message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import grpc
import grpc.aio

from myelin.transport.acceptor import Acceptor
from myelin.transport.addresses import explain_bind_failure, format_address, parse_address
from myelin.transport.contract import Endpoint, StreamHandler, TransportOptions
from myelin.transport.dialling import dial
from myelin.transport.grpc_settings import server_arguments
from myelin.transport.grpc_stream import AcceptedStream, DialledStream
from myelin.values import NodeId


class GrpcListener:
    """A gRPC server whose only method is to accept streams."""

    def __init__(self, address: str, server: Any, acceptor: Acceptor) -> None:
        self._address = address
        self._server = server
        self._acceptor = acceptor

    @property
    def address(self) -> str:
        """See :class:`~myelin.transport.contract.Listener`."""
        return self._address

    async def close(self, grace_s: float = 1.0) -> None:
        """See :class:`~myelin.transport.contract.Listener`."""
        stopping = asyncio.create_task(self._server.stop(grace_s + 0.5))  # from now on nothing new is accepted
        await self._acceptor.close(grace_s)
        await stopping


class GrpcTransport:
    """The transport ``grpc``."""

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._listeners: list[GrpcListener] = []
        self._streams: WeakSet[DialledStream] = WeakSet()

    async def listen(self, bind: str, accept: Mapping[str, StreamHandler]) -> GrpcListener:
        """See :class:`~myelin.transport.contract.Transport`."""
        host, port = parse_address(bind)
        acceptor = Acceptor(self._options, accept)
        methods = _StreamMethods(self._options, acceptor)
        server = grpc.aio.server(handlers=[methods], options=server_arguments(self._options))
        try:
            port = server.add_insecure_port(format_address(host, port))
        except RuntimeError:  # gRPC's own text doesn't tell one reason from another
            raise await asyncio.to_thread(explain_bind_failure, bind) from None
        await server.start()
        listener = GrpcListener(format_address(host, port), server, acceptor)
        self._listeners.append(listener)
        return listener

    async def connect(self, endpoint: Endpoint, protocol: str, *, expect: NodeId | None = None) -> DialledStream:
        """See :class:`~myelin.transport.contract.Transport`."""

        async def open_stream(address: str) -> DialledStream:
            return DialledStream(self._options, address, protocol)

        stream = await dial(endpoint, protocol, self._options, expect, open_stream)
        self._streams.add(stream)
        return stream

    async def close(self) -> None:
        """See :class:`~myelin.transport.contract.Transport`; its listeners are closed, too."""
        await asyncio.gather(*(stream.close() for stream in self._streams))
        await asyncio.gather(*(listener.close() for listener in self._listeners))


class _StreamMethods(grpc.GenericRpcHandler):  # type: ignore[misc] # grpc has no types
    """Each protocol is a method; one that isn't served is unimplemented."""

    def __init__(self, options: TransportOptions, acceptor: Acceptor) -> None:
        self._options = options
        self._acceptor = acceptor

    def service(self, handler_call_details: Any) -> Any:
        protocol = handler_call_details.method.removeprefix("/")
        if not self._acceptor.knows(protocol):
            return None

        async def serve(_requests: object, context: Any) -> None:
            stream = AcceptedStream(self._options, protocol, context)
            self._acceptor.start(stream, protocol)
            await stream.last()

        return grpc.stream_stream_rpc_method_handler(serve)
