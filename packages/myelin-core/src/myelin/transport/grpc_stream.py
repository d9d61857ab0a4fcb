"""One stream over gRPC: a long-lived bidirectional call, whole messages as raw bytes.

Messages cross gRPC without a serialiser. Two things are added to what gRPC does:

*A good end that can be told from a bad one.* A gRPC server sees the same end of input whether its client has closed or
was killed. So an empty message is the mark of a good close: whoever reads it knows that everything before it has come,
and ends the call, which tells the closer that all was delivered. Without the mark an end is a loss. A real message that
is empty, or begins with :data:`ESCAPE`, is sent with one more :data:`ESCAPE` in front; records and control messages
never begin with that byte, so this costs nothing.

*Reading ahead.* Each stream has one task that reads into a short queue. It makes :meth:`~GrpcStream.receive` safe to
cancel (cancelling gRPC's own read ends the call), notices a close or a loss while nobody reads, and lets a peer finish
its writes after we have closed. When the queue is full it stops, and HTTP/2 flow control holds the sender.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import grpc
import grpc.aio

from myelin.errors import TransportError
from myelin.transport.addresses import format_address, parse_address
from myelin.transport.contract import Buffer, PeerIdentity, TransportOptions
from myelin.transport.grpc_settings import channel_arguments, failure
from myelin.transport.stream import checked_size, closed_by_peer, closed_here, fresh, lost

ESCAPE = 0xFF
CLOSE_MARK = b""
READ_AHEAD_MESSAGES = 16
READ_AHEAD_BYTES = 4 * 1024 * 1024
"""A stream's queue is full with either; a single message may be larger."""
LINGER_S = 5.0
"""How long :meth:`GrpcStream.close` waits for the peer to take what was sent."""

_ESCAPE_BYTES = bytes((ESCAPE,))


