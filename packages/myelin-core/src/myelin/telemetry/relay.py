"""The relay: a node's telemetry over a stream of its own to the orchestrator, so that a node needs to reach nobody
else.

The stream (``myelin/telemetry/1``) is dialled by the orchestrator, as all are. Each message is one byte that says what
it is, and a body, little-endian::

    orchestrator to node
        c  asked u64                               what time is it with you? (Unix nanoseconds by our clock)
        g                                          go: clocks are compared, send what you have
        r  sequence u64, traceparent               a sequence was submitted, for a request of this span (or of none)
    node to orchestrator
        C  asked u64, received u64, answered u64   the answer to c, by the node's clock
        T M L  records u32, request                an OTLP request of traces, metrics or logs
        D  traces u32, metrics u32, logs u32       records that the node has dropped since it last said so
        E                                          the node is ending, and this was all

A node puts what it has into a bounded outbox, from any thread, without ever waiting; what finds it full is dropped and
counted. Nothing of this is sent before the clocks were compared, so that every time can be corrected.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from myelin.errors import StreamClosed, TransportError, WireError
from myelin.telemetry.clock import ClockEstimate, sample
from myelin.telemetry.signals import Signal

if TYPE_CHECKING:
    from myelin.telemetry.hub import TelemetryHub

OUTBOX_BYTES = 8 << 20
"""What a node holds back at most while nobody takes it."""
MOST_MESSAGE_BYTES = 16 << 20
FIRST_SAMPLES = 5
SAMPLE_EVERY_S = 10.0
MOST_TRACEPARENT = 128

_KINDS = {Signal.TRACES: b"T", Signal.METRICS: b"M", Signal.LOGS: b"L"}
_SIGNALS = {kind: signal for signal, kind in _KINDS.items()}
_ASK = struct.Struct("<Q")
_ANSWER = struct.Struct("<QQQ")
_COUNT = struct.Struct("<I")
_DROPS = struct.Struct("<III")


class Stream(Protocol):
    """What the relay needs of a transport's stream."""

    async def send(self, message: bytes) -> None: ...

    async def receive(self) -> bytes: ...

    async def close(self) -> None: ...


class Outbox:
    """What a node has to tell, bounded. :meth:`put` may be called from any thread and never waits."""

    def __init__(self, most_bytes: int = OUTBOX_BYTES) -> None:
        self._most = most_bytes
        self._messages: deque[tuple[Signal, bytes]] = deque()
        self._held = 0
        self._dropped: Counter[Signal] = Counter()
        self._lock = threading.Lock()
        self._wake: Callable[[], object] = lambda: None

    def on_more(self, wake: Callable[[], object]) -> None:
        """Have ``wake`` called whenever there is more."""
        self._wake = wake

    def put(self, signal: Signal, request: bytes, records: int) -> bool:
        """Take an OTLP request of so many records; False where it was dropped."""
        message = _KINDS[signal] + _COUNT.pack(records) + request
        with self._lock:
            if self._held + len(message) > self._most:
                self._dropped[signal] += records
                return False
            self._held += len(message)
            self._messages.append((signal, message))
        self._wake()
        return True

    def count_dropped(self, signal: Signal, records: int) -> None:
        """Count what was dropped before it came here."""
        if records > 0:
            with self._lock:
                self._dropped[signal] += records

    def take(self) -> bytes | None:
        """The next message; None where there is none."""
        with self._lock:
            if any(self._dropped.values()):
                counts = [min(self._dropped[signal], (1 << 32) - 1) for signal in Signal]
                self._dropped.clear()
                return b"D" + _DROPS.pack(*counts)
            if not self._messages:
                return None
            _, message = self._messages.popleft()
            self._held -= len(message)
            return message


