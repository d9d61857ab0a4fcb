"""The file archive: OTLP JSON lines, as the OpenTelemetry collector's file exporter writes them.

Each request is one line, in OTLP's JSON mapping: lowerCamelCase keys, enums as numbers, 64-bit numbers as strings, and
(unlike protobuf's own mapping) trace and span ids as lowercase hex. Ordinary tools read it.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myelin.errors import ConfigError
from myelin.telemetry.signals import Signal
from myelin.telemetry.sink import SinkCheck, TelemetrySink

if TYPE_CHECKING:
    from io import FileIO

    from myelin.telemetry.signals import OtlpRequest

_log = logging.getLogger(__name__)
_ID_KEYS = frozenset({"traceId", "spanId", "parentSpanId"})
KEPT_FILES = 3
"""Older files that are kept beside the current one: ``name.1`` is the latest of them."""


class ArchiveSink(TelemetrySink):
    """Appends requests to a file, one a line. A line that doesn't fit on the disk is left out as a whole, and counted.

    Args:
        path: Where.
        signals: Which signals.
        most_bytes: The file is put aside as ``path.1`` before it would grow above this; 0 lets it grow.
        name: For people.

    Raises:
        ConfigError: The file can't be written.
    """

    def __init__(
        self,
        path: Path,
        signals: Collection[Signal] = (Signal.TRACES,),
        *,
        most_bytes: int = 0,
        name: str = "trace-file",
    ) -> None:
        self.name = name
        self.signals = frozenset(signals)
        self._path = path
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._complained = False
        try:
            self._file: FileIO = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"the {name.replace('-', ' ')} {path} cannot be written: {error.strerror}",
                "name another file, or a folder that exists",
                reason=name,
            ) from None

    def export(self, signal: Signal, request: OtlpRequest) -> bool:
        """Append ``request`` as one line."""
        if signal not in self.signals:
            return False
        line = encode_line(request)
        with self._lock:
            if self._file.closed:
                return False
            try:
                self._append(line)
            except OSError as error:
                if not self._complained:
                    self._complained = True
                    _log.warning("telemetry could not be written to %s: %s", self._path, error.strerror)
                return False
        return True

    def _append(self, line: bytes) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if self._most_bytes and size and size + len(line) > self._most_bytes:
            self._rotate()
            size = 0
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            if len(rest) < len(line):  # half a line would spoil the one after it
                self._file.truncate(size)
            raise

    def _rotate(self) -> None:
        for number in range(KEPT_FILES, 0, -1):
            older = self._path if number == 1 else self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        fresh = self._path.open("ab", buffering=0)
        self._file.close()
        self._file = fresh

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def check(self, signal: Signal, request: OtlpRequest, timeout_s: float) -> SinkCheck:
        """Write the synthetic event; it has arrived when the file holds it."""
        taken = self.export(signal, request)
        return SinkCheck(self.name, True, taken, taken, str(self._path))

    def close(self) -> None:
        """Close the file; twice is fine."""
        with self._lock:
            self._file.close()


def encode_line(request: OtlpRequest) -> bytes:
    """One line of the archive, newline included."""
    from google.protobuf.json_format import MessageToDict

    document = _with_hex_ids(MessageToDict(request, use_integers_for_enums=True))
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
