"""What was said during a run, by whom: the last lines of the orchestrator, of every node and of the provider.

A bounded ring that anybody may read and follow. Writing to it never waits: a follower who is too slow misses lines, and
is told how many. Structured lines (JSON with a ``level``, as our workers write them) are read for their level, their
time and the span that they belong to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import Span

from myelin.telemetry import attributes
from myelin.telemetry.redaction import Redactor

if TYPE_CHECKING:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    from myelin.telemetry.otlp_metrics import Attributes

KEPT_ENTRIES = 10_000
FOLLOWER_ENTRIES = 2_000
"""What a follower may lag behind before it misses lines."""
LONGEST_TEXT = 8_192
LEVELS = ("debug", "info", "warning", "error")
_SEVERITIES = {"debug": 5, "info": 9, "warning": 13, "error": 17}
"""OTLP's severity numbers."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line.

    Attributes:
        time: Unix seconds.
        node: Who said it; ``orchestrator`` for ourselves.
        stream: How: ``stdout``, ``stderr``, ``provider``, ``log`` (our own), ``phase``.
        level: ``debug``, ``info``, ``warning`` or ``error``.
        text: What; at most 8,192 characters, without secrets.
        trace_id, span_id: Of the span in which it was said, in hex; empty where there was none.
    """

    time: float
    node: str
    stream: str
    level: str
    text: str
    trace_id: str = ""
    span_id: str = ""


class Logbook:
    """See the module's text. :meth:`add` may be called from any thread.

    Args:
        redactor: Takes secrets out of every text.
        kept: Lines that are remembered.

    Attributes:
        added: Lines that were ever added.
        missed: Lines that followers were too slow for.
    """

    def __init__(self, redactor: Redactor | None = None, *, kept: int = KEPT_ENTRIES) -> None:
        self.added = 0
        self.missed = 0
        self._redactor = redactor or Redactor()
        self._entries: deque[LogEntry] = deque(maxlen=kept)
        self._followers: list[_Follower] = []
        self._taker: Callable[[LogEntry], object] | None = None
        self._lock = threading.Lock()

    def hand_over(self, taker: Callable[[LogEntry], object] | None) -> None:
        """Have each entry handed to ``taker``, too, in the thread that adds it; it must return at once."""
        self._taker = taker

    def add(self, entry: LogEntry) -> None:
        """Note a line."""
        text = entry.text if len(entry.text) <= LONGEST_TEXT else entry.text[: LONGEST_TEXT - 1] + "…"
        clean = self._redactor.text(text)
        if clean is not entry.text:
            entry = LogEntry(entry.time, entry.node, entry.stream, entry.level, clean, entry.trace_id, entry.span_id)
        with self._lock:
            self.added += 1
            self._entries.append(entry)
            for follower in self._followers:
                if not follower.put(entry):
                    self.missed += 1
        if self._taker is not None:
            self._taker(entry)

    def line(self, node: str, stream: str, text: str, *, offset_s: float = 0.0) -> None:
        """Note a line that a node wrote just now; its own clock is ``offset_s`` ahead of ours."""
        self.add(entry_of_line(node, stream, text, time.time(), offset_s))

    def recent(self, count: int = KEPT_ENTRIES) -> tuple[LogEntry, ...]:
        """The last ``count`` lines, oldest first."""
        with self._lock:
            entries = tuple(self._entries)
        return entries[-count:] if count > 0 else ()

    async def subscribe(self, *, recent: int = 0) -> AsyncGenerator[LogEntry, None]:
        """Lines as they are added, after the last ``recent`` ones. Ends when it is closed."""
        follower = _Follower(asyncio.get_running_loop())
        with self._lock:
            before = tuple(self._entries)[-recent:] if recent > 0 else ()
            self._followers.append(follower)
        try:
            for entry in before:
                yield entry
            while True:
                for entry in await follower.take():
                    yield entry
        finally:
            with self._lock:
                self._followers.remove(follower)


class _Follower:
    """A bounded queue from any thread to one task."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._entries: deque[LogEntry] = deque()
        self._more = asyncio.Event()
        self._woken = False

    def put(self, entry: LogEntry) -> bool:
        if len(self._entries) >= FOLLOWER_ENTRIES:
            return False
        self._entries.append(entry)
        if not self._woken:  # one call into the loop for many lines
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._more.set)
            except RuntimeError:
                pass  # the loop has ended: nobody reads any more
        return True

    async def take(self) -> list[LogEntry]:
        await self._more.wait()
        self._more.clear()
        self._woken = False
        taken = []
        while self._entries:
            taken.append(self._entries.popleft())
        return taken


