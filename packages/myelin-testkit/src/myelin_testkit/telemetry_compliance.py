"""What every telemetry sink must do, as a test class: subclass :class:`TelemetryCompliance` in a test module.

::

    class TestMySink(TelemetryCompliance):
        def exporters(self, service: str) -> Sequence[SpanExporter] | None:
            return myelin_telemetry(TelemetryContext(service, ""))

A sink is at the edge of what matters: whatever becomes of it, a run goes on. So nothing it does after it was made may
raise, and nothing of it may be left when it was shut down.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, StatusCode


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


class TelemetryCompliance(ABC):
    """Subclass it as ``Test…`` and say how the exporters are made."""

    @abstractmethod
    def exporters(self, service: str) -> Sequence[SpanExporter] | None:
        """What the sink's hook answers, configured so that it exports."""

    @abstractmethod
    def unconfigured(self) -> Sequence[SpanExporter] | None:
        """What the sink's hook answers where nobody has asked for it."""

    def arrived(self) -> Collection[str] | None:
        """The names of the spans that have come out at the other end; None where a test can't see that."""
        return None

    @pytest.fixture
    def sink(self) -> Iterator[Sequence[SpanExporter]]:
        """The exporters of one process, shut down at the end."""
        exporters = self.exporters("myelin-worker")
        assert exporters, "a sink that is configured has an exporter"
        yield exporters
        for exporter in exporters:
            exporter.shutdown()

    def test_unless_asked_for_it_exports_nothing(self) -> None:
        assert not self.unconfigured()

    def test_spans_arrive(self, sink: Sequence[SpanExporter]) -> None:
        for exporter in sink:
            assert exporter.export(finished_spans("first", "second")) is SpanExportResult.SUCCESS
            assert exporter.export(finished_spans("third")) is SpanExportResult.SUCCESS
            exporter.force_flush()
            exporter.shutdown()
        arrived = self.arrived()
        if arrived is None:
            pytest.skip("what has arrived can't be seen")
        assert set(arrived) >= {"first", "second", "third"}

    def test_an_empty_batch_is_fine(self, sink: Sequence[SpanExporter]) -> None:
        for exporter in sink:
            assert exporter.export(()) in (SpanExportResult.SUCCESS, SpanExportResult.FAILURE)

    def test_it_may_be_used_from_any_thread(self, sink: Sequence[SpanExporter]) -> None:
        results: list[object] = []

        def export(number: int) -> None:
            for exporter in sink:
                try:
                    results.append(exporter.export(finished_spans(f"span-{number}")))
                except Exception as error:
                    results.append(error)

        threads = [threading.Thread(target=export, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [SpanExportResult.SUCCESS] * (4 * len(sink))
        arrived = self.arrived()
        assert arrived is None or set(arrived) >= {f"span-{number}" for number in range(4)}

    def test_after_its_end_it_fails_without_raising(self, sink: Sequence[SpanExporter]) -> None:
        for exporter in sink:
            exporter.shutdown()
            exporter.shutdown()
            assert exporter.export(finished_spans("late")) is SpanExportResult.FAILURE
        assert "late" not in (self.arrived() or ())

    def test_no_thread_is_left(self) -> None:
        before = set(threading.enumerate())
        for exporter in self.exporters("myelin-worker") or ():
            exporter.export(finished_spans("one"))
            exporter.shutdown()
        left = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
        assert not left, "a sink that was shut down must not keep a process alive"
