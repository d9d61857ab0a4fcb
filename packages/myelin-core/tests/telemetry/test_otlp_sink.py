"""Which exporters the environment asks for."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import grpc
import pytest

from myelin.builtins import telemetry_otlp
from myelin.errors import ConfigError
from myelin.plugin import TelemetryContext
from myelin.telemetry.otlp_sink import OtlpSink
from myelin.telemetry.otlp_target import OtlpTarget, otlp_target
from myelin.telemetry.signals import Signal
from myelin_testkit.telemetry_compliance import otlp_request

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


def test_nothing_is_made_by_default() -> None:
    assert not telemetry_otlp.myelin_telemetry(TelemetryContext("a", ""))


def test_each_signal_has_variables_of_its_own() -> None:
    environment = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_LOGS_EXPORTER": "none", ENDPOINT: "http://x:4318"}
    assert telemetry_otlp.wanted_exporters(environment, Signal.TRACES) == ("otlp",)
    assert telemetry_otlp.wanted_exporters(environment, Signal.METRICS) == ()
    assert telemetry_otlp.wanted_exporters(environment, Signal.LOGS) == ()


@pytest.mark.parametrize(
    ("environment", "signal", "expected"),
    [
        ({}, Signal.TRACES, OtlpTarget("http/protobuf", "http://localhost:4318/v1/traces")),
        ({ENDPOINT: "http://x:4318/"}, Signal.LOGS, OtlpTarget("http/protobuf", "http://x:4318/v1/logs")),
        ({ENDPOINT: "https://x/base"}, Signal.METRICS, OtlpTarget("http/protobuf", "https://x/base/v1/metrics")),
        (
            {TRACES_ENDPOINT: "http://y/own", ENDPOINT: "http://x"},
            Signal.TRACES,
            OtlpTarget("http/protobuf", "http://y/own"),
        ),
        (
            {ENDPOINT: "http://x:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            Signal.TRACES,
            OtlpTarget("grpc", "http://x:4317"),
        ),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            Signal.TRACES,
            OtlpTarget("http/protobuf", "http://localhost:4318/v1/traces"),
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_HEADERS": "Api-Key=a%20b, x=y,broken",
                "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
                "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            },
            Signal.TRACES,
            OtlpTarget(
                "http/protobuf",
                "http://localhost:4318/v1/traces",
                headers=(("api-key", "a b"), ("x", "y")),
                timeout_s=2.5,
                gzip=True,
            ),
        ),
        (
            {"OTEL_EXPORTER_OTLP_TIMEOUT": "10"},
            Signal.TRACES,
            OtlpTarget("http/protobuf", "http://localhost:4318/v1/traces", timeout_s=10.0),
        ),
        (
            {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"},
            Signal.TRACES,
            OtlpTarget("http/protobuf", "http://localhost:4318/v1/traces", timeout_s=10.0),
        ),
    ],
)
def test_where_a_signal_goes(environment: dict[str, str], signal: Signal, expected: OtlpTarget) -> None:
    assert otlp_target(environment, signal) == expected


@pytest.mark.parametrize(
    ("endpoint", "insecure", "tls", "authority"),
    [
        ("http://x:4317", False, False, "x:4317"),
        ("https://x:4317", True, True, "x:4317"),
        ("x:4317", False, True, "x:4317"),
        ("x:4317", True, False, "x:4317"),
    ],
)
def test_what_grpc_makes_of_an_endpoint(endpoint: str, insecure: bool, tls: bool, authority: str) -> None:
    target = OtlpTarget("grpc", endpoint, insecure=insecure)
    assert (target.tls, target.authority) == (tls, authority)


@pytest.mark.parametrize(
    "environment", [{"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, {ENDPOINT: "localhost:4318"}, {TRACES_ENDPOINT: "x"}]
)
def test_what_cannot_be_sent_to_is_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as raised:
        otlp_target(environment, Signal.TRACES)
    assert raised.value.hint


class Collector(BaseHTTPRequestHandler):
    """Answers what it is told to, one status after another, then 200."""

    protocol_version = "HTTP/1.1"
    answers: ClassVar[list[int]] = []
    seen: ClassVar[list[tuple[str, dict[str, str], bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen.append((self.path, {key.lower(): value for key, value in self.headers.items()}, body))
        self.send_response(self.answers.pop(0) if self.answers else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Not on the terminal."""


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.answers, Collector.seen = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()


def sink_to(endpoint: str, **more: Any) -> OtlpSink:
    return OtlpSink({Signal.TRACES: OtlpTarget("http/protobuf", endpoint, **more)})


