"""A container's output as the daemon sends it: frames of bytes, each of one stream, and with its time. Pure.

Source: Docker Engine API, «Stream format» of ``POST /containers/{id}/attach``: eight bytes of header (the stream's
number, three zeros, the length as a big-endian 32-bit number), then the payload. With ``timestamps`` each payload
begins with the time (RFC 3339, nanoseconds, UTC) and a blank.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from datetime import datetime

from myelin.plugin import LogLine, parse_announcement

_HEADER = struct.Struct(">BxxxL")
_STREAMS = {1: "stdout", 2: "stderr"}
MAX_FRAME_BYTES = 1 << 20
"""The daemon cuts lines at 16 KiB; a longer frame by far is not one."""


def frames(read: Callable[[int], bytes]) -> Iterator[tuple[str, bytes]]:
    """Stream and payload of each frame that ``read(count)`` gives, until it ends, or gives what is no frame."""
    while True:
        header = _exactly(read, _HEADER.size)
        if len(header) < _HEADER.size:
            return
        number, length = _HEADER.unpack(header)
        if number not in _STREAMS or length > MAX_FRAME_BYTES:
            return
        payload = _exactly(read, length)
        if len(payload) < length:
            return
        yield _STREAMS[number], payload


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    """``count`` bytes, or what there is before the end."""
    pieces: list[bytes] = []
    while count > 0 and (piece := read(count)):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def log_line(stream: str, payload: bytes) -> LogLine | None:
    """The line in a frame with a time; None for a worker's announcement, which is not meant for people."""
    told, _, text = payload.decode(errors="replace").partition(" ")
    line = text.rstrip("\r\n").replace("\n", " ")
    if stream == "stdout" and parse_announcement(line) is not None:
        return None
    return LogLine(stream, line, unix_time(told))


def unix_time(text: str) -> float:
    """Seconds since 1970 of an RFC 3339 time in UTC with up to nine decimals; 0.0 where it is none."""
    whole, _, decimals = text.rstrip("Z").partition(".")
    try:
        return datetime.fromisoformat(f"{whole}+00:00").timestamp() + (float(f"0.{decimals}") if decimals else 0.0)
    except ValueError:
        return 0.0
