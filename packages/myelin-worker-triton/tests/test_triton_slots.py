"""Slots and pages: what is given out comes back, and a batch that doesn't fit changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.engine_api import EngineError, EngineOptions, Segment, SequenceId
from myelin_worker_triton.slots import Slots

OPTIONS = EngineOptions(max_context=40, max_sequences=3)
PAGE, PAGES = 16, 3


def begin(slots: Slots, *segments: Segment) -> dict[int, list[int]]:
    slots.check(segments)
    return {slot: pages.tolist() for slot, pages in slots.begin(segments)}


def test_pages_come_as_a_sequence_grows() -> None:
    slots = Slots(OPTIONS, PAGE, PAGES)
    first = begin(slots, Segment(SequenceId(7), 0, 16))
    assert [len(pages) for pages in first.values()] == [1]
    assert begin(slots, Segment(SequenceId(7), 8, 8)) == {}
    second = begin(slots, Segment(SequenceId(7), 16, 24))
    assert list(second) == list(first)
    assert [len(pages) for pages in second.values()] == [3]
    assert slots.free_pages == 6
    slots.release(SequenceId(7))
    slots.release(SequenceId(7))
    assert slots.free_pages == 9


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(SequenceId(1), 3, 1),),
        (Segment(SequenceId(1), 0, 41),),
        (Segment(SequenceId(1), 0, 0),),
        (Segment(SequenceId(1), -1, 2),),
        (Segment(SequenceId(1), 0, 1), Segment(SequenceId(1), 1, 1)),
        tuple(Segment(SequenceId(number), 0, 1) for number in range(4)),
    ],
)
def test_what_does_not_fit_changes_nothing(segments: tuple[Segment, ...]) -> None:
    slots = Slots(OPTIONS, PAGE, PAGES)
    with pytest.raises(EngineError):
        slots.check(segments)
    assert slots.free_pages == 9


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20), st.booleans()), max_size=60))
def test_no_page_is_ever_anyone_elses(steps: list[tuple[int, int, bool]]) -> None:
    slots = Slots(OPTIONS, PAGE, PAGES)
    held: dict[int, int] = {}
    pages: dict[int, list[int]] = {}
    for number, count, release in steps:
        if release:
            slots.release(SequenceId(number))
            held.pop(number, None)
            pages.pop(number, None)
            continue
        segment = Segment(SequenceId(number), held.get(number, 0), count)
        fits = segment.start + count <= 40 and len(held.keys() | {number}) <= 3
        if not fits:
            with pytest.raises(EngineError):
                slots.check((segment,))
            continue
        for slot, listed in begin(slots, segment).items():
            assert slot == slots.slot(SequenceId(number))
            pages[number] = listed
        held[number] = segment.start + count
        assert len(pages[number]) * PAGE >= held[number]
        everything = np.concatenate([np.array(listed) for listed in pages.values()])
        assert len(set(everything.tolist())) == len(everything)
        assert slots.free_pages == 9 - len(everything)
