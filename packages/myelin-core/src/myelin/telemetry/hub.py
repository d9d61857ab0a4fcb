"""The place in the orchestrator where all telemetry meets: its own and every node's come in, each sink gets its copy.

Nothing that calls it ever waits. What comes in is put into a bounded queue; one thread takes it out, reads it, moves a
node's times to our clock, takes secrets out, and hands it to the sinks' queues; each sink has a thread of its own, so
that a slow one holds up nobody. Whatever finds a queue full, and whatever a sink doesn't take, is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from myelin.errors import WireError
from myelin.telemetry.clock import shift_times
from myelin.telemetry.redaction import Redactor
from myelin.telemetry.signals import Signal, count_records, parse_request
from myelin.telemetry.sink import SinkCheck, TelemetrySink

if TYPE_CHECKING:
    from myelin.telemetry.signals import OtlpRequest

_log = logging.getLogger(__name__)
INTAKE_ITEMS = 1024
INTAKE_BYTES = 64 << 20
LANE_RECORDS = 16_384
CLOSE_SECONDS = 1.5
"""How long the last requests may take to leave: an unreachable collector would otherwise hold the exit."""
TICK_SECONDS = 0.25

Subscriber = Callable[[Signal, "OtlpRequest"], object]


@dataclass(frozen=True, slots=True)
class Losses:
    """Records that were dropped: where (``intake``, a node's name, or a sink's), of which signal, how many."""

    where: str
    signal: Signal
    count: int


@dataclass(frozen=True, slots=True)
class _Incoming:
    signal: Signal
    request: OtlpRequest | bytes
    offset_ns: int
    size: int


class _Lane:
    """One sink's queue and thread."""

    def __init__(self, sink: TelemetrySink, most_records: int) -> None:
        self.sink = sink
        self.dropped: Counter[Signal] = Counter()
        self._most = most_records
        self._queue: deque[tuple[Signal, OtlpRequest, int]] = deque()
        self._held = 0
        self._changed = threading.Condition()
        self._closing = False
        self._complained = False
        self._under_way: tuple[Signal, int] | None = None
        self.thread = threading.Thread(target=self._run, name=f"myelin-sink-{sink.name}", daemon=True)
        self.thread.start()

    def put(self, signal: Signal, request: OtlpRequest, records: int) -> None:
        with self._changed:
            if self._closing or (self._held and self._held + records > self._most):
                self.dropped[signal] += records
                return
            self._held += records
            self._queue.append((signal, request, records))
            self._changed.notify()

    def finish(self) -> None:
        """No more comes; the thread ends once the queue is empty."""
        self.sink.hurry()
        with self._changed:
            self._closing = True
            self._changed.notify()

    def give_up(self) -> None:
        """Time is up: what waits, and what is under way, is lost."""
        with self._changed:
            while self._queue:
                signal, _, records = self._queue.popleft()
                self.dropped[signal] += records
            if self._under_way is not None:
                signal, records = self._under_way
                self.dropped[signal] += records
                self._under_way = None

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    break
                signal, request, records = self._queue.popleft()
                self._under_way = (signal, records)
            try:
                taken = self.sink.export(signal, request)
            except Exception as error:
                taken = False
                self._complain(f"{type(error).__name__}: {error}")
            with self._changed:
                self._held -= records
                if not taken and self._under_way is not None:
                    self.dropped[signal] += records
                self._under_way = None
        self._close()

    def _close(self) -> None:
        try:
            self.sink.close()
        except Exception as error:
            self._complain(f"{type(error).__name__}: {error}")

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("the telemetry sink %s failed: %s", self.sink.name, why)


