"""The journal of a cache file: which ranges of it are there, each with a checksum. Only ever appended to.

Several processes append to one journal at once: each record is one ``write`` to a file opened for appending, which
local file systems don't interleave. A record is 32 bytes, little-endian::

    u32 kind (1 there, 2 dropped), u32 CRC-32 of the range's bytes, u64 start, u64 end, u32 CRC-32 of the 24 bytes
    before, u32 zero

What isn't such a record (a write that a full disk cut short, zeros that a power failure left) is passed over. A range
is written to the file before its record is, and its checksum is compared before its first use by any process that did
not fetch it itself: a record that outlived its bytes costs another fetch, never a wrong weight.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

RECORD_BYTES = 32
_BODY = struct.Struct("<IIQQ")
_RECORD = struct.Struct("<IIQQII")


class Kind(IntEnum):
    """What a record says of its range."""

    THERE = 1
    DROPPED = 2


@dataclass(frozen=True, slots=True)
class Record:
    """One record: ``[start, end)`` of the file, and the CRC-32 of its bytes."""

    kind: Kind
    start: int
    end: int
    checksum: int

    def pack(self) -> bytes:
        """Its 32 bytes."""
        body = _BODY.pack(self.kind, self.checksum, self.start, self.end)
        return body + struct.pack("<II", zlib.crc32(body), 0)


def records(data: bytes, size: int) -> Iterator[Record]:
    """The records in ``data`` (which begins at a record) of a file of ``size`` bytes; nonsense is passed over."""
    for at in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        kind, checksum, start, end, check, _ = _RECORD.unpack_from(data, at)
        if zlib.crc32(data[at : at + _BODY.size]) != check:
            continue
        if kind in (Kind.THERE, Kind.DROPPED) and 0 <= start < end <= size:
            yield Record(Kind(kind), start, end, checksum)
