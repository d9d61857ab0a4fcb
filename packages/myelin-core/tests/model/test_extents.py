"""Ranges of bytes, against a plain set of numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from myelin.model.remote.extents import Extents

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 60)), max_size=30)


@given(steps=STEPS, start=st.integers(0, 60), end=st.integers(0, 60))
def test_extents_are_a_set_of_positions(steps: list[tuple[bool, int, int]], start: int, end: int) -> None:
    extents, oracle = Extents(), set[int]()
    for adding, first, last in steps:
        if adding:
            extents.add(first, last)
            oracle |= set(range(first, last))
        else:
            extents.remove(first, last)
            oracle -= set(range(first, last))
    ranges = list(extents)
    assert {position for first, last in ranges for position in range(first, last)} == oracle
    assert all(first < last for first, last in ranges)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))  # none touch
    assert extents.total == len(oracle)
    holes = extents.missing(start, end)
    assert {position for first, last in holes for position in range(first, last)} == set(range(start, end)) - oracle
    assert len(holes) == len({first for first, _ in holes})