class GrpcStream(ABC):
    """One end of a stream; the two ends differ in how the call underneath is read, written and ended."""

    def __init__(self, options: TransportOptions, protocol: str) -> None:
        self._options = options
        self._protocol = protocol
        self._peer: PeerIdentity | None = None
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._writing = asyncio.Lock()
        self._end: TransportError | None = None
        """Why nothing can be sent any more; for receiving it counts once the queue is empty."""
        self._input_ended = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._reading = asyncio.create_task(self._read_ahead(), name=f"read ahead {protocol}")

    @property
    def peer(self) -> PeerIdentity:
        """See :class:`~myelin.transport.contract.MessageStream`."""
        assert self._peer is not None, "streams are handed out after their handshake"
        return self._peer

    def identify(self, peer: PeerIdentity) -> None:
        """See :class:`~myelin.transport.stream.OpenStream`."""
        self._peer = peer

    async def send(self, message: Buffer) -> None:
        """See :class:`~myelin.transport.contract.MessageStream`.

        A send that is cancelled while it waits breaks the stream: half of a message can't be taken back.
        """
        if self._end:
            raise fresh(self._end)
        size = checked_size(message, self._options.max_message_bytes)
        data = message if isinstance(message, bytes) else bytes(message)
        await self._send_raw(_ESCAPE_BYTES + data if size == 0 or data[0] == ESCAPE else data)

    async def receive(self) -> bytes:
        """See :class:`~myelin.transport.contract.MessageStream`; a cancelled receive has lost nothing."""
        while not self._queue:
            if self._end:
                raise fresh(self._end)
            if self._waiter is not None:
                raise RuntimeError("two tasks receive from one stream")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._queue.popleft()
        self._queued_bytes -= len(message)
        self._room.set()
        return message

    async def close(self) -> None:
        """See :class:`~myelin.transport.contract.MessageStream`.

        Returns once the peer has taken everything, at the latest after :data:`LINGER_S`; then what is left is dropped.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close stream")
        await asyncio.shield(self._closing)

    async def abort(self, why: str) -> None:
        """See :class:`~myelin.transport.stream.OpenStream`; of a stream that has ended, nothing."""
        self._finish(lost(self._peer, why))
        self._end_call(good=False)
        await self._stop_reading()
        if self._closing:
            await asyncio.wait([self._closing])

    @abstractmethod
    async def _read(self) -> bytes | None:
        """The next message of the call, or None at its end. Raises what gRPC raises."""

    @abstractmethod
    async def _write(self, message: bytes) -> None:
        """Write one message to the call. Raises what gRPC raises."""

    @abstractmethod
    async def _end_output(self) -> None:
        """Tell the call that we write nothing more."""

    @abstractmethod
    async def _acknowledge_close(self) -> None:
        """The peer has closed: let it know that all has come. Raises what gRPC raises."""

    @abstractmethod
    def _end_call(self, *, good: bool) -> None:
        """End the call, if it hasn't ended; not ``good`` breaks it off."""

    @abstractmethod
    async def _release(self) -> None:
        """Free what the stream holds beside its call."""

    async def _send_raw(self, data: bytes) -> None:
        async with self._writing:
            if self._end and data != CLOSE_MARK:
                raise fresh(self._end)
            try:
                await self._write(data)
            except asyncio.CancelledError:
                self._finish(lost(self._peer, "a send was cancelled"))
                self._end_call(good=False)
                if _cancelling():
                    raise
                raise fresh(self._end or closed_here()) from None  # the call was cancelled, not our task
            except Exception as error:  # gRPC raises errors of many types, some of them internal
                self._finish(failure(error, self._peer, self._protocol))
                raise fresh(self._end or closed_here()) from None

    async def _close(self) -> None:
        was_open = self._end is None
        self._end = closed_here()
        self._queue.clear()
        self._room.set()
        self._wake()
        try:
            async with asyncio.timeout(LINGER_S):
                if was_open:
                    await self._send_raw(CLOSE_MARK)
                    await self._end_output()
                await self._input_ended.wait()
        except (TransportError, TimeoutError):
            pass
        self._end_call(good=self._input_ended.is_set())
        await self._stop_reading()

    async def _stop_reading(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read_ahead(self) -> None:
        """Read until the call ends; see the module's text."""
        good = False
        try:
            while (message := await self._read()) is not None:
                if message == CLOSE_MARK:
                    good = True
                    self._finish(closed_by_peer(self._peer))
                    async with asyncio.timeout(LINGER_S):
                        await self._acknowledge_close()
                    break
                if self._closing:
                    continue  # nobody will receive it, but its sender must get on
                if message[0] == ESCAPE:
                    message = message[1:]
                if len(message) > self._options.max_message_bytes and self._peer is not None:
                    self._finish(lost(self._peer, f"a message of {len(message)} bytes came, above the limit"))
                    break
                self._queue.append(message)
                self._queued_bytes += len(message)
                if self._wake():
                    await asyncio.sleep(0)  # whoever waits for this goes first: it may have an answer to send
                while self._is_full():
                    self._room.clear()
                    await self._room.wait()
            else:
                good = self._closing is not None
                self._finish(lost(self._peer, "it ended without closing"))
        except asyncio.CancelledError:
            self._finish(lost(self._peer, "the call was cancelled"))
            if _cancelling():
                raise
        except Exception as error:  # gRPC raises errors of many types, some of them internal
            self._finish(failure(error, self._peer, self._protocol))
        finally:
            self._input_ended.set()
            self._end_call(good=good)
            await self._release()

    def _is_full(self) -> bool:
        return bool(self._queue) and (self._queued_bytes >= READ_AHEAD_BYTES or len(self._queue) >= READ_AHEAD_MESSAGES)

    def _finish(self, end: TransportError) -> None:
        """Note why the stream has ended, unless it had before."""
        if self._end is None:
            self._end = end
        self._wake()

    def _wake(self) -> bool:
        """Let a receiver that waits look again; whether there was one."""
        if self._waiter is None or self._waiter.done():
            return False
        self._waiter.set_result(None)
        return True


class DialledStream(GrpcStream):
    """The dialler's end: a call of its own channel."""

    def __init__(self, options: TransportOptions, address: str, protocol: str) -> None:
        target = format_address(*parse_address(address))
        self._channel = grpc.aio.insecure_channel(target, options=channel_arguments(options))
        self._call = self._channel.stream_stream(f"/{protocol}", None, None)()
        super().__init__(options, protocol)

    async def _read(self) -> bytes | None:
        message: bytes | object = await self._call.read()
        return message if isinstance(message, bytes) else None

    async def _write(self, message: bytes) -> None:
        await self._call.write(message)

    async def _end_output(self) -> None:
        await self._call.done_writing()

    async def _acknowledge_close(self) -> None:
        async with self._writing:
            await self._call.done_writing()
        await self._call.code()

    def _end_call(self, *, good: bool) -> None:
        if not good:
            self._call.cancel()

    async def _release(self) -> None:
        await self._channel.close()


class AcceptedStream(GrpcStream):
    """The acceptor's end: a call that lasts as long as :meth:`last` runs."""

    def __init__(self, options: TransportOptions, protocol: str, context: Any) -> None:
        self._context = context
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        super().__init__(options, protocol)

    async def last(self) -> None:
        """Return or raise when the call is to end; gRPC cancels it when the connection is lost."""
        try:
            good = await self._ended
        except asyncio.CancelledError:
            self._finish(lost(self._peer, "the connection was lost"))
            self._reading.cancel()
            raise
        if not good:
            await self._context.abort(grpc.StatusCode.ABORTED, "broken off by the acceptor")

    async def _read(self) -> bytes | None:
        message: bytes | object = await self._context.read()
        return message if isinstance(message, bytes) else None

    async def _write(self, message: bytes) -> None:
        await self._context.write(message)

    async def _end_output(self) -> None:
        """A server's output ends with its call only; the mark of the close has told the dialler."""

    async def _acknowledge_close(self) -> None:
        async with self._writing:  # let a write that is under way come to its end before the call does
            pass

    def _end_call(self, *, good: bool) -> None:
        if not self._ended.done():
            self._ended.set_result(good)

    async def _release(self) -> None:
        """All that it holds is the call's."""


def _cancelling() -> bool:
    """Whether the current task is being cancelled, as opposed to a call on which it waited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
