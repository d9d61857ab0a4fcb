"""Rehearsals run over and over, change nothing outside, and go through the code of the real thing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType

import pytest

from myelin.transport.frames import FrameReader
from myelin.wire import record
from myelin.worker import segments
from myelin.worker.rehearsal import HeadRehearsal, StageRehearsal
from myelin.worker.scheduler import Scheduler


def functions_of(rehearsal: Callable[[], None]) -> set[CodeType]:
    """The code that one rehearsal runs through."""
    seen: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        rehearsal()
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize("width", [1, 576, 8192, 40_000])
def test_a_stages_rehearsal(width: int) -> None:
    rehearsal = StageRehearsal(width)
    for _ in range(100):
        rehearsal()
    due = {FrameReader.next, record.unpack, segments.unpack_batch, segments.pack_samples, record.beginning}
    assert {function.__code__ for function in due} <= functions_of(rehearsal)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_a_heads_rehearsal(stages: int) -> None:
    rehearsal = HeadRehearsal(stages)
    for _ in range(3000):
        rehearsal()
    due = {
        FrameReader.next,
        record.unpack,
        segments.unpack_samples,
        Scheduler.complete,
        Scheduler.next_batch,
        record.beginning,
    }
    assert {function.__code__ for function in due} <= functions_of(rehearsal)
