"""Spacing of calls."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from myelin_provider_vastai.pacing import LONGEST_WAIT_S, SPACING_S, Pacer


async def test_calls_of_a_kind_are_spaced_and_kinds_are_not() -> None:
    pacer = Pacer(0.02)
    began = time.monotonic()
    await asyncio.gather(*(pacer.turn("create") for _ in range(4)), pacer.turn("list"))
    assert time.monotonic() - began >= 3 * 4.5 * 0.02


async def test_calls_are_spaced_from_the_last_that_was_made_also_when_that_was_late() -> None:
    pacer, turns = Pacer(0.02), list[float]()

    async def call() -> None:
        await pacer.turn("create")
        turns.append(time.monotonic())

    calls = [asyncio.create_task(call()) for _ in range(3)]
    await asyncio.sleep(0.02)
    time.sleep(0.15)  # noqa: ASYNC251  (the event loop has no time: two turns come meanwhile)
    await asyncio.gather(*calls)
    assert min(after - before for before, after in pairwise(turns)) >= 4.5 * 0.02


async def test_a_held_kind_waits() -> None:
    pacer = Pacer(0.0)
    pacer.hold("list", 0.1)
    began = time.monotonic()
    await pacer.turn("list")
    assert time.monotonic() - began >= 0.099


async def test_a_call_that_waits_for_its_turn_is_held_as_well() -> None:
    pacer = Pacer(0.02)
    await pacer.turn("create")
    waiting = asyncio.create_task(pacer.turn("create"))
    await asyncio.sleep(0)
    began = time.monotonic()
    pacer.hold("create", 0.2)
    await waiting
    assert time.monotonic() - began >= 0.199


@pytest.mark.parametrize(
    ("told", "tries", "seconds"),
    [
        ("7", 0, 7.0),
        ("", 0, 3.0),
        ("", 2, 12.0),
        ("soon", 1, 6.0),
        ("-3", 0, 3.0),
        ("99999", 0, LONGEST_WAIT_S),
        ("inf", 0, 3.0),
    ],
)
def test_the_wait_after_too_many(told: str, tries: int, seconds: float) -> None:
    assert SPACING_S["destroy"] == 3.0
    assert Pacer().wait_after_refusal("destroy", tries, told) == seconds