def test_it_tries_again_where_that_is_of_use(collector: str) -> None:
    Collector.answers = [503, 429]
    sink = sink_to(collector)
    assert sink.export(Signal.TRACES, otlp_request(Signal.TRACES, "one"))
    assert len(Collector.seen) == 3
    Collector.answers = [400]
    assert not sink.export(Signal.TRACES, otlp_request(Signal.TRACES, "two"))
    assert len(Collector.seen) == 4
    sink.close()


def test_headers_and_compression_are_as_asked(collector: str) -> None:
    sink = sink_to(collector, headers=(("x-key", "value"),), gzip=True)
    request = otlp_request(Signal.TRACES, "one")
    assert sink.export(Signal.TRACES, request)
    sink.close()
    ((path, headers, body),) = Collector.seen
    assert path == "/v1/traces"
    assert headers["x-key"] == "value"
    assert headers["content-type"] == "application/x-protobuf"
    assert gzip.decompress(body) == request.SerializeToString()


def test_a_collector_that_is_away_costs_no_more_than_its_time_and_one_complaint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = sink_to("http://127.0.0.1:9/v1/traces", timeout_s=0.6)
    began = time.monotonic()
    for _ in range(2):
        assert not sink.export(Signal.TRACES, otlp_request(Signal.TRACES, "one"))
    assert time.monotonic() - began < 10.0
    assert len(caplog.records) == 1
    hurried = sink_to("http://127.0.0.1:9/v1/traces", timeout_s=30.0)
    hurried.hurry()
    began = time.monotonic()
    assert not hurried.export(Signal.TRACES, otlp_request(Signal.TRACES, "one"))
    assert time.monotonic() - began < 10.0, "less than the timeout"
    hurried.close()
    found = sink.check(Signal.TRACES, otlp_request(Signal.TRACES, "one"), 0.5)
    assert (found.connected, found.observed) == (False, False)
    sink.close()


def test_a_password_in_an_endpoint_is_not_shown() -> None:
    assert OtlpTarget("http/protobuf", "https://me:secret@x/v1/traces").shown == "x/v1/traces"


def test_over_grpc_each_signal_has_its_service() -> None:
    taken: list[tuple[str, bytes]] = []

    class Services(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
        def service(self, details: Any) -> Any:
            def take(request: bytes, context: Any) -> bytes:
                taken.append((details.method, request))
                return b""

            return grpc.unary_unary_rpc_method_handler(take)

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Services(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        sink = OtlpSink({signal: OtlpTarget("grpc", f"http://127.0.0.1:{port}") for signal in Signal})
        for signal in Signal:
            request = otlp_request(signal, "one")
            assert sink.export(signal, request)
            assert taken[-1] == (_METHODS[signal], request.SerializeToString())
        sink.close()
        assert not sink.export(Signal.TRACES, otlp_request(Signal.TRACES, "late"))
    finally:
        server.stop(0)


_METHODS = {
    Signal.TRACES: "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    Signal.METRICS: "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    Signal.LOGS: "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
}


def test_a_connection_that_was_closed_while_idle_is_opened_again_even_at_the_end(collector: str) -> None:
    sink = sink_to(collector)
    assert sink.export(Signal.TRACES, otlp_request(Signal.TRACES, "one"))
    sink._channels[Signal.TRACES]._connection.sock.shutdown(2)  # type: ignore[attr-defined]  # as a peer would close it
    sink.hurry()
    assert sink.export(Signal.TRACES, otlp_request(Signal.TRACES, "two"))
    assert len(Collector.seen) == 2
    sink.close()


def test_what_threads_send_at_once_arrives_each_and_once(collector: str) -> None:
    sink = sink_to(collector)
    requests = [otlp_request(Signal.TRACES, f"span-{number}") for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda request: sink.export(Signal.TRACES, request), requests))
    sink.close()
    expected = sorted(request.SerializeToString() for request in requests)
    assert sorted(body for _, _, body in Collector.seen) == expected


def test_waiting_for_its_turn_is_within_a_requests_time(collector: str) -> None:
    sink = sink_to(collector, timeout_s=1.5)
    assert sink.export(Signal.TRACES, otlp_request(Signal.TRACES, "one"))
    with sink._channels[Signal.TRACES]._turn:  # type: ignore[attr-defined]  # as another thread's request holds it
        assert not sink.export(Signal.TRACES, otlp_request(Signal.TRACES, "two"))
    sink.close()
    assert len(Collector.seen) == 1
