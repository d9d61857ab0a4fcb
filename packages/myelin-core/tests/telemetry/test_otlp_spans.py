"""Spans that crossed a process are, for an exporter, as they were."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags

from myelin.telemetry.otlp_spans import readable_spans
from myelin.telemetry.signals import Signal
from myelin.telemetry.sink import SpanExporterSink, as_sinks
from myelin.telemetry.tracing import configure_tracing, span
from myelin_testkit.telemetry_compliance import finished_spans


def ids(context: SpanContext | None) -> tuple[int, int] | None:
    return None if context is None else (context.trace_id, context.span_id)


def test_decoding_is_the_inverse_of_encoding() -> None:
    spans = list(finished_spans("first", "second"))
    request = encode_spans(spans)
    again = readable_spans(request)
    assert encode_spans(again) == request
    for before, after in zip(spans, again, strict=True):
        assert after.name == before.name
        assert ids(after.context) == ids(before.context)
        assert ids(after.parent) == ids(before.parent)
        assert dict(after.attributes or {}) == dict(before.attributes or {})
        assert (after.start_time, after.end_time) == (before.start_time, before.end_time)
        assert after.status.status_code is before.status.status_code
        assert [event.name for event in after.events] == [event.name for event in before.events]
        assert after.resource.attributes == before.resource.attributes


def test_kinds_and_links_survive() -> None:
    kept = InMemorySpanExporter()
    tracing = configure_tracing("a", (kept,))
    elsewhere = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1))
    tracing.tracer.start_span("linked", kind=SpanKind.SERVER, links=[Link(elsewhere, {"n": 1})]).end()
    tracing.shutdown()
    (again,) = readable_spans(encode_spans(kept.get_finished_spans()))
    assert again.kind is SpanKind.SERVER
    assert (again.links[0].context.span_id, dict(again.links[0].attributes or {})) == (2, {"n": 1})


def test_an_exporter_of_the_sdk_is_a_sink() -> None:
    kept = InMemorySpanExporter()
    (sink,) = as_sinks([kept])
    assert isinstance(sink, SpanExporterSink)
    with span(configure_tracing("a", ()).tracer, "nothing"):
        pass
    assert sink.export(Signal.TRACES, encode_spans(finished_spans("one")))
    assert not sink.export(Signal.LOGS, encode_spans(finished_spans("two")))
    assert [each.name for each in kept.get_finished_spans()] == ["one"]
    sink.close()
    assert not sink.export(Signal.TRACES, encode_spans(finished_spans("late")))
