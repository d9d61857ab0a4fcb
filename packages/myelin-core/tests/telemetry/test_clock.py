"""The clock's arithmetic, against exchanges whose truth is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from myelin.telemetry.clock import ClockEstimate, ClockSample, sample, shift_times
from myelin.telemetry.signals import Signal
from myelin_testkit.telemetry_compliance import otlp_request

NOW = 1_800_000_000_000_000_000
delays = st.integers(0, 2_000_000_000)
offsets = st.integers(-(10**13), 10**13)


@given(offsets, delays, delays, delays)
def test_the_truth_is_within_half_a_round_trip(offset: int, there: int, thinking: int, back: int) -> None:
    received = NOW + there + offset
    taken = sample(NOW, received, received + thinking, NOW + there + thinking + back)
    assert taken.round_trip_ns == there + back
    assert abs(taken.offset_ns - offset) <= taken.round_trip_ns // 2 + 1


@given(offsets, st.lists(st.tuples(delays, delays), min_size=1, max_size=40))
def test_the_shortest_round_trip_of_those_that_are_kept_tells(offset: int, exchanges: list[tuple[int, int]]) -> None:
    estimate = ClockEstimate()
    taken = [sample(NOW, NOW + a + offset, NOW + a + offset, NOW + a + b) for a, b in exchanges]
    for each in taken:
        estimate.add(each)
    best = min(taken[-32:], key=lambda each: each.round_trip_ns)
    assert estimate.best == best or estimate.best.round_trip_ns == best.round_trip_ns
    assert abs(estimate.offset_ns - offset) <= best.round_trip_ns + 1


@given(delays, delays)
def test_on_one_machine_nothing_is_moved(there: int, back: int) -> None:
    estimate = ClockEstimate()
    estimate.add(sample(NOW, NOW + there, NOW + there, NOW + there + back))
    assert estimate.offset_ns == 0


def test_old_samples_no_longer_count() -> None:
    estimate = ClockEstimate()
    estimate.add(ClockSample(NOW, 10**9, 1_000))
    estimate.add(ClockSample(NOW + 200 * 10**9, 2 * 10**9, 5_000))
    assert estimate.offset_ns == 2 * 10**9


def test_every_time_in_a_request_is_moved() -> None:
    request = otlp_request(Signal.TRACES, "one")
    span = request.resource_spans[0].scope_spans[0].spans[0]
    before = (span.start_time_unix_nano, span.end_time_unix_nano, span.events[0].time_unix_nano)
    shift_times(request, 1_000)
    assert (span.start_time_unix_nano, span.end_time_unix_nano, span.events[0].time_unix_nano) == tuple(
        each - 1_000 for each in before
    )
    request = otlp_request(Signal.METRICS, "one")
    point = request.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points[0]
    point.time_unix_nano = 5_000
    shift_times(request, 1_000)
    assert (point.time_unix_nano, point.start_time_unix_nano) == (4_000, 0)
