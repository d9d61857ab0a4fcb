"""Which exporters the environment asks for."""

from __future__ import annotations

import logging
import sys

import pytest

from myelin.builtins import telemetry_otlp
from myelin.errors import ConfigError
from myelin.plugin import TelemetryContext

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENDPOINT, TRACES_ENDPOINT, "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ()),
        ({ENDPOINT: "http://x:4318"}, ("otlp",)),
        ({TRACES_ENDPOINT: "http://x:4318/v1/traces"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "none", ENDPOINT: "http://x:4318"}, ()),
        ({"OTEL_TRACES_EXPORTER": "console, otlp,otlp"}, ("console", "otlp")),
        ({"OTEL_SDK_DISABLED": "TRUE", ENDPOINT: "http://x:4318"}, ()),
        ({"OTEL_SDK_DISABLED": "false", ENDPOINT: "http://x:4318"}, ("otlp",)),
    ],
)
def test_wanted_exporters(environment: dict[str, str], expected: tuple[str, ...]) -> None:
    assert telemetry_otlp.wanted_exporters(environment) == expected


def test_an_unknown_exporter_is_an_error() -> None:
    with pytest.raises(ConfigError, match="zipkin"):
        telemetry_otlp.wanted_exporters({"OTEL_TRACES_EXPORTER": "zipkin"})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            "http/protobuf",
        ),
    ],
)
def test_wanted_protocol(environment: dict[str, str], expected: str) -> None:
    assert telemetry_otlp.wanted_protocol(environment) == expected


def test_an_unknown_protocol_is_an_error() -> None:
    with pytest.raises(ConfigError, match="http/json"):
        telemetry_otlp.wanted_protocol({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_grpc_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError) as raised:
        telemetry_otlp.myelin_telemetry(TelemetryContext("a", ""))
    assert "pip install opentelemetry-exporter-otlp-proto-grpc" in raised.value.hint


def test_nothing_is_made_by_default() -> None:
    assert not telemetry_otlp.myelin_telemetry(TelemetryContext("a", ""))


def test_a_collector_that_is_away_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test.exporter")
    logger.addFilter(telemetry_otlp.FirstOnly())
    for _ in range(3):
        logger.warning("it is away")
        logger.info("by the way")
    with caplog.at_level(logging.INFO, logger="test.exporter"):
        logger.error("it is still away")
        logger.info("by the way")
    assert [record.getMessage() for record in caplog.records] == ["it is away", "by the way"]
