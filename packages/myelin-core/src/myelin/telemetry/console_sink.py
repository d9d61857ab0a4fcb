"""Telemetry on standard error, as OTLP JSON lines: for whoever wants to see it without any collector."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from myelin.telemetry.archive import encode_line
from myelin.telemetry.signals import Signal
from myelin.telemetry.sink import TelemetrySink

if TYPE_CHECKING:
    from myelin.telemetry.signals import OtlpRequest


class ConsoleSink(TelemetrySink):
    """Writes each request as one line."""

    name = "console"

    def __init__(self, signals: Collection[Signal]) -> None:
        self.signals = frozenset(signals)
        self._closed = False

    def export(self, signal: Signal, request: OtlpRequest) -> bool:
        """Write it."""
        if self._closed or signal not in self.signals:
            return False
        try:
            sys.stderr.write(encode_line(request).decode())
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it, or it is closed
            return False
        return True

    def close(self) -> None:
        """Write no more."""
        self._closed = True
