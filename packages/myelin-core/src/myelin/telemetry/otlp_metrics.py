"""Metrics as OTLP requests, made and read without the SDK: a node samples what it knows once a second.

Sums are cumulative. A histogram here is counts by bucket, as the protocol has it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    from myelin.telemetry.signals import OtlpRequest

Attributes = Mapping[str, str | int | float | bool]
GAUGE = "gauge"
SUM = "sum"
HISTOGRAM = "histogram"


class Buckets:
    """A histogram that grows: values counted by the first bound that is not below them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric, as it is made and as it is read back.

    Attributes:
        name, unit, description: Of the metric.
        kind: ``gauge``, ``sum`` (monotonic, cumulative) or ``histogram``.
        value: The value; a histogram's sum.
        attributes: Of the point.
        bounds, counts: A histogram's.
    """

    name: str
    unit: str
    kind: str
    value: float
    attributes: Attributes = field(default_factory=dict)
    description: str = ""
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


def gauge(name: str, unit: str, value: float, attributes: Attributes = {}, description: str = "") -> Point:  # noqa: B006  # never changed
    """What something is now."""
    return Point(name, unit, GAUGE, value, attributes, description)


def total(name: str, unit: str, value: float, attributes: Attributes = {}, description: str = "") -> Point:  # noqa: B006  # never changed
    """What something has come to since the beginning."""
    return Point(name, unit, SUM, value, attributes, description)


def histogram(name: str, unit: str, buckets: Buckets, attributes: Attributes, description: str = "") -> Point:
    """How values were spread since the beginning."""
    return Point(name, unit, HISTOGRAM, buckets.total, attributes, description, buckets.bounds, tuple(buckets.counts))


def metrics_request(
    resource: Attributes, points: Iterable[Point], *, began_ns: int, now_ns: int, version: str = ""
) -> ExportMetricsServiceRequest:
    """One request with all ``points``, by name."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

    request = ExportMetricsServiceRequest()
    part = request.resource_metrics.add()
    set_attributes(part.resource.attributes, resource)
    scope = part.scope_metrics.add()
    scope.scope.name, scope.scope.version = "myelin", version
    by_name: dict[str, Any] = {}
    for point in points:
        metric = by_name.get(point.name)
        if metric is None:
            metric = by_name[point.name] = scope.metrics.add()
            metric.name, metric.unit, metric.description = point.name, point.unit, point.description
            if point.kind == SUM:
                metric.sum.is_monotonic = True
            if point.kind != GAUGE:
                getattr(metric, point.kind).aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
        made = getattr(metric, point.kind).data_points.add()
        made.time_unix_nano = now_ns
        if point.kind != GAUGE:
            made.start_time_unix_nano = began_ns
        set_attributes(made.attributes, point.attributes)
        if point.kind == HISTOGRAM:
            made.count, made.sum = sum(point.counts), point.value
            made.explicit_bounds.extend(point.bounds)
            made.bucket_counts.extend(point.counts)
        elif isinstance(point.value, int):
            made.as_int = point.value
        else:
            made.as_double = point.value
    return request


def set_attributes(entries: Any, values: Attributes) -> None:
    """Fill a message's attributes."""
    for key, value in values.items():
        entry = entries.add()
        entry.key = key
        if isinstance(value, bool):
            entry.value.bool_value = value
        elif isinstance(value, int):
            entry.value.int_value = value
        elif isinstance(value, float):
            entry.value.double_value = value
        else:
            entry.value.string_value = value


def read_points(request: OtlpRequest) -> Iterator[Point]:
    """Every gauge, sum and histogram point of a metrics request; other kinds are passed over."""
    from myelin.telemetry.otlp_spans import plain_value

    for part in getattr(request, "resource_metrics", ()):
        for scope in part.scope_metrics:
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                if kind not in (GAUGE, SUM, HISTOGRAM):
                    continue
                data = getattr(metric, kind)
                read_as = GAUGE if kind == SUM and not data.is_monotonic else kind
                for each in data.data_points:
                    attributes = {entry.key: plain_value(entry.value) for entry in each.attributes}
                    if kind == HISTOGRAM:
                        value = each.sum
                        bounds, counts = tuple(each.explicit_bounds), tuple(each.bucket_counts)
                    else:
                        value = getattr(each, each.WhichOneof("value") or "as_double")
                        bounds, counts = (), ()
                    yield Point(
                        metric.name, metric.unit, read_as, value, attributes, metric.description, bounds, counts
                    )


def resource_attributes(request: OtlpRequest) -> dict[str, Any]:
    """The attributes of a request's first resource."""
    from myelin.telemetry.otlp_spans import plain_value
    from myelin.telemetry.signals import resources

    for part in resources(request):
        return {entry.key: plain_value(entry.value) for entry in part.resource.attributes}
    return {}
