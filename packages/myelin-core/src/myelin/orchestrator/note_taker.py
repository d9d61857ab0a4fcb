"""An observer that writes what it is told into the logbook, and passes it on."""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.trace import Span

from myelin.orchestrator.events import NodeEvent, NodeLog, Observer, PhaseEvent, ProgressEvent
from myelin.telemetry.logbook import Logbook, LogEntry, span_ids
from myelin.transport.contract import ORCHESTRATOR
from myelin.values import NodeId


class NoteTaker:
    """An observer that notes lines and phases in the logbook, and passes everything on. ``root`` is the run's span."""

    def __init__(self, inner: Observer, logbook: Logbook, offset: Callable[[NodeId], float]) -> None:
        self.root: Span | None = None
        self._offset = offset
        self._inner = inner
        self._logbook = logbook

    def phase(self, event: PhaseEvent) -> None:
        """A phase began or ended."""
        took = f" after {event.seconds:.3f} s" if event.state != "started" else ""
        text = f"{event.phase} {event.state}{took}" + (f": {event.detail}" if event.detail else "")
        level = "error" if event.state == "failed" else "info"
        self._logbook.add(LogEntry(time.time(), str(ORCHESTRATOR), "phase", level, text, *span_ids(self.root)))
        self._inner.phase(event)

    def progress(self, event: ProgressEvent) -> None:
        """A node got further."""
        self._inner.progress(event)

    def node(self, event: NodeEvent) -> None:
        """An attempt came into another state."""
        level = "warning" if event.state.value == "lost" else "info"
        text = f"attempt {event.attempt} {event.state.value}" + (f": {event.detail}" if event.detail else "")
        self._logbook.add(LogEntry(time.time(), str(event.node), "phase", level, text, *span_ids(self.root)))
        self._inner.node(event)

    def log(self, event: NodeLog) -> None:
        """A node wrote a line."""
        self._logbook.line(str(event.node), event.stream, event.text, offset_s=self._offset(event.node))
        self._inner.log(event)