def entry_of_line(node: str, stream: str, text: str, when: float, offset_s: float = 0.0) -> LogEntry:
    """What a line of a node's output says. Pure.

    A structured line keeps its own level, its own time (by our clock), and the ids of its span; its text is the event
    with its other fields.
    """
    if text.startswith('{"') and '"level"' in text:
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            told = None
        if isinstance(told, dict) and told.get("level") in LEVELS:
            return _structured(node, stream, told, when, offset_s)
    level = "warning" if stream == "stderr" else "info"
    return LogEntry(when, node, stream, level, text)


_NOT_SHOWN = frozenset({"level", "timestamp", "event", "node", "attempt", "trace_id", "span_id"})


def _structured(node: str, stream: str, told: dict[str, object], when: float, offset_s: float) -> LogEntry:
    rest = " ".join(f"{key}={value}" for key, value in told.items() if key not in _NOT_SHOWN)
    text = f"{told.get('event', '')} {rest}".strip()
    try:
        when = datetime.fromisoformat(str(told["timestamp"]).replace("Z", "+00:00")).timestamp() - offset_s
    except (KeyError, ValueError):
        pass
    return LogEntry(
        when, node, stream, str(told["level"]), text, _hex(told.get("trace_id"), 32), _hex(told.get("span_id"), 16)
    )


def _hex(value: object, digits: int) -> str:
    text = str(value or "")
    return text if len(text) == digits and all(each in "0123456789abcdef" for each in text) else ""


def span_ids(span: Span | None = None) -> tuple[str, str]:
    """The trace and span ids of a span, or of the current one, in hex; empty where there is none."""
    context = (span or trace.get_current_span()).get_span_context()
    return (f"{context.trace_id:032x}", f"{context.span_id:016x}") if context.is_valid else ("", "")


class LogbookHandler(logging.Handler):
    """Brings what this process says through :mod:`logging` into the logbook."""

    def __init__(self, logbook: Logbook, node: str, level: int = logging.INFO) -> None:
        super().__init__(level)
        self._logbook = logbook
        self._node = node

    def emit(self, record: logging.LogRecord) -> None:
        """Note one record."""
        try:
            level = next(
                (name for name in reversed(LEVELS) if record.levelno >= getattr(logging, name.upper())), "debug"
            )
            text = f"{record.name}: {record.getMessage()}"
            self._logbook.add(LogEntry(record.created, self._node, "log", level, text, *span_ids()))
        except Exception:  # a log line must not end what it tells of
            self.handleError(record)


def logs_request(
    groups: Iterable[tuple[Attributes, Iterable[LogEntry]]], version: str = ""
) -> ExportLogsServiceRequest:
    """One OTLP request of entries, grouped by the resource that they are of."""
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.logs.v1.logs_pb2 import SeverityNumber

    from myelin.telemetry.otlp_metrics import set_attributes

    request = ExportLogsServiceRequest()
    for resource, entries in groups:
        part = request.resource_logs.add()
        set_attributes(part.resource.attributes, resource)
        scope = part.scope_logs.add()
        scope.scope.name, scope.scope.version = "myelin", version
        for entry in entries:
            record = scope.log_records.add()
            record.time_unix_nano = record.observed_time_unix_nano = int(entry.time * 1e9)
            record.severity_number = SeverityNumber.ValueType(_SEVERITIES.get(entry.level, 9))
            record.severity_text = entry.level.upper()
            record.body.string_value = entry.text
            set_attributes(record.attributes, {attributes.NODE: entry.node, attributes.LOG_STREAM: entry.stream})
            if entry.trace_id and entry.span_id:
                record.trace_id, record.span_id = bytes.fromhex(entry.trace_id), bytes.fromhex(entry.span_id)
    return request
