"""OTLP metrics as Prometheus's text exposition (format 0.0.4), for ``GET /metrics``. Pure.

Names follow OpenTelemetry's compatibility rules: what isn't a letter or digit becomes ``_``, a known unit becomes a
suffix, and what only grows ends in ``_total``. Source:
``opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from myelin.telemetry.otlp_metrics import HISTOGRAM, SUM, Point

_UNITS = {"s": "seconds", "ms": "milliseconds", "By": "bytes", "W": "watts", "Hz": "hertz", "Cel": "celsius"}
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]+")


@dataclass(slots=True)
class _Family:
    kind: str
    description: str
    points: list[Point] = field(default_factory=list)


def metric_name(name: str, unit: str, kind: str) -> str:
    """The name under which a metric is exposed."""
    base = _NOT_A_NAME.sub("_", name).strip("_")
    suffix = _UNITS.get(unit, "ratio" if unit == "1" and kind != SUM else "")
    if suffix and not base.endswith(f"_{suffix}"):
        base = f"{base}_{suffix}"
    return f"{base}_total" if kind == SUM and not base.endswith("_total") else base


def render(points: Iterable[Point]) -> bytes:
    """The exposition of ``points``: by name, each family with its help and type."""
    families: dict[str, _Family] = {}
    for point in points:
        name = metric_name(point.name, point.unit, point.kind)
        family = families.setdefault(name, _Family(point.kind, point.description))
        if family.kind == point.kind:
            family.points.append(point)
    lines: list[str] = []
    for name in sorted(families):
        family = families[name]
        if family.description:
            lines.append(f"# HELP {name} {_escaped(family.description, quotes=False)}")
        lines.append(f"# TYPE {name} {'counter' if family.kind == SUM else family.kind}")
        for point in family.points:
            lines += _histogram(name, point) if point.kind == HISTOGRAM else [_line(name, point, point.value)]
    return "".join(f"{line}\n" for line in lines).encode()


def _histogram(name: str, point: Point) -> list[str]:
    lines, seen = [], 0
    for bound, count in zip((*point.bounds, math.inf), point.counts, strict=False):
        seen += count
        lines.append(_line(f"{name}_bucket", point, seen, le=_number(bound)))
    lines.append(_line(f"{name}_sum", point, point.value))
    lines.append(_line(f"{name}_count", point, seen))
    return lines


def _line(name: str, point: Point, value: float, **more: str) -> str:
    labels = {_label(key): str(each) for key, each in sorted(point.attributes.items())} | more
    shown = ",".join(f'{key}="{_escaped(each)}"' for key, each in labels.items())
    return f"{name}{{{shown}}} {_number(value)}" if shown else f"{name} {_number(value)}"


def _label(key: str) -> str:
    label = _NOT_A_NAME.sub("_", key)
    return f"_{label}" if label[:1].isdigit() else label


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
