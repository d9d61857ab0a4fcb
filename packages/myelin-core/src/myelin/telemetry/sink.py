"""What takes telemetry out of a run: the contract of sinks.

A plugin's hook ``myelin_telemetry`` gives OpenTelemetry's own span exporters, which take spans alone, or sinks of the
kind below, which take OTLP requests of whichever signals they name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from myelin.telemetry.signals import Signal

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from myelin.telemetry.signals import OtlpRequest


@dataclass(frozen=True, slots=True)
class SinkCheck:
    """What a preflight found out about a sink.

    Attributes:
        sink: Its name.
        connected: Whether what it writes to could be reached; None where that can't be told apart from sending.
        sent: Whether the synthetic event was handed over.
        observed: Whether the other end said that it has it.
        detail: For people: where it writes to, or what went wrong.
    """

    sink: str
    connected: bool | None
    sent: bool
    observed: bool
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether telemetry arrives."""
        return self.observed


class TelemetrySink(ABC):
    """Takes OTLP requests somewhere.

    It is called from one thread of its own, one call at a time, so that it may block: requests that come meanwhile wait
    in a bounded queue, and are dropped and counted where that is full. Whatever becomes of a sink, the run goes on.

    Attributes:
        name: For people, and for the counters of what was dropped.
        signals: What it wants to be given.
    """

    name: str = "sink"
    signals: frozenset[Signal] = frozenset({Signal.TRACES})

    @abstractmethod
    def export(self, signal: Signal, request: OtlpRequest) -> bool:
        """Take a request; whether it is safe where it should be. After :meth:`close` it is False. Must not raise.

        The request is shared with other sinks and must not be changed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of files, connections and threads. May be called from another thread while :meth:`export` blocks,
        which should return soon then. Twice is fine."""

    def hurry(self) -> None:
        """The run is ending: :meth:`export` shouldn't wait for another try any more. Called from another thread."""
        return

    def check(self, signal: Signal, request: OtlpRequest, timeout_s: float) -> SinkCheck:
        """Preflight: hand over a synthetic event and see whether it arrives. Must not raise."""
        taken = self.export(signal, request)
        return SinkCheck(self.name, None, taken, taken)


class SpanExporterSink(TelemetrySink):
    """A span exporter of OpenTelemetry's SDK as a sink: spans from nodes reach it as if they had ended here."""

    signals = frozenset({Signal.TRACES})

    def __init__(self, exporter: SpanExporter) -> None:
        self.name = type(exporter).__name__
        self._exporter = exporter
        self._closed = False

    def export(self, signal: Signal, request: OtlpRequest) -> bool:
        """Hand the spans over."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        from myelin.telemetry.otlp_spans import readable_spans

        if self._closed or signal is not Signal.TRACES:
            return False
        return self._exporter.export(readable_spans(request)) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Shut the exporter down."""
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()


def as_sinks(given: Sequence[SpanExporter | TelemetrySink]) -> tuple[TelemetrySink, ...]:
    """Sinks, whatever the hook gave."""
    return tuple(each if isinstance(each, TelemetrySink) else SpanExporterSink(each) for each in given)
