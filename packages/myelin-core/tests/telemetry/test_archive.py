"""The file archive is OTLP JSON: it parses into the protocol's own messages."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from myelin.builtins import telemetry_file
from myelin.errors import ConfigError, NodeError
from myelin.plugin import TelemetryContext, TelemetrySink
from myelin.telemetry.archive import ArchiveSink
from myelin.telemetry.relay_exporter import EncodingExporter
from myelin.telemetry.signals import Signal
from myelin.telemetry.tracing import configure_tracing, span


def parse(line: str) -> ExportTraceServiceRequest:
    """Read a line as OTLP's JSON mapping says: ids are hex (protobuf's own mapping would want base64)."""

    def to_base64(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: to_base64(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [to_base64(item) for item in value]
        if key in ("traceId", "spanId", "parentSpanId"):
            return base64.b64encode(bytes.fromhex(value)).decode()
        return value

    return ParseDict(to_base64(json.loads(line)), ExportTraceServiceRequest())


def exporters(*sinks: TelemetrySink) -> list[EncodingExporter]:
    """Span exporters that lead straight to sinks."""
    return [EncodingExporter(lambda request, spans, sink=sink: sink.export(Signal.TRACES, request)) for sink in sinks]


def test_lines_parse_with_the_protocols_messages(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    sinks = telemetry_file.myelin_telemetry(TelemetryContext("myelin-orchestrator", str(path)))
    assert sinks is not None
    tracing = configure_tracing("myelin-orchestrator", exporters(*sinks), instance="one")
    with span(tracing.tracer, "outer", {"text": "λ ünïcode", "number": 2**40, "list": ["a", "b"]}) as outer:
        with pytest.raises(NodeError), span(tracing.tracer, "inner"):
            raise NodeError("lost", reason="node-lost")
        context = outer.get_span_context()
    assert tracing.shutdown()
    for sink in sinks:
        sink.close()

    lines = path.read_text("utf-8").splitlines()
    assert len(lines) == 1
    raw = json.loads(lines[0])["resourceSpans"][0]["scopeSpans"][0]["spans"]
    by_name = {each["name"]: each for each in raw}
    assert by_name["outer"]["traceId"] == f"{context.trace_id:032x}"
    assert by_name["inner"]["parentSpanId"] == f"{context.span_id:016x}" == by_name["outer"]["spanId"]
    assert isinstance(by_name["outer"]["startTimeUnixNano"], str)
    assert by_name["inner"]["status"] == {"message": "lost", "code": 2}

    request = parse(lines[0])
    resource = {each.key: each.value.string_value for each in request.resource_spans[0].resource.attributes}
    assert resource["service.name"] == "myelin-orchestrator"
    attributes = {each.key: each.value for each in request.resource_spans[0].scope_spans[0].spans[1].attributes}
    assert attributes["text"].string_value == "λ ünïcode"
    assert attributes["number"].int_value == 2**40


def test_runs_append(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    for name in ("first", "second"):
        sink = ArchiveSink(path)
        tracing = configure_tracing("a", exporters(sink))
        with span(tracing.tracer, name):
            pass
        tracing.shutdown()
        sink.close()
    names = [parse(line).resource_spans[0].scope_spans[0].spans[0].name for line in path.read_text().splitlines()]
    assert names == ["first", "second"]


def test_no_trace_file_no_exporter() -> None:
    assert not telemetry_file.myelin_telemetry(TelemetryContext("a", ""))


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written") as raised:
        telemetry_file.myelin_telemetry(TelemetryContext("a", str(tmp_path / "missing" / "traces.jsonl")))
    assert raised.value.hint


def requests_of(*names: str) -> list[ExportTraceServiceRequest]:
    """A request with one span for each name."""
    made = []
    for name in names:
        request = ExportTraceServiceRequest()
        span = request.resource_spans.add().scope_spans.add().spans.add()
        span.name, span.trace_id, span.span_id = name, b"t" * 16, b"s" * 8
        made.append(request)
    return made


def test_it_is_put_aside_before_it_grows_too_large(tmp_path: Path) -> None:
    path = tmp_path / "frames.jsonl"
    sink = ArchiveSink(path, most_bytes=400, name="telemetry-frame-log")
    for request in requests_of(*(f"span-{number}" for number in range(20))):
        assert sink.export(Signal.TRACES, request)
    sink.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["frames.jsonl", *(f"frames.jsonl.{number}" for number in (1, 2, 3))]
    assert all(file.stat().st_size <= 400 for file in files)
    order = [path.with_name(f"frames.jsonl.{number}") for number in (3, 2, 1)] + [path]
    names = [
        parse(line).resource_spans[0].scope_spans[0].spans[0].name for f in order for line in f.read_text().splitlines()
    ]
    assert names == [f"span-{number}" for number in range(20 - len(names), 20)]


def test_what_does_not_fit_on_the_disk_is_left_out_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full in the middle of a line: the line before and the one after are whole."""
    path = tmp_path / "frames.jsonl"
    sink = ArchiveSink(path)
    first, second, third, fourth = requests_of("first", "second", "third", "fourth")
    assert sink.export(Signal.TRACES, first)

    class Full:
        """A file on a disk that takes ten bytes more."""

        def __init__(self, file: Any) -> None:
            self.file, self.left = file, 10

        def write(self, data: memoryview) -> int:
            if not self.left:
                raise OSError(28, "No space left on device")
            taken, self.left = self.file.write(data[: self.left]), 0
            return taken

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    whole = sink._file
    monkeypatch.setattr(sink, "_file", Full(whole))
    assert not sink.export(Signal.TRACES, second)
    assert not sink.export(Signal.TRACES, third)
    monkeypatch.setattr(sink, "_file", whole)
    assert sink.export(Signal.TRACES, fourth)
    sink.close()
    names = [parse(line).resource_spans[0].scope_spans[0].spans[0].name for line in path.read_text().splitlines()]
    assert names == ["first", "fourth"]
    assert len(caplog.records) == 1
