"""Cutting a batch into pieces that one compiled call takes: pure arithmetic on segments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from myelin.engine_api import Segment


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one segment (``segment`` is its index in the batch)."""

    segment: int
    start: int
    count: int


@dataclass(slots=True)
class Chunk:
    """Consecutive rows of a batch.

    Attributes:
        first_row: Of the batch.
        rows: How many.
        pieces: Of the segments they belong to.
        outputs: Rows (counted from the chunk's first) that the tail computes logits of.
        samples: For each segment that ends here and wants a token: index into ``outputs``, and the segment.
    """

    first_row: int
    rows: int = 0
    pieces: list[Piece] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    samples: list[tuple[int, Segment]] = field(default_factory=list)


def cut(segments: tuple[Segment, ...], max_rows: int, max_outputs: int, *, every_row: bool = False) -> Iterator[Chunk]:
    """Chunks of at most ``max_rows`` rows and ``max_outputs`` output rows that together are the batch, in order.

    With ``every_row`` every row is an output row (``max_rows`` must then not be above ``max_outputs``).
    """
    chunk = Chunk(0)
    for index, segment in enumerate(segments):
        done = 0
        while done < segment.count:
            if chunk.rows == max_rows or len(chunk.outputs) == max_outputs:
                yield chunk
                chunk = Chunk(chunk.first_row + chunk.rows)
            count = min(segment.count - done, max_rows - chunk.rows)
            chunk.pieces.append(Piece(index, segment.start + done, count))
            if every_row:
                chunk.outputs.extend(range(chunk.rows, chunk.rows + count))
            chunk.rows += count
            done += count
            if segment.output and done == segment.count:
                if not every_row:
                    chunk.outputs.append(chunk.rows - 1)
                chunk.samples.append((len(chunk.outputs) - 1, segment))
    yield chunk
