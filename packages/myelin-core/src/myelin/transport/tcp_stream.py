"""One stream over TCP: whole messages in the frames of :mod:`myelin.transport.frames`.

*A good end that can be told from a bad one.* Each side ends with a CLOSE frame. Whoever reads one knows that everything
before it has come, and answers with its own; an end of the connection without it is a loss.

*Noticing a peer that is only stopped.* Each side says ALIVE every half keepalive, unless something else is under way. A
peer that says nothing at all for :data:`SILENCE` times the keepalive is gone. Nobody is asked and nobody answers: one
that doesn't read (it is behind, and holds the sender by that) still counts as alive. It is the event loop that says it,
so a process in which one call holds the interpreter for that long is gone, too.

*Reading ahead.* Frames are taken in as they come, into a short queue; when it is full, reading stops and TCP holds the
sender.

*Fewer steps for a token.* :meth:`TcpStream.post` writes from any thread; :meth:`TcpStream.deliver_to` hands messages
over in the very call in which the event loop has read them, where :meth:`~TcpStream.receive` needs a task to be woken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

from myelin.errors import TransportError, WireError
from myelin.transport.contract import Buffer, PeerIdentity, TransportOptions
from myelin.transport.dialling import unknown_protocol
from myelin.transport.direct import DirectWriter
from myelin.transport.frames import (
    ALIVE_FRAME,
    CLOSE_FRAME,
    FrameKind,
    FrameReader,
    header,
)
from myelin.transport.handshake import MAX_HANDSHAKE_BYTES
from myelin.transport.stream import checked_size, closed_by_peer, closed_here, fresh, lost

READ_AHEAD_MESSAGES = 16
READ_AHEAD_BYTES = 4 * 1024 * 1024
"""A stream's queue is full with either; a single message may be larger."""
WRITE_AHEAD_BYTES = 1024 * 1024
"""A sender waits while more than this has not left."""
LINGER_S = 5.0
"""How long :meth:`TcpStream.close` waits for the peer to take what was sent."""
SILENCE = 2.5
"""A peer that says nothing for this many times the keepalive, and at most half of one more, is gone."""