class TelemetryHub:
    """See the module's text. May be called from any thread.

    Args:
        sinks: Where it all goes; they are the hub's from now on, and closed with it.
        redactor: Takes secrets out.
        on_tick: Called in the hub's thread a few times a second (and with True at the end): for what is made there.
        keep: Asked in the hub's thread about each request that came in; True keeps it from the sinks.
    """

    def __init__(
        self,
        sinks: Sequence[TelemetrySink],
        redactor: Redactor | None = None,
        *,
        on_tick: Callable[[bool], object] = lambda last: None,
        keep: Callable[[Signal, OtlpRequest], bool] = lambda signal, request: False,
        lane_records: int = LANE_RECORDS,
    ) -> None:
        self.redactor = redactor or Redactor()
        self._on_tick = on_tick
        self._keep = keep
        self._lanes = [_Lane(sink, lane_records) for sink in sinks]
        self._subscribers: list[Subscriber] = []
        self._incoming: deque[_Incoming] = deque()
        self._held_bytes = 0
        self._dropped: Counter[tuple[str, Signal]] = Counter()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="myelin-telemetry", daemon=True)
        self._thread.start()

    @property
    def sinks(self) -> tuple[TelemetrySink, ...]:
        """Where it all goes."""
        return tuple(lane.sink for lane in self._lanes)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Have everything handed over as it passes, in the hub's thread; the call that is returned ends that."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber) if subscriber in self._subscribers else None

    def offer(self, signal: Signal, request: OtlpRequest | bytes, *, offset_ns: int = 0, size: int = 0) -> None:
        """Take a request, read or still in bytes. Never blocks.

        Args:
            offset_ns: How far the clock of whoever made it is ahead of ours.
            size: Its bytes, roughly; known where it is in bytes.
        """
        size = len(request) if isinstance(request, bytes) else size or 1024
        with self._changed:
            if self._closing or len(self._incoming) >= INTAKE_ITEMS or self._held_bytes + size > INTAKE_BYTES:
                self._dropped["intake", signal] += 1
                return
            self._held_bytes += size
            self._incoming.append(_Incoming(signal, request, offset_ns, size))
            self._changed.notify()

    def lost_elsewhere(self, where: str, signal: Signal, count: int) -> None:
        """Count what somebody else has dropped before it came here: a node, or the spans' queue."""
        if count > 0:
            with self._changed:
                self._dropped[where, signal] += count

    def losses(self) -> tuple[Losses, ...]:
        """All that was dropped up to now."""
        total = Counter(self._dropped)
        for lane in self._lanes:
            for signal, count in lane.dropped.items():
                total[lane.sink.name, signal] += count
        return tuple(Losses(where, signal, count) for (where, signal), count in sorted(total.items()) if count)

    def check(self, signal: Signal, request: OtlpRequest, timeout_s: float) -> list[SinkCheck]:
        """Preflight: a synthetic event to every sink that takes ``signal``, all at once. Blocks, up to
        ``timeout_s``."""
        return check_sinks([lane.sink for lane in self._lanes], signal, request, timeout_s)

    def close(self, timeout_s: float = CLOSE_SECONDS) -> bool:
        """Hand on what there is and end all sinks, within ``timeout_s``. Blocking; twice is fine.

        What hangs is left to daemon threads, which don't hold the process.

        Returns:
            Whether everything arrived in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify()
        for thread in (self._thread, *(lane.thread for lane in self._lanes)):
            thread.join(max(0.0, deadline - time.monotonic()))
        for lane in self._lanes:
            if lane.thread.is_alive():
                lane.give_up()
        return not any(lane.thread.is_alive() for lane in self._lanes)

    def _run(self) -> None:
        next_tick = time.monotonic() + TICK_SECONDS
        while True:
            with self._changed:
                if not self._incoming and not self._closing:
                    self._changed.wait(max(0.0, next_tick - time.monotonic()))
                batch = list(self._incoming)
                self._incoming.clear()
                self._held_bytes = 0
                closing = self._closing
            for incoming in batch:
                self._spread(incoming)
            if closing or time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                try:
                    self._on_tick(closing)
                except Exception as error:
                    _log.warning("telemetry could not be gathered: %s: %s", type(error).__name__, error)
            if closing:
                break
        for lane in self._lanes:
            lane.finish()

    def _spread(self, incoming: _Incoming) -> None:
        try:
            request = incoming.request
            if isinstance(request, bytes):
                request = parse_request(incoming.signal, request)
            shift_times(request, incoming.offset_ns)
            self.redactor.request(request)
            if self._keep(incoming.signal, request):
                return
        except WireError as error:
            self.lost_elsewhere("intake", incoming.signal, 1)
            _log.warning("telemetry of a node was dropped: %s", error.message)
            return
        self.spread(incoming.signal, request)

    def spread(self, signal: Signal, request: OtlpRequest) -> None:
        """Hand a finished request to whoever wants it. In the hub's thread."""
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(signal, request)
            except Exception as error:
                _log.warning("a subscriber of telemetry failed: %s: %s", type(error).__name__, error)
        wanting = [lane for lane in self._lanes if signal in lane.sink.signals]
        if wanting:
            records = count_records(request)
            for lane in wanting:
                lane.put(signal, request, records)


def check_sinks(
    sinks: Sequence[TelemetrySink], signal: Signal, request: OtlpRequest, timeout_s: float
) -> list[SinkCheck]:
    """Each sink's answer to a synthetic event, all asked at once; one that takes too long has not observed it."""
    answers: dict[int, SinkCheck] = {}

    def ask(index: int, sink: TelemetrySink) -> None:
        try:
            answers[index] = sink.check(signal, request, timeout_s)
        except Exception as error:
            answers[index] = SinkCheck(sink.name, None, False, False, f"{type(error).__name__}: {error}")

    asked = [(index, sink) for index, sink in enumerate(sinks) if signal in sink.signals]
    threads = [threading.Thread(target=ask, args=each, name="myelin-preflight", daemon=True) for each in asked]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"no answer within {timeout_s:g} s"
    return [answers.get(index, SinkCheck(sink.name, None, True, False, late)) for index, sink in asked]
