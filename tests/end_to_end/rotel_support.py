"""A real OTLP collector for tests: `rotel`, whose debug log tells what it received, and the reader of that."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path


def agent() -> Path | None:
    """The collector's program; None where the package isn't installed."""
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "rotel-agent"
    return path if path.exists() else None


@dataclass
class Span:
    """A span as the collector shows it."""

    service: str
    name: str = ""
    trace: str = ""
    id: str = ""
    parent: str = ""
    kind: str = ""
    start: int = 0
    end: int = 0
    status: str = ""
    attributes: dict[str, str] = field(default_factory=dict)

    def within(self, other: Span) -> bool:
        return other.start <= self.start <= self.end <= other.end


@dataclass
class Received:
    """What came: spans, names of metrics by service, bodies of log records by service."""

    spans: list[Span]
    metrics: dict[str, set[str]]
    logs: dict[str, list[str]]


def free_port() -> int:
    """A port below those that the kernel gives to whoever asks for any: nobody is given it before it is used."""
    while True:
        port = random.randrange(12_000, 30_000)
        with closing(socket.socket()) as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


@dataclass
class Collector:
    """A running collector."""

    http: str
    grpc: str
    _process: subprocess.Popen[bytes]
    _output: Path

    def received(self) -> Received:
        """All that it shows, once it has ended."""
        self._process.terminate()
        self._process.wait(timeout=60)
        return read(self._output.read_text("utf-8", "replace"))


@contextmanager
def rotel(folder: Path) -> Iterator[Collector]:
    """A collector on loopback, for as long as the block lasts."""
    program = agent()
    assert program is not None
    http, grpc = free_port(), free_port()
    output = folder / "rotel.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [
                *(program, "start", "--exporter", "blackhole", "--disable-batching"),
                *("--otlp-http-endpoint", f"127.0.0.1:{http}", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}"),
                *("--debug-log", "traces", "--debug-log", "metrics", "--debug-log", "logs"),
                *("--debug-log-verbosity", "detailed"),
            ],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "ROTEL_"))},
        )
    try:
        for port in (http, grpc):
            _wait_for(port)
        yield Collector(f"http://127.0.0.1:{http}", f"http://127.0.0.1:{grpc}", process, output)
    finally:
        process.kill()
        process.wait(timeout=60)


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"the collector does not listen on {port}")


_SPAN_FIELDS = {"Trace ID": "trace", "Parent ID": "parent", "ID": "id", "Name": "name", "Kind": "kind"}


def read(shown: str) -> Received:
    """The collector's debug log, read line by line."""
    received = Received([], {}, {})
    service, span = "", None
    attributes: dict[str, str] = {}
    for line in shown.splitlines():
        text = line.strip()
        if re.match(r"Resource(Spans|Metrics?|Logs?) #", text):
            service, span, attributes = "", None, {}
        elif re.match(r"Span #\d+$", text):
            span = Span(service)
            attributes = span.attributes
            received.spans.append(span)
        elif text.startswith("-> "):
            key, _, value = text[3:].partition(": ")
            kind, _, inner = value.partition("(")
            attributes[key] = inner.removesuffix(")") if kind else value
            if key == "service.name":
                service = attributes[key]
            elif key == "Name" and span is None:
                received.metrics.setdefault(service, set()).add(value)
        elif text.startswith("Body: Str("):
            received.logs.setdefault(service, []).append(text[10:-1])
        elif span is not None:
            name, _, value = (part.strip() for part in text.partition(":"))
            if name in _SPAN_FIELDS and not getattr(span, _SPAN_FIELDS[name]):
                setattr(span, _SPAN_FIELDS[name], value)
            elif name in ("Start time", "End time"):
                setattr(span, "start" if name == "Start time" else "end", int(value))
            elif name == "Status code":
                span.status = value
            elif text.startswith(("Events", "Links", "Span Event", "SpanEvent", "Event #", "SpanLink", "Link #")):
                attributes = {}
    return received