class TcpStream(asyncio.BufferedProtocol):
    """One end of a stream, and the event loop's protocol of its connection.

    Args:
        options: Ours.
        protocol: What the stream is for; empty where the dialler is yet to say.
        on_open: The acceptor's: given the body of the dialler's first frame.
        on_gone: Told when the connection is over.
    """

    def __init__(
        self,
        options: TransportOptions,
        protocol: str = "",
        *,
        on_open: Callable[[TcpStream, bytes], None] | None = None,
        on_gone: Callable[[TcpStream], None] | None = None,
    ) -> None:
        self.protocol = protocol
        self._options = options
        self._on_open = on_open
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._peer: PeerIdentity | None = None
        self._transport: asyncio.Transport | None = None
        self._writer: DirectWriter | None = None
        limit = max(options.max_message_bytes, MAX_HANDSHAKE_BYTES)
        self._frames = FrameReader(limit, hold=MAX_HANDSHAKE_BYTES)
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._receiver: asyncio.Future[None] | None = None
        self._deliver: Callable[[bytes], None] | None = None
        self._reading = True
        self._full = False
        self._drained: list[asyncio.Future[None]] = []
        self._end: TransportError | None = None
        """Why nothing can be sent any more; for receiving it counts once the queue is empty."""
        self._input_ended = asyncio.Event()
        self._gone = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._close_said = False
        self._heard = self._loop.time()
        self._doubt = False
        self._beat: asyncio.TimerHandle | None = None

    # The contract.

    @property
    def peer(self) -> PeerIdentity:
        """See :class:`~myelin.transport.contract.MessageStream`."""
        assert self._peer is not None, "streams are handed out after their handshake"
        return self._peer

    def identify(self, peer: PeerIdentity) -> None:
        """See :class:`~myelin.transport.stream.OpenStream`."""
        self._peer = peer
        self._frames.hold = self._frames.limit
        self._take_frames()
        self._read_on()

    async def send(self, message: Buffer) -> None:
        """See :class:`~myelin.transport.contract.MessageStream`; a send that is cancelled has sent nothing."""
        if self._end:
            raise fresh(self._end)
        checked_size(message, self._options.max_message_bytes)
        while self._full and self._end is None:
            room: asyncio.Future[None] = self._loop.create_future()
            self._drained.append(room)
            await room
        if self._end:
            raise fresh(self._end)
        self._write(message if isinstance(message, bytes) else bytes(message))

    def post(self, message: bytes) -> None:
        """See :class:`~myelin.transport.contract.DirectStream`."""
        checked_size(message, self._options.max_message_bytes)
        if self._end is None:
            self._write(message)

    async def receive(self) -> bytes:
        """See :class:`~myelin.transport.contract.MessageStream`; a cancelled receive has lost nothing."""
        while not self._queue:
            if self._end:
                raise fresh(self._end)
            if self._receiver is not None:
                raise RuntimeError("two tasks receive from one stream")
            self._receiver = self._loop.create_future()
            try:
                await self._receiver
            finally:
                self._receiver = None
        message = self._queue.popleft()
        self._queued_bytes -= len(message)
        if not self._reading:
            self._read_on()
        return message

    async def deliver_to(self, on_message: Callable[[bytes], None]) -> None:
        """See :class:`~myelin.transport.contract.DirectStream`."""
        if self._receiver is not None:
            raise RuntimeError("two tasks receive from one stream")
        ended: asyncio.Future[None] = self._loop.create_future()

        def deliver(message: bytes) -> None:
            try:
                on_message(message)
            except Exception as error:
                self._deliver = None
                if not ended.done():
                    ended.set_exception(error)

        self._receiver, self._deliver = ended, deliver
        try:
            while self._queue and self._deliver is not None:
                message = self._queue.popleft()
                self._queued_bytes -= len(message)
                deliver(message)
            self._read_on()
            if self._end is None or ended.done():
                await ended
            assert self._end is not None
            raise fresh(self._end)
        finally:
            self._receiver = self._deliver = None

    async def close(self) -> None:
        """See :class:`~myelin.transport.contract.MessageStream`.

        Returns once the peer has taken everything, at the latest after :data:`LINGER_S`; then what is left is dropped.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close stream")
        await asyncio.shield(self._closing)

    async def abort(self, why: str) -> None:
        """See :class:`~myelin.transport.stream.OpenStream`; of a stream that has ended, nothing."""
        self.drop(why)
        if self._transport is not None:
            await self._gone.wait()

    # Before and after what the contract knows.

    def say(self, frame: bytes) -> None:
        """Write a frame that is no message."""
        if self._writer is not None:
            self._writer.write(frame, b"")

    def refuse(self, frame: bytes) -> None:
        """Say ``frame`` as the last thing; the peer hangs up. Until it does, what it says is dropped."""
        self._finish(closed_here())
        self.say(frame)

    def drop(self, why: str) -> None:
        """:meth:`abort`, without waiting for the connection to be gone."""
        self._finish(lost(self._peer, why))
        self._input_ended.set()
        if self._transport is not None and not self._gone.is_set():
            self._transport.abort()

    # What the event loop tells of the connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone
        self._transport = transport
        if self._end is not None:  # the listener was closed meanwhile
            transport.abort()
            return
        transport.set_write_buffer_limits(high=WRITE_AHEAD_BYTES)
        self._writer = DirectWriter(transport)
        self._heard = self._loop.time()
        self._beat = self._loop.call_later(self._options.keepalive_s / 2, self._tick)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where what comes next is to be written."""
        return self._frames.room()

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        self._heard = self._loop.time()
        self._doubt = False
        self._frames.wrote(nbytes)
        self._take_frames()

    def eof_received(self) -> None:
        """The peer sends nothing more; the connection is closed by whoever has called this."""
        self._finish(lost(self._peer, "it ended without closing"))
        self._input_ended.set()

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._full = True

    def resume_writing(self) -> None:
        """It has room again."""
        self._full = False
        self._wake_senders()

    def connection_lost(self, error: Exception | None) -> None:
        """It is over, in whatever way."""
        self._finish(lost(self._peer, _explain(error)))
        if self._beat is not None:
            self._beat.cancel()
        if self._writer is not None:
            self._writer.close()
        self._input_ended.set()
        self._gone.set()
        if self._on_gone is not None:
            self._on_gone(self)

    # Receiving.

    def _take_frames(self) -> None:
        """Everything that has come whole."""
        try:
            while (frame := self._frames.next()) is not None:
                kind, body = frame
                if kind is FrameKind.MESSAGE:
                    self._take(body)
                elif kind is not FrameKind.ALIVE:
                    self._take_special(kind, body)
        except TransportError as error:
            self.drop(error.message)
            return
        if self._is_full() or self._frames.held:
            self._pause_reading()

    def _take(self, message: bytes) -> None:
        if self._on_open is not None:
            raise WireError("it began with a message")
        if self._end is not None:
            return  # nobody will receive it, but its sender must get on
        if len(message) > self._options.max_message_bytes and self._peer is not None:
            raise WireError(f"a message of {len(message)} bytes came, above the limit")
        if self._deliver is not None:
            self._deliver(message)
            return
        self._queue.append(message)
        self._queued_bytes += len(message)
        self._wake()

    def _take_special(self, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.CLOSE:
            self._finish(closed_by_peer(self._peer))
            self._say_close()
            self._input_ended.set()
            if self._closing is None:
                self._hang_up()
        elif kind is FrameKind.OPEN and self._on_open is not None:
            on_open, self._on_open = self._on_open, None
            on_open(self, body)
        elif kind is FrameKind.UNSERVED and self._peer is None:
            self._finish(unknown_protocol(self.protocol))
            self._hang_up()
        else:
            raise WireError(f"it said {kind.name} where that has no meaning")

    def _is_full(self) -> bool:
        return bool(self._queue) and (self._queued_bytes >= READ_AHEAD_BYTES or len(self._queue) >= READ_AHEAD_MESSAGES)

    def _pause_reading(self) -> None:
        if self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if self._reading or self._is_full() or self._frames.held or self._transport is None:
            return
        self._reading = True
        self._heard = self._loop.time()  # what it said meanwhile is yet to be read
        if not self._transport.is_closing():
            self._transport.resume_reading()

    # Sending.

    def _write(self, message: bytes) -> None:
        assert self._writer is not None
        self._writer.write(header(FrameKind.MESSAGE, len(message)), message)

    def _say_close(self) -> None:
        if not self._close_said:
            self._close_said = True
            self.say(CLOSE_FRAME)

    # Ending.

    async def _close(self) -> None:
        self._finish(closed_here())
        self._end = closed_here()
        self._queue.clear()
        self._queued_bytes = 0
        if self._transport is None or self._gone.is_set():
            return
        self._say_close()
        self._frames.hold = self._frames.limit
        self._take_frames()
        self._read_on()
        try:
            async with asyncio.timeout(LINGER_S):
                await self._input_ended.wait()
                self._hang_up()
                await self._gone.wait()
        except TimeoutError:
            await self.abort("it did not take what was sent")

    def _hang_up(self) -> None:
        """Close the connection once what was written has left."""
        if self._writer is not None and self._transport is not None and not self._gone.is_set():
            self._writer.flush()
            self._transport.close()

    def _finish(self, end: TransportError) -> None:
        """Note why the stream has ended, unless it had before."""
        if self._end is None:
            self._end = end
        self._wake()
        self._wake_senders()

    def _wake(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    def _wake_senders(self) -> None:
        waiting, self._drained = self._drained, []
        for room in waiting:
            if not room.done():
                room.set_result(None)

    # Being alive, and noticing that the other side is not.

    def _tick(self) -> None:
        """Every half keepalive: say that we are well, and look whether the peer is.

        A limit that has passed once is looked at again a tick later: if it was this process that stood still, what the
        peer has said meanwhile is read in between.
        """
        keepalive = self._options.keepalive_s
        self._beat = self._loop.call_later(keepalive / 2, self._tick)
        assert self._writer is not None
        if self._writer.idle and not self._close_said:
            self.say(ALIVE_FRAME)
        if not self._reading or self._loop.time() - self._heard < (SILENCE - 0.5) * keepalive:
            self._doubt = False
        elif not self._doubt:
            self._doubt = True
        else:
            self.drop("it doesn't answer any more")


def _explain(error: Exception | None) -> str:
    """Why a connection ended, in a few words."""
    if isinstance(error, ConnectionResetError):
        return "its connection was reset"
    if isinstance(error, BrokenPipeError):
        return "its connection was closed"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "it ended without closing" if error is None else str(error)
