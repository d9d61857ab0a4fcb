"""A message stream in use: an outbox that never makes anybody wait, and a reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from myelin.errors import StreamClosed, TransportError
from myelin.transport.contract import MessageStream


class MessageLink:
    """Sends what is pushed, in order, and hands over what comes. The event loop owns it.

    Attributes:
        stream: The stream.
        ended: Set once :meth:`serve` is over.
    """

    def __init__(self, stream: MessageStream) -> None:
        self.stream = stream
        self.ended = asyncio.Event()
        self._outbox: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._closing = False

    def push(self, message: bytes) -> None:
        """Send it as soon as the stream takes it; dropped where the link is closing."""
        if not self._closing:
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
