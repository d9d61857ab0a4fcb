"""What every telemetry sink must do, as a test class: subclass :class:`TelemetryCompliance` in a test module.

::

    class TestMySink(TelemetryCompliance):
        def exporters(self, service: str) -> Sequence[SpanExporter | TelemetrySink] | None:
            return myelin_telemetry(TelemetryContext(service, ""))

A sink is at the edge of what matters: whatever becomes of it, a run goes on. So nothing it does after it was made may
raise, and nothing of it may be left when it was shut down.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, StatusCode

from myelin.plugin import Signal, TelemetrySink


def finished_spans(*names: str, service: str = "myelin-worker") -> Sequence[ReadableSpan]:
    """Spans as Myelin makes them: attributes of every type, an event, an error."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("myelin_testkit")
    with tracer.start_as_current_span("outer"):
        for name in names:
            with tracer.start_as_current_span(name) as span:
                span.set_attributes(
                    {"text": "λ ünïcode", "number": 2**40, "part": 0.5, "yes": True, "list": ["a", "b"]}
                )
                span.add_event("progress", {"bytes": 7})
                span.set_status(Status(StatusCode.ERROR, "lost"))
    provider.shutdown()
    return [span for span in kept.get_finished_spans() if span.name in names]


def otlp_request(signal: Signal, *names: str, service: str = "myelin-worker") -> Any:
    """An OTLP request whose spans, metrics or log lines have these names."""
    if signal is Signal.TRACES:
        return encode_spans(finished_spans(*names, service=service))
    now = time.time_ns()
    request: Any
    if signal is Signal.METRICS:
        request = ExportMetricsServiceRequest()
        part = request.resource_metrics.add()
        for name in names:
            metric = part.scope_metrics.add().metrics.add(name=name, unit="s")
            metric.gauge.data_points.add(time_unix_nano=now, as_double=0.5)
    else:
        request = ExportLogsServiceRequest()
        part = request.resource_logs.add()
        for name in names:
            record = part.scope_logs.add().log_records.add(time_unix_nano=now, severity_text="INFO")
            record.body.string_value = name
    part.resource.attributes.add(key="service.name").value.string_value = service
    return request


def record_names(request: Any) -> set[str]:
    """The names of a request's spans and metrics, and the texts of its log lines."""
    found = {span.name for part in getattr(request, "resource_spans", ()) for s in part.scope_spans for span in s.spans}
    for part in getattr(request, "resource_metrics", ()):
        found |= {metric.name for scope in part.scope_metrics for metric in scope.metrics}
    for part in getattr(request, "resource_logs", ()):
        found |= {record.body.string_value for scope in part.scope_logs for record in scope.log_records}
    return found


def _export(sink: SpanExporter | TelemetrySink, signal: Signal, *names: str) -> bool:
    if isinstance(sink, TelemetrySink):
        return sink.export(signal, otlp_request(signal, *names))
    return sink.export(finished_spans(*names)) is SpanExportResult.SUCCESS


def _end(sink: SpanExporter | TelemetrySink) -> None:
    if isinstance(sink, TelemetrySink):
        sink.hurry()
        sink.close()
    else:
        sink.force_flush()
        sink.shutdown()


def _signals(sink: SpanExporter | TelemetrySink) -> list[Signal]:
    return sorted(sink.signals) if isinstance(sink, TelemetrySink) else [Signal.TRACES]


class TelemetryCompliance(ABC):
    """Subclass it as ``Test…`` and say how the sinks are made."""

    @abstractmethod
    def exporters(self, service: str) -> Sequence[SpanExporter | TelemetrySink] | None:
        """What the plugin's hook answers, configured so that it exports."""

    @abstractmethod
    def unconfigured(self) -> Sequence[SpanExporter | TelemetrySink] | None:
        """What the plugin's hook answers where nobody has asked for it."""

    def arrived(self) -> Collection[str] | None:
        """The names of the spans and metrics, and the texts of the log lines, that have come out at the other end; None
        where a test can't see that."""
        return None

    @pytest.fixture
    def sink(self) -> Iterator[Sequence[SpanExporter | TelemetrySink]]:
        """The sinks of one process, shut down at the end."""
        sinks = self.exporters("myelin-worker")
        assert sinks, "a plugin that is configured has a sink"
        yield sinks
        for sink in sinks:
            _end(sink)

    def test_unless_asked_for_it_exports_nothing(self) -> None:
        assert not self.unconfigured()

    def test_it_takes_a_signal_at_least(self, sink: Sequence[SpanExporter | TelemetrySink]) -> None:
        for each in sink:
            assert set(_signals(each)) <= set(Signal)
            assert _signals(each)

    def test_all_signals_that_it_takes_arrive(self, sink: Sequence[SpanExporter | TelemetrySink]) -> None:
        sent: set[str] = set()
        for each in sink:
            for signal in _signals(each):
                batches = ((f"line-first_{signal}", f"line-second_{signal}"), (f"line-third_{signal}",))
                for batch in batches:
                    assert _export(each, signal, *batch)
                    sent |= set(batch)
            _end(each)
        arrived = self.arrived()
        if arrived is None:
            pytest.skip("what has arrived can't be seen")
        assert set(arrived) >= sent

    def test_an_empty_batch_is_fine(self, sink: Sequence[SpanExporter | TelemetrySink]) -> None:
        for each in sink:
            for signal in _signals(each):
                assert _export(each, signal) in (True, False)

    def test_it_leaves_a_request_as_it_was(self, sink: Sequence[SpanExporter | TelemetrySink]) -> None:
        """Other sinks are given the same one."""
        for each in sink:
            if isinstance(each, TelemetrySink):
                for signal in _signals(each):
                    request = otlp_request(signal, "shared")
                    before = request.SerializeToString(deterministic=True)
                    each.export(signal, request)
                    assert request.SerializeToString(deterministic=True) == before

    def test_it_may_be_used_from_any_thread(self, sink: Sequence[SpanExporter | TelemetrySink]) -> None:
        results: list[object] = []

        def export(number: int) -> None:
            for each in sink:
                try:
                    results.append(_export(each, _signals(each)[-1], f"line-{number}"))
                except Exception as error:
                    results.append(error)

        threads = [threading.Thread(target=export, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * (4 * len(sink))
        arrived = self.arrived()
        assert arrived is None or set(arrived) >= {f"line-{number}" for number in range(4)}

    def test_after_its_end_it_fails_without_raising(self, sink: Sequence[SpanExporter | TelemetrySink]) -> None:
        for each in sink:
            _end(each)
            _end(each)
            assert not _export(each, _signals(each)[0], "line-late")
        assert "line-late" not in (self.arrived() or ())

    def test_a_check_answers_and_does_not_raise(self, sink: Sequence[SpanExporter | TelemetrySink]) -> None:
        for each in sink:
            if isinstance(each, TelemetrySink):
                signal = _signals(each)[0]
                found = each.check(signal, otlp_request(signal, "line-check"), 5.0)
                assert found.sent
                assert found.observed
                _end(each)
                assert not each.check(signal, otlp_request(signal, "line-check"), 0.2).observed

    def test_no_thread_is_left(self) -> None:
        before = set(threading.enumerate())
        for sink in self.exporters("myelin-worker") or ():
            _export(sink, _signals(sink)[0], "one")
            _end(sink)
        left = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
        assert not left, "a sink that was shut down must not keep a process alive"
