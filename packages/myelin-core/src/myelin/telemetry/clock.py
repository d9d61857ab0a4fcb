"""How far a node's clock is from ours, and times corrected by that. Pure.

Four timestamps of one exchange, as NTP has them (RFC 5905, section 8): we ask at ``t0`` and have the answer at ``t3``
by our clock; the node took the question at ``t1`` and answered at ``t2`` by its own. Then

    offset = ((t1 - t0) + (t2 - t3)) / 2        round trip = (t3 - t0) - (t2 - t1)

and the true offset is within half a round trip of that. Of several exchanges, the one with the shortest round trip
tells best. All are wall clocks (Unix nanoseconds): monotonic clocks of two machines have nothing to do with each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from myelin.telemetry.signals import records

if TYPE_CHECKING:
    from myelin.telemetry.signals import OtlpRequest

KEPT_SAMPLES = 32
MEMORY_NS = 120 * 1_000_000_000
"""Samples older than this no longer count: clocks drift, by up to some 50 µs in a second."""


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One exchange: when it ended by our clock, the node's clock minus ours, and the round trip, all in nanoseconds."""

    taken_ns: int
    offset_ns: int
    round_trip_ns: int


def sample(asked_ns: int, received_ns: int, answered_ns: int, returned_ns: int) -> ClockSample:
    """The sample of an exchange's four timestamps, in their order."""
    offset = ((received_ns - asked_ns) + (answered_ns - returned_ns)) // 2
    return ClockSample(returned_ns, offset, max(0, (returned_ns - asked_ns) - (answered_ns - received_ns)))


class ClockEstimate:
    """What is known of a node's clock."""

    def __init__(self) -> None:
        self._samples: deque[ClockSample] = deque(maxlen=KEPT_SAMPLES)

    def add(self, taken: ClockSample) -> None:
        """Learn from an exchange."""
        self._samples.append(taken)

    @property
    def best(self) -> ClockSample | None:
        """The sample that tells best; None before the first."""
        if not self._samples:
            return None
        since = self._samples[-1].taken_ns - MEMORY_NS
        recent = [each for each in self._samples if each.taken_ns >= since]
        return min(recent, key=lambda each: each.round_trip_ns)

    @property
    def offset_ns(self) -> int:
        """What to subtract from the node's times.

        An offset that is no larger than its own uncertainty is taken for none: on one machine there is none, and noise
        would move spans out of their parents.
        """
        best = self.best
        if best is None or abs(best.offset_ns) <= (best.round_trip_ns + 1) // 2:
            return 0
        return best.offset_ns


def shift_times(request: OtlpRequest, offset_ns: int) -> None:
    """Move every time in ``request`` from the node's clock to ours, in place."""
    if not offset_ns:
        return
    for record in records(request):
        _shift(record, offset_ns)


_TIMES = ("start_time_unix_nano", "end_time_unix_nano", "time_unix_nano", "observed_time_unix_nano")
_POINTS = ("gauge", "sum", "histogram", "exponential_histogram", "summary")


def _shift(record: object, offset_ns: int) -> None:
    for name in _TIMES:
        value = getattr(record, name, 0)
        if value:
            setattr(record, name, max(0, value - offset_ns))
    for event in getattr(record, "events", ()):
        _shift(event, offset_ns)
    for kind in _POINTS:
        for point in getattr(getattr(record, kind, None), "data_points", ()):
            _shift(point, offset_ns)
