"""Frames: whole again however the bytes are cut, and nothing believed that was not checked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import WireError
from myelin.transport.frames import (
    ALIVE_FRAME,
    BUFFER_BYTES,
    CLOSE_FRAME,
    HEADER_BYTES,
    FrameKind,
    FrameReader,
    header,
    open_frame,
    read_open,
)

LIMIT = 300_000


def feed(reader: FrameReader, data: bytes, cuts: list[int]) -> list[tuple[FrameKind, bytes]]:
    """What ``data`` comes to when it arrives in pieces of at most the given sizes, by turns."""
    frames, turn = [], 0
    view = memoryview(data)
    while view:
        room = reader.room()
        count = min(len(view), len(room), cuts[turn % len(cuts)])
        assert count > 0
        room[:count] = view[:count]
        view = view[count:]
        reader.wrote(count)
        while (frame := reader.next()) is not None:
            frames.append(frame)
        turn += 1
    return frames


SIZES = st.one_of(
    st.integers(0, 40),
    st.sampled_from([BUFFER_BYTES - HEADER_BYTES - 1, BUFFER_BYTES - HEADER_BYTES, BUFFER_BYTES - HEADER_BYTES + 1]),
    st.integers(0, LIMIT),
)


@given(st.lists(SIZES, max_size=8), st.lists(st.integers(1, 200_000), min_size=1, max_size=5))
def test_messages_are_whole_again_however_they_were_cut(sizes: list[int], cuts: list[int]) -> None:
    bodies = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    data = b"".join(header(FrameKind.MESSAGE, len(body)) + body + ALIVE_FRAME for body in bodies) + CLOSE_FRAME
    cuts = [cut if len(data) < 5000 else max(cut, 500) for cut in cuts]
    frames = feed(FrameReader(LIMIT, hold=LIMIT), data, cuts)
    assert [body for kind, body in frames if kind is FrameKind.MESSAGE] == bodies
    assert [kind for kind, _ in frames].count(FrameKind.ALIVE) == len(bodies)
    assert frames[-1] == (FrameKind.CLOSE, b"")


@given(st.binary(min_size=HEADER_BYTES, max_size=400))
def test_anything_is_read_or_refused(data: bytes) -> None:
    """And what is made for it stays within the limit."""
    reader = FrameReader(1000, hold=1000)
    try:
        frames = feed(reader, data, [len(data)])
    except WireError:
        return
    assert all(len(body) <= 1000 for _, body in frames)
    assert len(reader.room()) <= BUFFER_BYTES


@pytest.mark.parametrize(
    ("kind", "length"),
    [(0, 0), (99, 3), (int(FrameKind.MESSAGE), 1001), (int(FrameKind.MESSAGE), 0xFFFF_FFFF), (int(FrameKind.CLOSE), 1)],
)
def test_a_bad_header_is_refused_before_its_body_comes(kind: int, length: int) -> None:
    data = length.to_bytes(4, "little") + bytes([kind, 0, 0, 0])
    with pytest.raises(WireError):
        feed(FrameReader(1000, hold=1000), data, [100])


def test_reserved_bytes_must_be_zero() -> None:
    with pytest.raises(WireError):
        feed(FrameReader(1000, hold=1000), header(FrameKind.ALIVE, 0)[:-1] + b"\x01", [100])


def test_a_large_frame_is_held_until_it_may_come() -> None:
    reader = FrameReader(LIMIT, hold=100)
    small, large = b"s" * 100, b"l" * 5000
    data = b"".join(header(FrameKind.MESSAGE, len(body)) + body for body in (small, large, small))
    assert feed(reader, data, [len(data)]) == [(FrameKind.MESSAGE, small)]
    assert reader.held
    reader.hold = LIMIT
    assert reader.next() == (FrameKind.MESSAGE, large)
    assert reader.next() == (FrameKind.MESSAGE, small)
    assert reader.next() is None
    assert not reader.held


def test_a_held_frame_takes_no_memory_of_its_own() -> None:
    reader = FrameReader(1 << 30, hold=100)
    assert feed(reader, header(FrameKind.MESSAGE, 1 << 30) + b"x" * 50, [1000]) == []
    assert reader.held
    assert len(reader.room()) < BUFFER_BYTES


def test_the_greeting_names_the_protocol() -> None:
    frame = open_frame("myelin/edge/1")
    assert feed(FrameReader(1000, hold=1000), frame, [7]) == [(FrameKind.OPEN, frame[HEADER_BYTES:])]
    assert read_open(frame[HEADER_BYTES:]) == "myelin/edge/1"


@pytest.mark.parametrize(
    "body", [b"", b"MYTC\x02name", b"GET / HTTP/1.1", b"MYTC\x01\xff\xfe", b"MYTC\x01" + b"x" * 256]
)
def test_another_greeting_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        read_open(body)


def test_a_name_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(WireError):
        open_frame("x" * 256)
