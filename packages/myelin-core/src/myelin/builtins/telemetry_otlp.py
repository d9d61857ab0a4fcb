"""OTLP export by OpenTelemetry's standard variables.

``OTEL_TRACES_EXPORTER`` lists exporters: ``otlp``, ``console`` (on standard error), ``none``. Where it isn't set, spans
are sent if ``OTEL_EXPORTER_OTLP_ENDPOINT`` or its traces variant is: nobody wants connections to a collector that isn't
there. ``OTEL_EXPORTER_OTLP_{PROTOCOL,HEADERS,TIMEOUT,CERTIFICATE,COMPRESSION}`` and their variants are read by the
exporter itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from myelin.plugin import ConfigError, TelemetryContext, hookimpl

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
)
_KNOWN = ("otlp", "console", "none")


@hookimpl
def myelin_telemetry(context: TelemetryContext) -> Sequence[SpanExporter] | None:
    """The exporters that the environment asks for.

    Raises:
        ConfigError: A variable names an exporter or a protocol that there is not.
    """
    makers = {"otlp": _otlp, "console": _console}
    return tuple(makers[name](os.environ) for name in wanted_exporters(os.environ))


def wanted_exporters(environment: Mapping[str, str]) -> tuple[str, ...]:
    """``otlp`` and ``console`` in the order in which ``environment`` lists them. Pure.

    Raises:
        ConfigError: It lists another.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    listed = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if not listed:
        return ("otlp",) if any(environment.get(name) for name in _ENDPOINTS) else ()
    names = tuple(dict.fromkeys(name.strip().lower() for name in listed.split(",")))
    for name in names:
        if name not in _KNOWN:
            raise ConfigError(
                f"OTEL_TRACES_EXPORTER names {name!r}, which is not an exporter of ours",
                f"use one of {', '.join(_KNOWN)}",
                reason="telemetry",
            )
    return () if "none" in names else names


def wanted_protocol(environment: Mapping[str, str]) -> str:
    """``http/protobuf`` (the default) or ``grpc``. Pure.

    Raises:
        ConfigError: ``environment`` names another.
    """
    protocol = next((value for name in _PROTOCOLS if (value := environment.get(name, "").strip())), "http/protobuf")
    if protocol not in ("http/protobuf", "grpc"):
        raise ConfigError(
            f"the OTLP protocol {protocol!r} is not supported",
            "set OTEL_EXPORTER_OTLP_PROTOCOL to http/protobuf or grpc",
            reason="telemetry",
        )
    return protocol


class FirstOnly(logging.Filter):
    """Lets a logger complain once: a collector that is away would otherwise be complained of with every batch."""

    def __init__(self) -> None:
        super().__init__()
        self._complained = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is shown."""
        if record.levelno < logging.WARNING:
            return True
        first, self._complained = not self._complained, True
        return first


def _otlp(environment: Mapping[str, str]) -> SpanExporter:
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(FirstOnly())
    if wanted_protocol(environment) == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
        except ImportError:
            raise ConfigError(
                "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, whose exporter is not installed",
                "pip install opentelemetry-exporter-otlp-proto-grpc, or use http/protobuf",
                reason="telemetry",
            ) from None
        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter()


def _console(environment: Mapping[str, str]) -> SpanExporter:
    import sys

    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    return ConsoleSpanExporter(out=sys.stderr)
