"""Writing to one connection from any thread, in order, without waiting: where threads meet in a transport.

An event loop's transport may be written to on the loop's thread alone. For a token on its way that is the wrong thread:
its bytes are ready on the engine's, and handing them over costs two changes of thread. So a frame goes straight to the
socket (non-blocking ``send``, on a descriptor of our own for the same connection) while nothing else waits to be
written; what the socket doesn't take at once is left to the event loop, and everything after it queues up behind.

The rules that make this safe:

- One lock is held for every write, the loop's too. Nothing under it waits (the socket is non-blocking), and nothing
  under it takes another lock.
- Straight to the socket only where the backlog and the loop transport's own buffer are both empty. The buffer grows by
  writes under the lock alone, and shrinks only once its bytes have been sent: its emptiness can be relied on.
- The backlog is emptied on the loop's thread alone.
- An error of the socket is not handled here: the event loop meets the same one, and ends the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque

Piece = bytes | memoryview

JOIN_BYTES = 64 * 1024
"""Up to this size header and body are copied together, which is cheaper than a vector of two for the kernel."""


class DirectWriter:
    """The one writer of a connection. Made on the event loop's thread.

    Args:
        transport: The event loop's. Where it has no plain socket (TLS), everything goes the loop's way.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._transport = transport
        self._lock = threading.Lock()
        self._backlog: deque[Piece] = deque()
        self._closed = False
        self._socket: socket.socket | None = None
        known = transport.get_extra_info("socket")
        if known is not None and transport.get_extra_info("sslcontext") is None:
            self._socket = socket.fromfd(known.fileno(), known.family, known.type)
            self._socket.setblocking(False)

    def write(self, header: bytes, body: bytes) -> None:
        """Write both, one after the other, behind everything that was written before. From any thread; never waits.

        What can't be written any more, because the connection is gone, is dropped.
        """
        with self._lock:
            if self._closed:
                return
            left: tuple[Piece, ...] = (header, body)
            if self._socket is not None and not self._backlog and self._transport.get_write_buffer_size() == 0:
                left = _sent(self._socket, header, body)
                if not left:
                    return
            if threading.get_ident() == self._loop_thread:
                self._drain()
                for piece in left:
                    self._transport.write(piece)
                return
            waiting = bool(self._backlog)
            self._backlog.extend(left)
            if not waiting:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody will read it
                    self._loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        """Give the event loop's transport what threads have left. On the loop's thread."""
        with self._lock:
            self._drain()

    def close(self) -> None:
        """Write nothing more, and let go of the connection. On the loop's thread; twice is fine."""
        with self._lock:
            self._closed = True
            self._backlog.clear()
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written."""
        return not self._backlog and self._transport.get_write_buffer_size() == 0

    def _drain(self) -> None:
        while self._backlog:
            self._transport.write(self._backlog.popleft())


def _sent(connection: socket.socket, header: bytes, body: bytes) -> tuple[Piece, ...]:
    """Send what the socket takes at once; the rest of it."""
    try:
        if len(body) <= JOIN_BYTES:
            whole = header + body
            count = connection.send(whole)
            return () if count == len(whole) else (whole[count:],)
        count = connection.sendmsg((header, body))
    except OSError:  # full (BlockingIOError), or broken: either way the event loop has to see to it
        return (header, body)
    if count < len(header):
        return (header[count:], body)
    rest = memoryview(body)[count - len(header) :]
    return (rest,) if rest else ()
