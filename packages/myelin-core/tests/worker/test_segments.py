"""BATCH and SAMPLES metas: what is packed is what is read, and nothing malformed gets through."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.engine.contract import Sample, Segment
from myelin.errors import WireError
from myelin.values import GREEDY, SamplingParams, SequenceId
from myelin.worker.segments import BatchLimits, pack_batch, pack_samples, unpack_batch, unpack_samples

LIMITS = BatchLimits(max_context=128, max_sequences=4, max_batch_tokens=64)
SEQUENCES = st.integers(0, 2**64 - 1).map(SequenceId)
SAMPLINGS = st.one_of(
    st.just(GREEDY),
    st.builds(
        SamplingParams,
        temperature=st.floats(0.0, 100.0),
        top_k=st.integers(0, 2**32 - 1),
        top_p=st.floats(0.0, 1.0, exclude_min=True),
        seed=st.integers(0, 2**64 - 1),
    ),
)


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    sequences = draw(st.lists(SEQUENCES, min_size=1, max_size=LIMITS.max_sequences, unique=True))
    segments = []
    for sequence in sequences:
        count = draw(st.integers(1, LIMITS.max_batch_tokens // LIMITS.max_sequences))
        start = draw(st.integers(0, LIMITS.max_context - count))
        segments.append(Segment(sequence, start, count, draw(st.booleans()), draw(SAMPLINGS)))
    return segments


RELEASES = st.lists(SEQUENCES, max_size=LIMITS.max_sequences, unique=True)


@given(segment_lists(), RELEASES)
def test_a_batch_is_read_as_it_was_packed(segments: list[Segment], releases: list[SequenceId]) -> None:
    rows = sum(segment.count for segment in segments)
    assert unpack_batch(memoryview(pack_batch(segments, releases)), rows, LIMITS) == (tuple(segments), tuple(releases))


def test_releases_may_travel_alone() -> None:
    meta = pack_batch([], [SequenceId(7), SequenceId(9)])
    assert unpack_batch(meta, 0, LIMITS) == ((), (7, 9))


SAMPLES = st.builds(
    Sample,
    sequence=SEQUENCES,
    position=st.integers(1, LIMITS.max_context),
    token=st.integers(0, 999),
    logprob=st.floats(max_value=0.0),
)


@given(st.lists(SAMPLES, max_size=LIMITS.max_sequences))
def test_samples_are_read_as_they_were_packed(samples: list[Sample]) -> None:
    assert unpack_samples(pack_samples(samples), vocab_size=1000, limits=LIMITS) == tuple(samples)


@given(st.binary(max_size=400), st.integers(0, 100))
def test_random_bytes_are_refused_or_within_bounds(meta: bytes, rows: int) -> None:
    try:
        segments, releases = unpack_batch(meta, rows, LIMITS)
    except WireError:
        pass
    else:
        assert sum(segment.count for segment in segments) == rows <= LIMITS.max_batch_tokens
        assert len(segments) <= LIMITS.max_sequences
        assert len(releases) <= LIMITS.max_sequences
    try:
        samples = unpack_samples(meta, vocab_size=1000, limits=LIMITS)
    except WireError:
        pass
    else:
        assert all(0 <= sample.token < 1000 for sample in samples)


@given(segment_lists(), RELEASES, st.data())
def test_a_damaged_batch_never_breaks_a_bound(
    segments: list[Segment], releases: list[SequenceId], data: st.DataObject
) -> None:
    rows = sum(segment.count for segment in segments)
    meta = bytearray(pack_batch(segments, releases))
    for _ in range(data.draw(st.integers(1, 4))):
        meta[data.draw(st.integers(0, len(meta) - 1))] = data.draw(st.integers(0, 255))
    try:
        read, _ = unpack_batch(bytes(meta), rows, LIMITS)
    except WireError:
        return
    assert sum(segment.count for segment in read) == rows
    assert all(one.start >= 0 and one.count >= 1 and one.start + one.count <= LIMITS.max_context for one in read)
    assert len({one.sequence for one in read}) == len(read)
    assert all(one.sampling.temperature >= 0 and 0 < one.sampling.top_p <= 1 for one in read)


def one(**changes: object) -> list[Segment]:
    fields: dict[str, object] = {"sequence": SequenceId(1), "start": 0, "count": 4, "output": True}
    return [Segment(**{**fields, **changes})]  # type: ignore[arg-type]  # a table of fields


@pytest.mark.parametrize(
    ("meta", "rows", "says"),
    [
        (b"", 0, "shorter"),
        (struct.pack("<II", 0, 0), 0, "neither"),
        (struct.pack("<II", 1, 0), 0, "claims"),
        (pack_batch(one(), []) + b"\0", 4, "claims"),
        (pack_batch(one(), []), 5, "add up to 4"),
        (pack_batch(one(count=0), []), 0, "no rows"),
        (pack_batch(one(start=125), []), 4, "beyond the context"),
        (pack_batch(one() + one(start=4), []), 8, "appears twice"),
        (pack_batch(one(), [SequenceId(3), SequenceId(3)]), 4, "released twice"),
        (pack_batch([], [SequenceId(number) for number in range(5)]), 0, "serves 4"),
        (pack_batch([*one(count=60), *one(count=5, sequence=2)], []), 65, "takes 64"),
        (pack_batch(one(sampling=SamplingParams(temperature=float("nan"))), []), 4, "temperature nan"),
        (pack_batch(one(sampling=SamplingParams(top_p=0.0)), []), 4, "top_p 0.0"),
    ],
)
def test_a_bad_batch_is_named(meta: bytes, rows: int, says: str) -> None:
    with pytest.raises(WireError, match=says):
        unpack_batch(meta, rows, LIMITS)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([Sample(SequenceId(1), 5, 1000, -1.0)], "outside the vocabulary"),
        ([Sample(SequenceId(1), 0, 1, -1.0)], "outside the context"),
        ([Sample(SequenceId(1), 129, 1, -1.0)], "outside the context"),
        ([Sample(SequenceId(1), 5, 1, float("nan"))], "not a number"),
        ([Sample(SequenceId(1), 5, 1, -1.0)] * 5, "serves 4"),
    ],
)
def test_bad_samples_are_named(samples: list[Sample], says: str) -> None:
    with pytest.raises(WireError, match=says):
        unpack_samples(pack_samples(samples), vocab_size=1000, limits=LIMITS)


def test_numbers_out_of_range_are_not_packed() -> None:
    with pytest.raises(WireError, match="out of range"):
        pack_batch(one(start=2**32), [])
    with pytest.raises(WireError, match="out of range"):
        pack_samples([Sample(SequenceId(1), -1, 0, 0.0)])
