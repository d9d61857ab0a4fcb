"""The three signals of OpenTelemetry, and their OTLP requests: what travels from nodes to the orchestrator and to
sinks.

Everything between a process's SDK and a sink is an ``Export…ServiceRequest`` of ``opentelemetry-proto``, so that what a
node sends needs no translation on its way.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from myelin.errors import WireError

if TYPE_CHECKING:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    OtlpRequest = ExportTraceServiceRequest | ExportMetricsServiceRequest | ExportLogsServiceRequest


class Signal(StrEnum):
    """What an OTLP request carries."""

    TRACES = "traces"
    METRICS = "metrics"
    LOGS = "logs"


ALL_SIGNALS = frozenset(Signal)


def request_type(signal: Signal) -> type[OtlpRequest]:
    """The class of a signal's request; its import takes some 30 ms, the first time."""
    if signal is Signal.TRACES:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        return ExportTraceServiceRequest
    if signal is Signal.METRICS:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        return ExportMetricsServiceRequest
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    return ExportLogsServiceRequest


def parse_request(signal: Signal, data: bytes) -> OtlpRequest:
    """The request in ``data``.

    Raises:
        WireError: It isn't one.
    """
    from google.protobuf.message import DecodeError

    request = request_type(signal)()
    try:
        request.ParseFromString(data)
    except (DecodeError, ValueError, RecursionError):
        raise WireError(f"a request of {signal} is damaged") from None
    return request


def resources(request: OtlpRequest) -> Iterator[Any]:
    """The parts of a request, one for each resource: ``ResourceSpans``, ``ResourceMetrics`` or ``ResourceLogs``."""
    for name in ("resource_spans", "resource_metrics", "resource_logs"):
        yield from getattr(request, name, ())


def records(request: OtlpRequest) -> Iterator[Any]:
    """The spans, metrics or log records of a request."""
    for part in resources(request):
        for scopes, entries in (("scope_spans", "spans"), ("scope_metrics", "metrics"), ("scope_logs", "log_records")):
            for scope in getattr(part, scopes, ()):
                yield from getattr(scope, entries)


def count_records(request: OtlpRequest) -> int:
    """How many spans, metrics or log records a request has."""
    return sum(1 for _ in records(request))
