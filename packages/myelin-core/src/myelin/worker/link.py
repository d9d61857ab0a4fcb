"""A message stream in use: an outbox that never makes anybody wait, and a reader.

Where the stream is a :class:`~myelin.transport.contract.DirectStream`, there is no outbox: what is pushed is posted,
from whichever thread, and what comes is handed over in the call that has read it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from myelin.errors import StreamClosed, TransportError
from myelin.transport.contract import DirectStream, MessageStream


class MessageLink:
    """Sends what is pushed, in order, and hands over what comes. The event loop owns it.

    Attributes:
        stream: The stream.
        direct: Whether :meth:`push` may be called from any thread.
        ended: Set once :meth:`serve` is over.
    """

    def __init__(self, stream: MessageStream) -> None:
        self.stream = stream
        self._direct = stream if isinstance(stream, DirectStream) else None
        self.direct = self._direct is not None
        self.ended = asyncio.Event()
        self._outbox: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._closing = False

    def push(self, message: bytes) -> None:
        """Send it as soon as the stream takes it; dropped where the link is closing.

        On the event loop's thread; where the link is :attr:`direct`, on any.

        Raises:
            TransportError: It is too large, and the link is direct; otherwise :meth:`serve` raises it.
        """
        if self._closing:
            return
        if self._direct is not None:
            self._direct.post(message)
        else:
            self._outbox.append(message)
            self._wake.set()

    def close(self) -> None:
        """Send what was pushed, then close the stream and end :meth:`serve`. Twice is fine."""
        self._closing = True
        self._wake.set()

    async def serve(self, on_message: Callable[[bytes], None]) -> None:
        """Send what is pushed and hand what comes to ``on_message``; returns when either side has closed in good order.

        Raises:
            TransportError: The stream broke.
            Exception: What ``on_message`` raised.
        """
        tasks = (asyncio.create_task(self._send()), asyncio.create_task(self._receive(on_message)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed_here, self._closing = self._closing, True
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self.ended.set()
        for result in results:
            if isinstance(result, StreamClosed) or (closed_here and isinstance(result, TransportError)):
                continue
            if isinstance(result, Exception):
                raise result

    async def _send(self) -> None:
        outbox, wake, stream = self._outbox, self._wake, self.stream
        while True:
            while outbox:
                await stream.send(outbox.popleft())
            if self._closing:
                await stream.close()
                return
            wake.clear()
            await wake.wait()

    async def _receive(self, on_message: Callable[[bytes], None]) -> None:
        if self._direct is not None:
            await self._direct.deliver_to(on_message)
        receive = self.stream.receive
        while True:
            on_message(await receive())


async def close_quietly(stream: MessageStream, timeout_s: float = 1.0) -> None:
    """Close a stream that may be broken, and wait no longer than that for it."""
    try:
        async with asyncio.timeout(timeout_s):
            await stream.close()
    except (TransportError, TimeoutError):
        pass
