"""The preflight: does telemetry arrive? A synthetic event goes to each sink before anything depends on it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from myelin import __version__
from myelin.telemetry import attributes
from myelin.telemetry.hub import check_sinks
from myelin.telemetry.logbook import LogEntry, logs_request
from myelin.telemetry.otlp_metrics import gauge, metrics_request, set_attributes
from myelin.telemetry.signals import Signal
from myelin.telemetry.sink import SinkCheck, TelemetrySink

if TYPE_CHECKING:
    from myelin.telemetry.otlp_metrics import Attributes
    from myelin.telemetry.signals import OtlpRequest

TIMEOUT_S = 0.5
"""A collector that takes longer holds up no run; it gets what there is later."""
EVENT = "myelin.telemetry.preflight"


def synthetic_event(signal: Signal, resource: Attributes, traceparent: str = "") -> OtlpRequest:
    """An event that says nothing but that telemetry works: a span without length, a line, or a figure.

    Args:
        traceparent: The span's parent; a trace of its own where it is empty.
    """
    now = time.time_ns()
    if signal is Signal.METRICS:
        return metrics_request(resource, [gauge(EVENT, "1", 1)], began_ns=now, now_ns=now, version=__version__)
    if signal is Signal.LOGS:
        return logs_request([(resource, [LogEntry(now / 1e9, "orchestrator", "log", "info", EVENT)])], __version__)
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

    request = ExportTraceServiceRequest()
    part = request.resource_spans.add()
    set_attributes(part.resource.attributes, resource)
    scope = part.scope_spans.add()
    scope.scope.name, scope.scope.version = "myelin", __version__
    span = scope.spans.add()
    fields = traceparent.split("-")
    if len(fields) == 4:
        span.trace_id, span.parent_span_id = bytes.fromhex(fields[1]), bytes.fromhex(fields[2])
    else:
        span.trace_id = os.urandom(16)
    span.span_id = os.urandom(8)
    span.name, span.kind = EVENT, Span.SPAN_KIND_INTERNAL
    span.start_time_unix_nano = span.end_time_unix_nano = now
    return request


def preflight(
    sinks: Sequence[TelemetrySink], resource: Attributes, traceparent: str = "", timeout_s: float = TIMEOUT_S
) -> list[SinkCheck]:
    """Each sink's answer to an event of the first signal that it takes. Blocking, for ``timeout_s`` at most."""
    answers: list[SinkCheck] = []
    left = list(sinks)
    deadline = time.monotonic() + timeout_s
    for signal in (Signal.TRACES, Signal.LOGS, Signal.METRICS):
        asked = [sink for sink in left if signal in sink.signals]
        if asked:
            event = synthetic_event(signal, resource, traceparent)
            answers += check_sinks(asked, signal, event, max(0.05, deadline - time.monotonic()))
            left = [sink for sink in left if sink not in asked]
    return answers


def summary(checks: Sequence[SinkCheck]) -> Mapping[str, list[str]]:
    """The attributes of the telemetry phase: which sinks are configured, connected, were sent to, have it."""
    return {
        attributes.SINKS: [each.sink for each in checks],
        attributes.SINKS_CONNECTED: [each.sink for each in checks if each.connected or each.observed],
        attributes.SINKS_SENT: [each.sink for each in checks if each.sent],
        attributes.SINKS_OBSERVED: [each.sink for each in checks if each.observed],
    }
