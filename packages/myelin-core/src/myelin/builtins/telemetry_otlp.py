"""OTLP export by OpenTelemetry's standard variables.

``OTEL_TRACES_EXPORTER``, ``OTEL_METRICS_EXPORTER`` and ``OTEL_LOGS_EXPORTER`` list exporters: ``otlp``, ``console`` (on
standard error), ``none``. Where one isn't set, its signal is sent if ``OTEL_EXPORTER_OTLP_ENDPOINT`` or its own variant
is: nobody wants connections to a collector that isn't there. What the other variables mean is in
:mod:`myelin.telemetry.otlp_target`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from myelin.plugin import ConfigError, Signal, TelemetryContext, TelemetrySink, hookimpl

_KNOWN = ("otlp", "console", "none")
_PULLED = "prometheus"
"""Metrics that are pulled from ``/metrics`` need no exporter."""


@hookimpl
def myelin_telemetry(context: TelemetryContext) -> Sequence[TelemetrySink] | None:
    """The sinks that the environment asks for.

    Raises:
        ConfigError: A variable names an exporter or a protocol that there is not.
    """
    wanted = {signal: wanted_exporters(os.environ, signal) for signal in Signal}
    sinks: list[TelemetrySink] = []
    sent = [signal for signal, exporters in wanted.items() if "otlp" in exporters]
    if sent:
        from myelin.telemetry.otlp_sink import OtlpSink
        from myelin.telemetry.otlp_target import otlp_target

        sinks.append(OtlpSink({signal: otlp_target(os.environ, signal) for signal in sent}))
    shown = [signal for signal, exporters in wanted.items() if "console" in exporters]
    if shown:
        from myelin.telemetry.console_sink import ConsoleSink

        sinks.append(ConsoleSink(shown))
    return tuple(sinks)


def wanted_exporters(environment: Mapping[str, str], signal: Signal = Signal.TRACES) -> tuple[str, ...]:
    """``otlp`` and ``console`` in the order in which ``environment`` lists them for ``signal``. Pure.

    Raises:
        ConfigError: It lists another.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    listed = environment.get(variable, "").strip()
    if not listed:
        endpoints = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
        return ("otlp",) if any(environment.get(name) for name in endpoints) else ()
    names = tuple(dict.fromkeys(name.strip().lower() for name in listed.split(",")))
    for name in names:
        if name not in _KNOWN and not (name == _PULLED and signal is Signal.METRICS):
            raise ConfigError(
                f"{variable} names {name!r}, which is not an exporter of ours",
                f"use one of {', '.join(_KNOWN)}",
                reason="telemetry",
            )
    return () if "none" in names else tuple(name for name in names if name != _PULLED)
