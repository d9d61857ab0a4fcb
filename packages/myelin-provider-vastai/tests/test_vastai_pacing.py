"""Spacing of calls."""

from __future__ import annotations

import asyncio
import time

import pytest

from myelin_provider_vastai.pacing import LONGEST_WAIT_S, SPACING_S, Pacer


async def test_calls_of_a_kind_are_spaced_and_kinds_are_not() -> None:
    pacer = Pacer(0.02)
    began = time.monotonic()
    await asyncio.gather(*(pacer.turn("create") for _ in range(4)), pacer.turn("list"))
    assert time.monotonic() - began >= 3 * 4.5 * 0.02


async def test_a_held_kind_waits() -> None:
    pacer = Pacer(0.0)
    pacer.hold("list", 0.1)
    began = time.monotonic()
    await pacer.turn("list")
    assert time.monotonic() - began >= 0.099


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
