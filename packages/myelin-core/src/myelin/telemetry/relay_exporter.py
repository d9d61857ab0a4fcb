"""Span exporters that lead not to a collector but to the next place inside Myelin: a node's outbox, or the hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from myelin.telemetry.signals import Signal

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from myelin.telemetry.hub import TelemetryHub
    from myelin.telemetry.relay import Outbox
    from myelin.telemetry.signals import OtlpRequest


class EncodingExporter(SpanExporter):
    """Hands spans over as OTLP requests."""

    def __init__(self, take: Callable[[OtlpRequest, int], bool]) -> None:
        self._take = take

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Encode and hand over."""
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

        taken = self._take(encode_spans(spans), len(spans))
        return SpanExportResult.SUCCESS if taken else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Nothing is held here."""


def into_outbox(outbox: Outbox) -> EncodingExporter:
    """A node's spans to its relay, which counts what it drops."""

    def take(request: OtlpRequest, spans: int) -> bool:
        outbox.put(Signal.TRACES, request.SerializeToString(), spans)
        return True

    return EncodingExporter(take)


def into_hub(hub: TelemetryHub) -> EncodingExporter:
    """The orchestrator's own spans to the hub, which counts what it drops."""

    def take(request: OtlpRequest, spans: int) -> bool:
        hub.offer(Signal.TRACES, request, size=spans * 512)
        return True

    return EncodingExporter(take)
