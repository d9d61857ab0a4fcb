"""Spans that were exported elsewhere, as the SDK's own objects: what OpenTelemetry's span exporters take.

The inverse of ``opentelemetry.exporter.otlp.proto.common.trace_encoder``; a property test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

if TYPE_CHECKING:
    from myelin.telemetry.signals import OtlpRequest

_KINDS = {
    1: SpanKind.INTERNAL,
    2: SpanKind.SERVER,
    3: SpanKind.CLIENT,
    4: SpanKind.PRODUCER,
    5: SpanKind.CONSUMER,
}
_STATUSES = {0: StatusCode.UNSET, 1: StatusCode.OK, 2: StatusCode.ERROR}


def readable_spans(request: OtlpRequest) -> list[ReadableSpan]:
    """The spans of a trace request, in order."""
    spans = []
    for part in getattr(request, "resource_spans", ()):
        resource = Resource(_attributes(part.resource.attributes), part.schema_url or None)
        for scope in part.scope_spans:
            made_by = InstrumentationScope(scope.scope.name, scope.scope.version or None, scope.schema_url or None)
            spans += [_span(each, resource, made_by) for each in scope.spans]
    return spans


def _span(span: Any, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    context = _context(span.trace_id, span.span_id, span.trace_state, span.flags, remote=False)
    parent = _context(span.trace_id, span.parent_span_id, "", span.flags, remote=bool(span.flags & 0x200))
    status = _STATUSES.get(span.status.code, StatusCode.UNSET)
    return ReadableSpan(
        name=span.name,
        context=context,
        parent=parent if span.parent_span_id else None,
        resource=resource,
        attributes=_attributes(span.attributes),
        events=[Event(each.name, _attributes(each.attributes), each.time_unix_nano) for each in span.events],
        links=[
            Link(
                _context(each.trace_id, each.span_id, each.trace_state, each.flags, remote=True),
                _attributes(each.attributes),
            )
            for each in span.links
        ],
        kind=_KINDS.get(span.kind, SpanKind.INTERNAL),
        status=Status(status, span.status.message or None) if status is StatusCode.ERROR else Status(status),
        start_time=span.start_time_unix_nano,
        end_time=span.end_time_unix_nano,
        instrumentation_scope=scope,
    )


def _context(trace_id: bytes, span_id: bytes, state: str, flags: int, *, remote: bool) -> SpanContext:
    return SpanContext(
        int.from_bytes(trace_id, "big"),
        int.from_bytes(span_id, "big"),
        remote,
        TraceFlags(flags & 0xFF or TraceFlags.SAMPLED),
        TraceState.from_header([state]) if state else None,
    )


def _attributes(entries: Iterable[Any]) -> dict[str, Any]:
    return {each.key: plain_value(each.value) for each in entries}


def plain_value(value: Any) -> Any:
    """What an ``AnyValue`` holds: text, a number, a boolean, bytes, a tuple, a dictionary or None."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    held = getattr(value, kind)
    if kind == "array_value":
        return tuple(plain_value(each) for each in held.values)
    if kind == "kvlist_value":
        return {each.key: plain_value(each.value) for each in held.values}
    return held
