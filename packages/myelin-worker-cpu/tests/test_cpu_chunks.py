"""Cutting batches into compiled calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from myelin.engine_api import Segment, SequenceId
from myelin_worker_cpu.chunks import cut

segments = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40), st.booleans()), min_size=1, max_size=8).map(
    lambda items: tuple(Segment(SequenceId(index), *item) for index, item in enumerate(items))
)


@given(segments=segments, max_rows=st.integers(1, 64), max_outputs=st.integers(1, 16))
def test_chunks_together_are_the_batch(segments, max_rows: int, max_outputs: int) -> None:
    chunks = list(cut(segments, max_rows, max_outputs))
    rows = [(s.sequence, s.start + i) for s in segments for i in range(s.count)]
    seen, sampled = [], []
    for chunk in chunks:
        assert 1 <= chunk.rows <= max_rows
        assert len(chunk.outputs) <= max_outputs
        assert chunk.first_row == len(seen)
        assert sum(piece.count for piece in chunk.pieces) == chunk.rows
        first = len(seen)
        for piece in chunk.pieces:
            seen += [(segments[piece.segment].sequence, piece.start + i) for i in range(piece.count)]
        for index, segment in chunk.samples:
            assert seen[first + chunk.outputs[index]] == (segment.sequence, segment.start + segment.count - 1)
            sampled.append(segment)
    assert seen == rows
    assert sampled == [segment for segment in segments if segment.output]


@given(segments=segments, limit=st.integers(1, 16))
def test_every_row_can_be_an_output(segments, limit: int) -> None:
    chunks = list(cut(segments, limit, limit, every_row=True))
    for chunk in chunks:
        assert chunk.outputs == list(range(chunk.rows))
    assert sum(chunk.rows for chunk in chunks) == sum(segment.count for segment in segments)
    assert sum(len(chunk.samples) for chunk in chunks) == sum(segment.output for segment in segments)
