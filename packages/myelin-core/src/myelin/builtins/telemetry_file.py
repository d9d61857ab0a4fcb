"""``--trace-file``: spans as OTLP JSON lines in a file (see :mod:`myelin.telemetry.archive`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from myelin.plugin import TelemetryContext, hookimpl

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


@hookimpl
def myelin_telemetry(context: TelemetryContext) -> Sequence[SpanExporter] | None:
    """The archive, where a trace file is asked for.

    Raises:
        ConfigError: It can't be written.
    """
    if not context.trace_file:
        return None
    from myelin.telemetry.archive import ArchiveExporter

    return (ArchiveExporter(Path(context.trace_file)),)
