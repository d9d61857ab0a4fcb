"""The built-in sinks pass the suite that anyone's sink does."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SpanExporter

from myelin.builtins import telemetry_file, telemetry_otlp
from myelin.plugin import TelemetryContext, TelemetrySink
from myelin.telemetry.signals import Signal, parse_request
from myelin_testkit.telemetry_compliance import TelemetryCompliance, record_names


class TestTraceFile(TelemetryCompliance):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "traces.jsonl"

    def exporters(self, service: str) -> Sequence[SpanExporter | TelemetrySink] | None:
        return telemetry_file.myelin_telemetry(TelemetryContext(service, str(self.path)))

    def unconfigured(self) -> Sequence[SpanExporter | TelemetrySink] | None:
        return telemetry_file.myelin_telemetry(TelemetryContext("myelin-worker", ""))

    def arrived(self) -> Collection[str]:
        batches = [json.loads(line) for line in self.path.read_text("utf-8").splitlines()]
        scopes = [scope for batch in batches for each in batch.get("resourceSpans", ()) for scope in each["scopeSpans"]]
        return {span["name"] for scope in scopes for span in scope["spans"]}


class TestFrameLog(TelemetryCompliance):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "frames.jsonl"

    def exporters(self, service: str) -> Sequence[SpanExporter | TelemetrySink] | None:
        return telemetry_file.myelin_telemetry(TelemetryContext(service, "", frame_log=str(self.path)))

    def unconfigured(self) -> Sequence[SpanExporter | TelemetrySink] | None:
        return telemetry_file.myelin_telemetry(TelemetryContext("myelin-worker", ""))

    def arrived(self) -> Collection[str]:
        told = re.findall(r'"name":"([\w-]+)"|"stringValue":"(line-\w+)"', self.path.read_text("utf-8"))
        return {name for pair in told for name in pair}


class TestOtlp(TelemetryCompliance):
    @pytest.fixture(autouse=True)
    def _collector(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """A collector on loopback that keeps the names of what it is sent."""
        for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            monkeypatch.delenv(name, raising=False)
        self.names: set[str] = set()
        names = self.names

        class Collector(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                signal = Signal(self.path.removeprefix("/v1/"))
                request = parse_request(signal, self.rfile.read(int(self.headers["content-length"])))
                names.update(record_names(request))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Not on the terminal."""

        with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            self.environment = monkeypatch
            self.endpoint = f"http://127.0.0.1:{server.server_port}"
            yield
            server.shutdown()

    def exporters(self, service: str) -> Sequence[SpanExporter | TelemetrySink] | None:
        self.environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", self.endpoint)
        return telemetry_otlp.myelin_telemetry(TelemetryContext(service, ""))

    def unconfigured(self) -> Sequence[SpanExporter | TelemetrySink] | None:
        self.environment.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
        return telemetry_otlp.myelin_telemetry(TelemetryContext("myelin-worker", ""))

    def arrived(self) -> Collection[str]:
        return self.names
