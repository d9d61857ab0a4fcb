"""The hub: nobody waits for a sink, what is lost is counted, and the end is bounded."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from myelin.telemetry.hub import TelemetryHub, check_sinks
from myelin.telemetry.redaction import Redactor
from myelin.telemetry.signals import Signal
from myelin.telemetry.sink import TelemetrySink
from myelin_testkit.telemetry_compliance import otlp_request, record_names


class Keeping(TelemetrySink):
    """Keeps names; may be slow, or fail."""

    name = "keeping"
    signals = frozenset(Signal)

    def __init__(self, *, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.names: list[str] = []
        self.closed = False
        self._seconds = seconds
        self._error = error

    def export(self, signal: Signal, request: Any) -> bool:
        time.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        self.names += sorted(record_names(request))
        return True

    def close(self) -> None:
        self.closed = True


class Hanging(Keeping):
    """Never comes back."""

    name = "hanging"

    def export(self, signal: Signal, request: Any) -> bool:
        threading.Event().wait(150)
        return False


def test_everything_reaches_every_sink_that_wants_it_in_order() -> None:
    all_of_it, traces = Keeping(), Keeping()
    traces.signals = frozenset({Signal.TRACES})
    hub = TelemetryHub([all_of_it, traces])
    for number in range(20):
        hub.offer(Signal.TRACES, otlp_request(Signal.TRACES, f"span-{number:02}").SerializeToString())
        hub.offer(Signal.LOGS, otlp_request(Signal.LOGS, f"line-{number:02}"))
    assert hub.close()
    assert traces.names == [f"span-{number:02}" for number in range(20)]
    assert [name for name in all_of_it.names if name.startswith("line")] == [f"line-{n:02}" for n in range(20)]
    assert all_of_it.closed
    assert traces.closed
    assert hub.losses() == ()


def test_a_sink_that_hangs_holds_up_nobody_and_what_it_missed_is_counted() -> None:
    quick, hanging = Keeping(), Hanging()
    hub = TelemetryHub([hanging, quick], lane_records=10)
    took = []
    for number in range(50):
        began = time.perf_counter()
        hub.offer(Signal.TRACES, otlp_request(Signal.TRACES, f"span-{number:02}"))
        took.append(time.perf_counter() - began)
        time.sleep(0.001)
    began = time.monotonic()
    assert not hub.close(2.0)
    assert time.monotonic() - began < 60.0
    assert max(took) < 30.0, "the sink hangs for minutes"
    assert len(quick.names) == 50
    (lost,) = hub.losses()
    assert (lost.where, lost.signal) == ("hanging", Signal.TRACES)
    assert lost.count == 50


def test_a_sink_that_raises_is_complained_of_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    hub = TelemetryHub([Keeping(error=ValueError("broken")), quick := Keeping()])
    for number in range(3):
        hub.offer(Signal.TRACES, otlp_request(Signal.TRACES, f"span-{number}"))
    assert hub.close()
    assert len(quick.names) == 3
    assert [(each.where, each.count) for each in hub.losses()] == [("keeping", 3)]
    assert len([record for record in caplog.records if "broken" in record.getMessage()]) == 1


def test_what_is_no_request_is_dropped_and_counted() -> None:
    hub = TelemetryHub([quick := Keeping()])
    hub.offer(Signal.TRACES, b"\xff\xff\xff")
    hub.offer(Signal.TRACES, otlp_request(Signal.TRACES, "good"))
    assert hub.close()
    assert quick.names == ["good"]
    assert [(each.where, each.count) for each in hub.losses()] == [("intake", 1)]


def test_times_are_moved_and_secrets_taken_out_once_for_all_sinks() -> None:
    seen: list[Any] = []
    hub = TelemetryHub([], Redactor(["open-sesame"]))
    stop = hub.subscribe(lambda signal, request: seen.append(request))
    request = otlp_request(Signal.LOGS, "the word is open-sesame")
    record = request.resource_logs[0].scope_logs[0].log_records[0]
    record.time_unix_nano = 10_000
    hub.offer(Signal.LOGS, request.SerializeToString(), offset_ns=4_000)
    deadline = time.monotonic() + 60
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
    stop()
    hub.offer(Signal.LOGS, otlp_request(Signal.LOGS, "later"))
    assert hub.close()
    (told,) = seen
    record = told.resource_logs[0].scope_logs[0].log_records[0]
    assert record.time_unix_nano == 6_000
    assert record.body.string_value == "the word is [redacted]"


def test_after_its_end_it_takes_nothing() -> None:
    hub = TelemetryHub([quick := Keeping()])
    assert hub.close()
    hub.offer(Signal.TRACES, otlp_request(Signal.TRACES, "late"))
    assert hub.close()
    assert quick.names == []
    assert [(each.where, each.count) for each in hub.losses()] == [("intake", 1)]


def test_a_preflight_asks_all_at_once_and_waits_for_none() -> None:
    began = time.monotonic()
    found = check_sinks(
        [Hanging(), Keeping(), Keeping(error=OSError("no route"))],
        Signal.TRACES,
        otlp_request(Signal.TRACES, "event"),
        2.0,
    )
    assert time.monotonic() - began < 60.0
    assert [(each.observed, each.sent) for each in found] == [(False, True), (True, True), (False, False)]
    assert "no route" in found[2].detail
