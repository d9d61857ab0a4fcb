"""The transport ``tcp``: each stream is one TCP connection of its own (:mod:`myelin.transport.tcp_stream`).

The dialler's first frame names the protocol; an acceptor that doesn't serve it says so and hangs up. Then comes the
handshake, as everywhere.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Mapping
from weakref import WeakSet

from myelin.errors import TransportError
from myelin.transport.accepting import close_server
from myelin.transport.acceptor import Acceptor
from myelin.transport.addresses import explain_bind_failure, format_address, parse_address
from myelin.transport.contract import Endpoint, StreamHandler, TransportOptions
from myelin.transport.dialling import UNREACHABLE, dial
from myelin.transport.frames import UNSERVED_FRAME, open_frame, read_open
from myelin.transport.tcp_stream import TcpStream
from myelin.values import NodeId

BACKLOG = 128


class TcpListener:
    """A bound socket whose connections are streams."""

    def __init__(self, options: TransportOptions, acceptor: Acceptor) -> None:
        self._options = options
        self._acceptor = acceptor
        self._server: asyncio.Server | None = None
        self._address = ""
        self._strangers: dict[TcpStream, asyncio.TimerHandle] = {}
        """Connections that have not said yet what they are for, or were refused, and when they are dropped for it."""

    async def bind(self, address: str) -> None:
        """Begin to listen.

        Raises:
            TransportError: The address is in use or not ours.
        """
        host, port = parse_address(address)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, target = found[0]
            first = str(target[0])  # one address alone, also of a name that has several: port 0 would differ for each
            # Begun in a step of its own: cancelled in the middle of both, asyncio would leave the socket open.
            self._server = await loop.create_server(
                self._stranger, first, port, family=family, backlog=BACKLOG, start_serving=False
            )
            await self._begin(self._server)
        except OSError:
            raise await asyncio.to_thread(explain_bind_failure, address) from None
        self._address = format_address(host, self._server.sockets[0].getsockname()[1])

    @staticmethod
    async def _begin(server: asyncio.Server) -> None:
        try:
            await server.start_serving()
        except BaseException:
            server.close()
            raise

    @property
    def address(self) -> str:
        """See :class:`~myelin.transport.contract.Listener`."""
        return self._address

    async def close(self, grace_s: float = 1.0) -> None:
        """See :class:`~myelin.transport.contract.Listener`."""
        assert self._server is not None
        await close_server(self._server)
        for stream in list(self._strangers):
            self._forget(stream)
            await stream.abort("the listener was closed")
        await self._acceptor.close(grace_s)
        await asyncio.sleep(0)  # event loops free the socket in their next turn

    def _stranger(self) -> TcpStream:
        """Somebody has connected."""
        stream = TcpStream(self._options, on_open=self._open, on_gone=self._forget)
        wait = self._options.connect_timeout_s
        self._strangers[stream] = asyncio.get_running_loop().call_later(wait, self._give_up, stream)
        return stream

    def _open(self, stream: TcpStream, body: bytes) -> None:
        """It has said what for.

        Raises:
            WireError: In words that aren't ours.
        """
        protocol = read_open(body)
        if self._acceptor.knows(protocol):
            self._forget(stream)
            stream.protocol = protocol
            self._acceptor.start(stream, protocol)
        else:
            stream.refuse(UNSERVED_FRAME)

    def _give_up(self, stream: TcpStream) -> None:
        stream.drop("it said nothing within the deadline")

    def _forget(self, stream: TcpStream) -> None:
        timer = self._strangers.pop(stream, None)
        if timer is not None:
            timer.cancel()


class TcpTransport:
    """The transport ``tcp``."""

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._listeners: list[TcpListener] = []
        self._streams: WeakSet[TcpStream] = WeakSet()

    async def listen(self, bind: str, accept: Mapping[str, StreamHandler]) -> TcpListener:
        """See :class:`~myelin.transport.contract.Transport`."""
        listener = TcpListener(self._options, Acceptor(self._options, accept))
        await listener.bind(bind)
        self._listeners.append(listener)
        return listener

    async def connect(self, endpoint: Endpoint, protocol: str, *, expect: NodeId | None = None) -> TcpStream:
        """See :class:`~myelin.transport.contract.Transport`."""

        async def open_stream(address: str) -> TcpStream:
            return await dial_address(self._options, address, protocol)

        stream = await dial(endpoint, protocol, self._options, expect, open_stream)
        self._streams.add(stream)
        return stream

    async def close(self) -> None:
        """See :class:`~myelin.transport.contract.Transport`; its listeners are closed, too."""
        await asyncio.gather(*(stream.close() for stream in list(self._streams)))
        await asyncio.gather(*(listener.close() for listener in self._listeners))


async def dial_address(options: TransportOptions, address: str, protocol: str) -> TcpStream:
    """A connection to ``address`` on which the protocol was named, and nothing else said.

    Raises:
        TransportError: Nobody answers there (reason ``unreachable``).
    """
    host, port = parse_address(address)
    loop = asyncio.get_running_loop()
    greeting = open_frame(protocol)
    try:
        _, stream = await loop.create_connection(lambda: TcpStream(options, protocol), host, port)
    except OSError as error:
        raise TransportError(_explain(error), reason=UNREACHABLE) from None
    stream.say(greeting)
    return stream


_EXPLANATIONS = {
    errno.ECONNREFUSED: "nobody listens there",
    errno.EHOSTUNREACH: "there is no route to it",
    errno.ENETUNREACH: "its network can't be reached",
    errno.ETIMEDOUT: "it doesn't answer",
    errno.ECONNRESET: "its connection was reset",
}


def _explain(error: OSError) -> str:
    """Why nobody could be reached, in a few words."""
    if isinstance(error, socket.gaierror):
        return "its name can't be resolved"
    if error.errno in _EXPLANATIONS:
        return _EXPLANATIONS[error.errno]
    # Several addresses of one name failed: the event loop joins their texts.
    text = " ".join(str(error).split())
    if "Connection refused" in text or f"[Errno {errno.ECONNREFUSED}]" in text:
        return _EXPLANATIONS[errno.ECONNREFUSED]
    return text[:200]
