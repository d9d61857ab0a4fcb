"""Data-plane records: round trips, and that damaged bytes give WireError and nothing else."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import WireError
from myelin.values import Epoch
from myelin.wire.record import (
    ELEMENT_BYTES,
    HEADER_BYTES,
    MAX_META_BYTES,
    PayloadType,
    Record,
    RecordFlags,
    RecordKind,
    pack,
    unpack,
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    dtype = draw(st.sampled_from(PayloadType))
    rows, columns = draw(st.integers(0, 8)), draw(st.integers(0, 8))
    size = rows * columns * ELEMENT_BYTES[dtype]
    return Record(
        kind=draw(st.sampled_from(RecordKind)),
        epoch=Epoch(draw(st.integers(0, 2**32 - 1))),
        object_id=draw(st.integers(0, 2**64 - 1)),
        sequence=draw(st.integers(0, 2**64 - 1)),
        meta=draw(st.binary(max_size=40)),
        payload=draw(st.binary(min_size=size, max_size=size)),
        dtype=dtype,
        rows=rows,
        columns=columns,
        flags=draw(st.sampled_from([RecordFlags.NONE, RecordFlags.PROBE])),
    )


def as_tuple(record: Record) -> tuple[object, ...]:
    return (
        record.kind, record.epoch, record.object_id, record.sequence, bytes(record.meta), bytes(record.payload),
        record.dtype, record.rows, record.columns, record.flags,
    )  # fmt: skip


@given(records())
def test_a_record_comes_back(record: Record) -> None:
    message = pack(record)
    assert len(message) == HEADER_BYTES + len(record.meta) + len(record.payload)
    assert as_tuple(unpack(message)) == as_tuple(record)


def test_the_layout_is_the_documented_one() -> None:
    record = Record(RecordKind.BATCH, Epoch(7), 8, 9, b"me", b"\1\2\3\4", PayloadType.FLOAT16, 1, 2, RecordFlags.PROBE)
    numbers = struct.pack("<QQIIIQ", 8, 9, 1, 2, 2, 4)
    assert pack(record) == b"MYLN\x01\x03\x03\x01\x07\x00\x00\x00" + numbers + b"me\1\2\3\4"
    assert HEADER_BYTES == 48


def test_payload_and_meta_are_views_into_the_message() -> None:
    message = pack(Record(RecordKind.BATCH, Epoch(1), 1, 1, b"meta", bytes(16), PayloadType.FLOAT32, 2, 2))
    record = unpack(message)
    assert isinstance(record.payload, memoryview)
    assert record.payload.obj is message
    assert isinstance(record.meta, memoryview)


def test_a_payload_may_be_any_buffer() -> None:
    view = memoryview(struct.pack("<4i", 1, 2, 3, 4)).cast("i")
    message = pack(Record(RecordKind.BATCH, Epoch(1), 1, 1, b"", view, PayloadType.INT32, 2, 2))
    assert bytes(unpack(message).payload) == view.tobytes()


@given(records())
def test_a_truncated_record_is_refused_at_every_byte(record: Record) -> None:
    message = pack(record)
    for length in range(len(message)):
        with pytest.raises(WireError):
            unpack(message[:length])
    with pytest.raises(WireError):
        unpack(message + b"\0")


@given(records(), st.data())
def test_a_flipped_bit_gives_a_record_or_a_wire_error(record: Record, data: st.DataObject) -> None:
    message = bytearray(pack(record))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << (bit % 8)
    try:
        found = unpack(bytes(message))
    except WireError:
        return
    assert pack(found) == bytes(message)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_record_or_a_wire_error(message: bytes) -> None:
    for candidate in (message, b"MYLN\x01" + message):
        try:
            found = unpack(candidate)
        except WireError:
            continue
        assert pack(found) == candidate


@given(records(), st.sampled_from(["rows", "columns", "meta_len", "payload_len"]), st.integers(0, 2**32 - 1))
def test_a_wrong_length_is_refused(record: Record, field: str, value: int) -> None:
    message = bytearray(pack(record))
    offset = {"rows": 28, "columns": 32, "meta_len": 36, "payload_len": 40}[field]
    old = message[offset : offset + 4]
    message[offset : offset + 4] = struct.pack("<I", value)
    if message[offset : offset + 4] == old:
        return
    try:
        found = unpack(bytes(message))
    except WireError:
        return
    # Only a shape may change without contradicting itself: one of an empty payload.
    assert field in ("rows", "columns")
    assert len(found.payload) == 0


def test_lengths_near_the_largest_number_are_refused() -> None:
    message = bytearray(pack(Record(RecordKind.CANCEL, Epoch(1), 1, 1)))
    message[40:48] = struct.pack("<Q", 2**64 - 1)
    with pytest.raises(WireError):
        unpack(bytes(message))
    message[40:48] = struct.pack("<Q", 0)
    message[36:40] = struct.pack("<I", MAX_META_BYTES + 1)
    with pytest.raises(WireError, match="limit"):
        unpack(bytes(message))


@pytest.mark.parametrize(
    ("offset", "value"), [(0, b"m"), (4, b"\x02"), (5, b"\x00"), (5, b"\x63"), (6, b"\x09"), (7, b"\x02"), (7, b"\x80")]
)
def test_unknown_marks_are_refused(offset: int, value: bytes) -> None:
    message = bytearray(pack(Record(RecordKind.CANCEL, Epoch(1), 1, 1)))
    message[offset : offset + 1] = value
    with pytest.raises(WireError):
        unpack(bytes(message))


@pytest.mark.parametrize(
    "record",
    [
        Record(RecordKind.BATCH, Epoch(1), 1, 1, b"", bytes(15), PayloadType.FLOAT32, 2, 2),
        Record(RecordKind.BATCH, Epoch(1), 1, 1, b"", bytes(4), PayloadType.NONE, 1, 1),
        Record(RecordKind.CANCEL, Epoch(1), 2**64, 1),
        Record(RecordKind.CANCEL, Epoch(-1), 1, 1),
        Record(RecordKind.CANCEL, Epoch(1), 1, 1, rows=2**32),
    ],
)
def test_a_contradictory_record_is_not_packed(record: Record) -> None:
    with pytest.raises(WireError):
        pack(record)
