"""A worker's log: structured lines on standard error. Standard output is for the announcement alone.

structlog is imported with the first line that is written, after the announcement: a node is dialled sooner.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

from opentelemetry import trace

FORMAT_VARIABLE = "MYELIN_LOG_FORMAT"
"""``json`` or ``plain``; the default is ``plain`` on a terminal and ``json`` elsewhere."""


class WorkerLog:
    """Writes one line for an event, with the node's name and attempt on each.

    Args:
        fields: On every line.
        environment: Where :data:`FORMAT_VARIABLE` is looked for.
        stream: Where the lines go; standard error as it is when a line is written, if None.
    """

    def __init__(self, fields: Mapping[str, Any], environment: Mapping[str, str], stream: TextIO | None = None) -> None:
        self._fields = dict(fields)
        self._format = environment.get(FORMAT_VARIABLE, "").strip().lower()
        self._stream = stream
        self._logger: Any = None

    def info(self, event: str, **fields: Any) -> None:
        """Something happened as it should."""
        self._bound().info(event, **fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something went wrong that this node can live with."""
        self._bound().warning(event, **fields)

    def error(self, event: str, *, error: BaseException | None = None, **fields: Any) -> None:
        """Something failed; with ``error``, its traceback is written, too."""
        self._bound().error(event, exc_info=error, **fields)

    def _bound(self) -> Any:
        if self._logger is None:
            import structlog

            stream = self._stream or sys.stderr
            plain = self._format == "plain" or (self._format != "json" and stream.isatty())
            ending = (
                [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)]
                if plain
                else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
            )
            self._logger = structlog.wrap_logger(
                structlog.WriteLogger(stream),
                processors=[
                    _with_span,
                    structlog.processors.add_log_level,
                    structlog.processors.TimeStamper(fmt="iso", utc=True),
                    *ending,
                ],
                wrapper_class=structlog.BoundLogger,
                **self._fields,
            )
        return self._logger


def _with_span(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Name the span in which a line is written, where there is one that somebody sees."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"], event["span_id"] = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    return event


class LibraryLogs(logging.Handler):
    """Brings what libraries say through :mod:`logging` into the worker's own log."""

    def __init__(self, log: WorkerLog, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as one line."""
        try:
            error = record.exc_info[1] if record.exc_info else None
            if record.levelno >= logging.ERROR:
                self._log.error(record.getMessage(), error=error, logger=record.name)
            else:
                self._log.warning(record.getMessage(), logger=record.name)
        except Exception:  # a log line must not end what it tells of
            self.handleError(record)
