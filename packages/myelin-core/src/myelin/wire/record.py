"""Data-plane records: one object on an edge, framed with magic, version, epoch and checked lengths.

Layout, little-endian, :data:`HEADER_BYTES` bytes::

    magic      4s   b"MYLN"
    version    u8   1
    kind       u8   RecordKind
    dtype      u8   PayloadType
    flags      u8   RecordFlags
    epoch      u32
    object_id  u64  which micro-batch or request this is
    sequence   u64  position in the edge's stream, from 0, without gaps
    rows       u32  shape of the payload
    columns    u32
    meta_len   u32  bytes of meta
    payload_len u64

then ``meta_len`` bytes of meta (a packed structure of the kind's own) and ``payload_len`` bytes of payload, and nothing
more.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from myelin.errors import WireError
from myelin.values import Epoch

MAGIC = b"MYLN"
VERSION = 1
_HEADER = struct.Struct("<4sBBBBIQQIIIQ")
HEADER_BYTES = _HEADER.size
MAX_META_BYTES = 1 << 24


class RecordKind(IntEnum):
    """What a record is."""

    SUBMIT = 1
    """Orchestrator → head: a new sequence (:class:`myelin.wire.requests.Submit`)."""
    CANCEL = 2
    """Orchestrator → head: end a sequence."""
    BATCH = 3
    """Stage → next stage: segments in meta, hidden rows as payload."""
    SAMPLES = 4
    """Tail → head: chosen tokens."""
    TOKENS = 5
    """Head → orchestrator: chosen tokens of running sequences."""
    FINISHED = 6
    """Head → orchestrator: a sequence has ended."""
    FAULT = 7
    """Any → upstream: a stage could not go on."""


class PayloadType(IntEnum):
    """Element type of a payload."""

    NONE = 0
    INT32 = 1
    FLOAT32 = 2
    FLOAT16 = 3
    BFLOAT16 = 4


ELEMENT_BYTES = {
    PayloadType.NONE: 0,
    PayloadType.INT32: 4,
    PayloadType.FLOAT32: 4,
    PayloadType.FLOAT16: 2,
    PayloadType.BFLOAT16: 2,
}


class RecordFlags(IntFlag):
    """Bits of a record."""

    NONE = 0
    PROBE = 1
    """Part of the pipeline probe."""


# Tables by plain number: calling an enumeration, or hashing its members, costs as much as the rest of a record's parse.
_KINDS = {int(kind): kind for kind in RecordKind}
_TYPES = {int(kind): kind for kind in PayloadType}
_SIZES = {int(kind): size for kind, size in ELEMENT_BYTES.items()}
_FLAGS = {bits: RecordFlags(bits) for bits in range(2)}


@dataclass(frozen=True, slots=True)
class Record:
    """One object on an edge. ``payload`` has ``rows * columns`` elements of ``dtype``."""

    kind: RecordKind
    epoch: Epoch
    object_id: int
    sequence: int
    meta: bytes | memoryview = b""
    payload: bytes | memoryview = b""
    dtype: PayloadType = PayloadType.NONE
    rows: int = 0
    columns: int = 0
    flags: RecordFlags = RecordFlags.NONE


def beginning(
    kind: RecordKind,
    epoch: Epoch,
    object_id: int,
    sequence: int,
    *,
    meta: bytes | memoryview = b"",
    dtype: PayloadType = PayloadType.NONE,
    rows: int = 0,
    columns: int = 0,
    flags: RecordFlags = RecordFlags.NONE,
) -> bytes:
    """The bytes of a record up to its payload, which is yet to come: ``rows * columns`` elements of ``dtype``.

    Raises:
        WireError: A number is out of range.
    """
    payload_bytes = rows * columns * _SIZES[dtype]
    try:
        return (
            _HEADER.pack(
                MAGIC,
                VERSION,
                kind,
                dtype,
                flags,
                epoch,
                object_id,
                sequence,
                rows,
                columns,
                meta.nbytes if isinstance(meta, memoryview) else len(meta),
                payload_bytes,
            )
            + meta
        )
    except struct.error as error:
        raise WireError(f"a {kind.name} record has a number out of range: {error}") from None


def pack(record: Record) -> bytes:
    """The bytes of a record.

    Raises:
        WireError: Its shape and payload contradict each other, or a number is out of range.
    """
    payload_bytes = memoryview(record.payload).nbytes
    if payload_bytes != record.rows * record.columns * _SIZES[record.dtype]:
        raise WireError(
            f"a {record.kind.name} record of {record.rows}×{record.columns} {record.dtype.name} "
            f"has {payload_bytes} bytes"
        )
    start = beginning(
        record.kind,
        record.epoch,
        record.object_id,
        record.sequence,
        meta=record.meta,
        dtype=record.dtype,
        rows=record.rows,
        columns=record.columns,
        flags=record.flags,
    )
    return b"".join((start, record.payload)) if payload_bytes else start


def unpack(message: bytes | memoryview) -> Record:
    """The record in ``message``; meta and payload are views into it.

    Raises:
        WireError: It is not exactly one well-formed record.
    """
    view = memoryview(message)
    if view.nbytes < HEADER_BYTES:
        raise WireError(f"a record of {view.nbytes} bytes is shorter than its header of {HEADER_BYTES}")
    magic, version, kind, dtype, flags, epoch, object_id, sequence, rows, columns, meta_len, payload_len = (
        _HEADER.unpack_from(view)
    )
    if magic != MAGIC:
        raise WireError(f"a record begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"a record of version {version} came to a node that speaks {VERSION}")
    if kind not in _KINDS:
        raise WireError(f"a record is of unknown kind {kind}")
    if dtype not in _TYPES:
        raise WireError(f"a record's payload is of unknown type {dtype}")
    if flags not in _FLAGS:
        raise WireError(f"a record has unknown flags: {flags:#x}")
    if meta_len > MAX_META_BYTES:
        raise WireError(f"a record's meta of {meta_len} bytes is above the limit of {MAX_META_BYTES}")
    if HEADER_BYTES + meta_len + payload_len != view.nbytes:
        raise WireError(f"a record of {view.nbytes} bytes claims {meta_len} of meta and {payload_len} of payload")
    if payload_len != rows * columns * _SIZES[dtype]:
        raise WireError(f"a record of {rows}×{columns} {_TYPES[dtype].name} claims a payload of {payload_len} bytes")
    body = view[HEADER_BYTES:]
    return Record(
        kind=_KINDS[kind],
        epoch=Epoch(epoch),
        object_id=object_id,
        sequence=sequence,
        meta=body[:meta_len],
        payload=body[meta_len:],
        dtype=_TYPES[dtype],
        rows=rows,
        columns=columns,
        flags=_FLAGS[flags],
    )
