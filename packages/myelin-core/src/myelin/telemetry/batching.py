"""Finished spans in batches to one place, from a bounded queue whose losses are counted.

The SDK's own batch processor drops without counting, and waits 5 s before anything is seen. The standard variables
(``OTEL_BSP_SCHEDULE_DELAY``, ``OTEL_BSP_MAX_QUEUE_SIZE``, ``OTEL_BSP_MAX_EXPORT_BATCH_SIZE``) mean what they mean
there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SpanExportResult

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_log = logging.getLogger(__name__)
DELAY_MS = 1000
QUEUE_SPANS = 8192
BATCH_SPANS = 512


class BatchProcessor(SpanProcessor):
    """Hands finished spans to an exporter from a daemon thread.

    Attributes:
        dropped: Spans that found the queue full, or that the exporter did not take.
    """

    def __init__(self, exporter: SpanExporter, environment: Mapping[str, str] = os.environ) -> None:
        self.dropped = 0
        self._exporter = exporter
        self._delay_s = _number(environment, "OTEL_BSP_SCHEDULE_DELAY", DELAY_MS) / 1000
        self._most = _number(environment, "OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SPANS)
        self._batch = min(self._most, _number(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH_SPANS))
        self._spans: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._exporting = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="myelin-spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span that has ended. Never blocks."""
        context = span.context
        if self._closed or context is None or not context.trace_flags.sampled:
            return
        if len(self._spans) >= self._most:
            self.dropped += 1
            return
        self._spans.append(span)
        if len(self._spans) >= self._batch:
            self._wake.set()

    def flush(self) -> None:
        """Export what there is, now, in this thread."""
        with self._exporting:
            while self._spans:
                batch = [self._spans.popleft() for _ in range(min(self._batch, len(self._spans)))]
                try:
                    taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
                except Exception as error:  # whatever becomes of a sink, the run goes on
                    _log.warning("spans could not be exported: %s: %s", type(error).__name__, error)
                    taken = False
                if not taken:
                    self.dropped += len(batch)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """See :meth:`flush`."""
        self.flush()
        return True

    def shutdown(self) -> None:
        """Export what there is, then end the exporter. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self.flush()
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            self.flush()


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    try:
        value = int(environment.get(name, ""))
    except ValueError:
        return default
    return value if value > 0 else default
