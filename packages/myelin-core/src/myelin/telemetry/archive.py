"""The file archive: spans as OTLP JSON lines, as the OpenTelemetry collector's file exporter writes them.

Each batch is one line, an ``ExportTraceServiceRequest`` in OTLP's JSON mapping: lowerCamelCase keys, enums as numbers,
64-bit numbers as strings, and (unlike protobuf's own mapping) trace and span ids as lowercase hex. Ordinary tools read
it.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from myelin.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_log = logging.getLogger(__name__)
_ID_KEYS = frozenset({"traceId", "spanId", "parentSpanId"})


class ArchiveExporter(SpanExporter):
    """Appends batches of spans to a file. Several processes may append to one file of a local file system.

    Raises:
        ConfigError: The file can't be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"the trace file {path} cannot be written: {error.strerror}",
                "name another file, or a folder that exists",
                reason="trace-file",
            ) from None
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append ``spans`` as one line, written at once."""
        line = encode_line(spans)
        with self._lock:
            if self._file.closed:
                return SpanExportResult.FAILURE
            try:
                self._file.write(line)
            except OSError as error:
                _log.warning("spans could not be written to the trace file: %s", error)
                return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file; twice is fine."""
        with self._lock:
            self._file.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is held back."""
        return True


def encode_line(spans: Sequence[ReadableSpan]) -> bytes:
    """One line of the archive, newline included."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    document = _with_hex_ids(MessageToDict(encode_spans(spans), use_integers_for_enums=True))
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _with_hex_ids(value: Any, key: str = "") -> Any:
    """Protobuf's JSON writes bytes in base64; OTLP wants ids in hex."""
    if isinstance(value, dict):
        return {name: _with_hex_ids(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_hex_ids(item) for item in value]
    if key in _ID_KEYS:
        return base64.b64decode(value).hex()
    return value
