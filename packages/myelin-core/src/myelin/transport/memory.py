"""Streams inside one process: for tests, for simulations, and for nodes that live in one event loop.

Listeners are found by their address in one table for the whole process. An address is ``memory:NAME`` or has the form
``host:port`` (port 0 takes a free number); nothing touches the network. All parties share one event loop. The handshake
is the same as everywhere, so a wrong secret fails here as it would between machines.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping
from weakref import WeakSet

from myelin.errors import TransportError
from myelin.transport.acceptor import Acceptor
from myelin.transport.addresses import address_in_use, parse_address
from myelin.transport.contract import Buffer, Endpoint, PeerIdentity, StreamHandler, TransportOptions
from myelin.transport.dialling import UNREACHABLE, dial, unknown_protocol
from myelin.transport.stream import checked_size, closed_by_peer, closed_here, fresh, lost
from myelin.values import NodeId

PIPE_BYTES = 4 * 1024 * 1024
PIPE_MESSAGES = 64
"""A sender waits while this much is under way; a single message may be larger."""

_listeners: dict[str, MemoryListener] = {}
_numbers = itertools.count(1)


class _Pipe:
    """One direction of a stream: a bounded queue with an end."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self.end: TransportError | None = None
        """Why nothing more goes in; what is inside still comes out."""

    async def put(self, message: bytes) -> None:
        while self._messages and (self._bytes + len(message) > PIPE_BYTES or len(self._messages) >= PIPE_MESSAGES):
            if self.end:
                raise fresh(self.end)
            await self._change()
        if self.end:
            raise fresh(self.end)
        self._messages.append(message)
        self._bytes += len(message)
        self._changed.set()

    async def get(self) -> bytes:
        while not self._messages:
            if self.end:
                raise fresh(self.end)
            await self._change()
        message = self._messages.popleft()
        self._bytes -= len(message)
        self._changed.set()
        return message

    def finish(self, end: TransportError, *, discard: bool = False) -> None:
        """Let nothing more in; with ``discard``, nothing more out either."""
        if discard:
            self._messages.clear()
            self._bytes = 0
        if self.end is None or discard:
            self.end = end
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class MemoryStream:
    """One end of a stream inside the process."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, options: TransportOptions) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._options = options
        self._peer: PeerIdentity | None = None
        self._end: TransportError | None = None

    @property
    def peer(self) -> PeerIdentity:
        """See :class:`~myelin.transport.contract.MessageStream`."""
        assert self._peer is not None, "streams are handed out after their handshake"
        return self._peer

    def identify(self, peer: PeerIdentity) -> None:
        """See :class:`~myelin.transport.stream.OpenStream`."""
        self._peer = peer

    async def send(self, message: Buffer) -> None:
        """See :class:`~myelin.transport.contract.MessageStream`; a cancelled send has sent nothing."""
        if self._end:
            raise fresh(self._end)
        checked_size(message, self._options.max_message_bytes)
        try:
            await self._outgoing.put(bytes(message))
        except TransportError as error:
            raise fresh(self._end or error) from None

    async def receive(self) -> bytes:
        """See :class:`~myelin.transport.contract.MessageStream`; a cancelled receive has lost nothing."""
        if self._end:
            raise fresh(self._end)
        try:
            message = await self._incoming.get()
        except TransportError as error:
            raise fresh(self._end or error) from None
        if len(message) > self._options.max_message_bytes:
            await self.abort(f"a message of {len(message)} bytes came, above the limit")
            raise fresh(self._end or closed_here())
        return message

    async def close(self) -> None:
        """See :class:`~myelin.transport.contract.MessageStream`."""
        self._finish(closed_here(), closed_by_peer(self._options.identity))

    async def abort(self, why: str) -> None:
        """See :class:`~myelin.transport.stream.OpenStream`; of a closed stream, nothing."""
        self._finish(lost(self._peer, why), lost(self._options.identity, why), discard=True)

    def _finish(self, ours: TransportError, theirs: TransportError, *, discard: bool = False) -> None:
        if self._end is None:
            self._end = ours
            self._outgoing.finish(theirs, discard=discard)
            self._incoming.finish(theirs, discard=True)


class MemoryListener:
    """A name in the table of this process."""

    def __init__(self, address: str, acceptor: Acceptor) -> None:
        self._address = address
        self._acceptor = acceptor

    @property
    def address(self) -> str:
        """See :class:`~myelin.transport.contract.Listener`."""
        return self._address

    async def close(self, grace_s: float = 1.0) -> None:
        """See :class:`~myelin.transport.contract.Listener`."""
        if _listeners.get(self._address) is self:
            del _listeners[self._address]
        await self._acceptor.close(grace_s)

    def open(self, protocol: str, options: TransportOptions) -> MemoryStream:
        """The dialler's end of a new stream, whose other end is served here.

        Raises:
            TransportError: Nobody serves this protocol here (reason ``unknown-protocol``).
        """
        if not self._acceptor.knows(protocol):
            raise unknown_protocol(protocol)
        there, here = _Pipe(), _Pipe()
        self._acceptor.start(MemoryStream(there, here, self._acceptor.options), protocol)
        return MemoryStream(here, there, options)


class MemoryTransport:
    """The transport ``memory``."""

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._listeners: list[MemoryListener] = []
        self._streams: WeakSet[MemoryStream] = WeakSet()

    async def listen(self, bind: str, accept: Mapping[str, StreamHandler]) -> MemoryListener:
        """See :class:`~myelin.transport.contract.Transport`."""
        address = _free_address(bind)
        if address in _listeners:
            raise address_in_use(address)
        listener = MemoryListener(address, Acceptor(self._options, accept))
        _listeners[address] = listener
        self._listeners.append(listener)
        return listener

    async def connect(self, endpoint: Endpoint, protocol: str, *, expect: NodeId | None = None) -> MemoryStream:
        """See :class:`~myelin.transport.contract.Transport`."""
        stream = await dial(endpoint, protocol, self._options, expect, lambda address: self._open(address, protocol))
        self._streams.add(stream)
        return stream

    async def close(self) -> None:
        """See :class:`~myelin.transport.contract.Transport`; its listeners are closed, too."""
        for stream in list(self._streams):
            await stream.close()
        for listener in self._listeners:
            await listener.close()

    async def _open(self, address: str, protocol: str) -> MemoryStream:
        listener = _listeners.get(address)
        if listener is None:
            raise TransportError("nobody listens there", reason=UNREACHABLE)
        return listener.open(protocol, self._options)


def _free_address(bind: str) -> str:
    """``bind``, with a free number in place of an empty name or port 0."""
    if bind == "memory:":
        return next(address for number in _numbers if (address := f"memory:{number}") not in _listeners)
    if bind.startswith("memory:"):
        return bind
    host, port = parse_address(bind)
    if port:
        return bind
    return next(address for number in _numbers if (address := f"{host}:{number}") not in _listeners)