class NodeRelay:
    """A node's end of the relay.

    Args:
        outbox: What is sent.
        on_submitted: Told of a sequence that was submitted, with its request's ``traceparent`` or an empty text.
        clock: Wall-clock nanoseconds.
    """

    def __init__(
        self,
        outbox: Outbox,
        on_submitted: Callable[[int, str], object] = lambda sequence, traceparent: None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._outbox = outbox
        self._on_submitted = on_submitted
        self._clock = clock
        self._current: Stream | None = None
        self._more = asyncio.Event()
        self._ending = False
        self._all_sent = asyncio.Event()
        self._answers: deque[bytes] = deque()

    async def serve(self, stream: Stream) -> None:
        """Serve a stream that the orchestrator opened, until it ends. A later one takes over.

        Raises:
            TransportError: It broke.
            WireError: The orchestrator said something that isn't due.
        """
        loop = asyncio.get_running_loop()
        self._current, gone = stream, asyncio.Event()
        self._outbox.on_more(lambda: _from_any_thread(loop, self._more.set))
        going = asyncio.Event()
        sender = asyncio.create_task(self._send(stream, going, gone))
        try:
            while True:
                self._take(await stream.receive(), going)
        except StreamClosed:
            return
        finally:
            gone.set()
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            if self._current is stream:
                self._current = None

    def _take(self, message: bytes, going: asyncio.Event) -> None:
        kind, body = message[:1], message[1:]
        if kind == b"c" and len(body) == _ASK.size:
            # Both times are taken here: sending waits behind what is under way, and would only blur them.
            now = self._clock()
            self._answers.append(b"C" + _ANSWER.pack(_ASK.unpack(body)[0], now, now))
        elif kind == b"g" and not body:
            going.set()
        elif kind == b"r" and _ASK.size <= len(body) <= _ASK.size + MOST_TRACEPARENT:
            self._on_submitted(_ASK.unpack_from(body)[0], body[_ASK.size :].decode("ascii", "replace"))
        else:
            raise WireError("the telemetry stream said something that isn't due")
        self._more.set()

    async def _send(self, stream: Stream, going: asyncio.Event, gone: asyncio.Event) -> None:
        try:
            while self._current is stream:
                self._more.clear()
                while self._answers:
                    await stream.send(self._answers.popleft())
                if going.is_set():
                    while self._current is stream and (message := self._outbox.take()) is not None:
                        await stream.send(message)
                        if self._answers:
                            break
                    else:
                        if self._ending:
                            await stream.send(b"E")
                            self._all_sent.set()
                            return
                    if self._answers:
                        continue
                await self._more.wait()
        except TransportError:
            return  # the receiver notices, too

    async def finish(self, timeout_s: float) -> bool:
        """Send what there is and say that it was all; whether that worked within ``timeout_s``."""
        self._ending = True
        if self._current is None:
            return False
        self._more.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_sent.wait()
        except TimeoutError:
            return False
        return True


class RelayClient:
    """The orchestrator's end of one node's relay. The event loop owns it.

    Args:
        stream: Just opened.
        hub: Where it all goes.
        where: The node's name, for the counters of what was dropped.
        clock: Wall-clock nanoseconds.

    Attributes:
        clock_estimate: What is known of the node's clock.
        ended: Set once the node has said that it was all, or the stream has ended.
        received: Records that came, by signal.
    """

    def __init__(self, stream: Stream, hub: TelemetryHub, where: str, clock: Callable[[], int] = time.time_ns) -> None:
        self.clock_estimate = ClockEstimate()
        self.ended = asyncio.Event()
        self.received: Counter[Signal] = Counter()
        self._stream = stream
        self._hub = hub
        self._where = where
        self._clock = clock
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(4096)
        self._asked = 0
        self._going = False

    async def serve(self) -> None:
        """Take what the node sends until the stream ends. Its end, however it comes, is nobody's loss but ours."""
        tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._ask_again())]
        self._ask()
        try:
            while True:
                self._take(await self._stream.receive())
        except (TransportError, WireError):
            return
        finally:
            self.ended.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def announce(self, sequence: int, traceparent: str) -> None:
        """Tell the node of a sequence, and of the span of its request where there is one. Never waits."""
        self._push(b"r" + _ASK.pack(sequence) + traceparent.encode())

    def _push(self, message: bytes) -> None:
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            pass  # a node that takes nothing gets no names for its spans

    def _ask(self) -> None:
        self._asked += 1
        self._push(b"c" + _ASK.pack(0))

    async def _ask_again(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            self._ask()

    async def _send(self) -> None:
        try:
            while True:
                message = await self._outbox.get()
                if message[:1] == b"c":  # the time of asking is the time of sending
                    message = b"c" + _ASK.pack(self._clock())
                await self._stream.send(message)
        except TransportError:
            return  # the receiver notices, too

    def _take(self, message: bytes) -> None:
        kind, body = message[:1], message[1:]
        if kind in _SIGNALS and _COUNT.size < len(body) <= MOST_MESSAGE_BYTES:
            signal = _SIGNALS[kind]
            self.received[signal] += _COUNT.unpack_from(body)[0]
            self._hub.offer(signal, body[_COUNT.size :], offset_ns=self.clock_estimate.offset_ns)
        elif kind == b"C" and len(body) == _ANSWER.size:
            asked, received, answered = _ANSWER.unpack(body)
            self.clock_estimate.add(sample(asked, received, answered, self._clock()))
            if self._asked < FIRST_SAMPLES:
                self._ask()
            elif not self._going:
                self._going = True
                self._push(b"g")
        elif kind == b"D" and len(body) == _DROPS.size:
            for signal, count in zip(Signal, _DROPS.unpack(body), strict=True):
                self._hub.lost_elsewhere(self._where, signal, count)
        elif kind == b"E" and not body:
            self.ended.set()
        else:
            raise WireError(f"{self._where} said something on its telemetry stream that isn't due")

    async def close(self) -> None:
        """Close the stream; one that is broken already is fine."""
        try:
            await self._stream.close()
        except TransportError:
            pass


def _from_any_thread(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        pass  # the loop has ended: nobody sends any more
