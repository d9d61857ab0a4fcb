"""``--trace-file`` (spans) and ``--telemetry-frame-log`` (everything) as OTLP JSON lines in a file (see
:mod:`myelin.telemetry.archive`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from myelin.plugin import Signal, TelemetryContext, TelemetrySink, hookimpl


@hookimpl
def myelin_telemetry(context: TelemetryContext) -> Sequence[TelemetrySink] | None:
    """The archives that are asked for.

    Raises:
        ConfigError: One can't be written.
    """
    if not context.trace_file and not context.frame_log:
        return None
    from myelin.telemetry.archive import ArchiveSink

    sinks = []
    if context.trace_file:
        sinks.append(ArchiveSink(Path(context.trace_file)))
    if context.frame_log:
        sinks.append(
            ArchiveSink(
                Path(context.frame_log),
                tuple(Signal),
                most_bytes=context.frame_log_bytes,
                name="telemetry-frame-log",
            )
        )
    return tuple(sinks)
