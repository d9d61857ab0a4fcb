"""The slot cache against a plain model of it: a dictionary of lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.engine.contract import EngineOptions, Segment
from myelin.engine.kvcache import SlotCache
from myelin.errors import EngineError
from myelin.values import SequenceId

SHAPE: Any = SimpleNamespace(n_kv_heads=2, head_dim=4, value_dim=3)
OPTIONS = EngineOptions(max_context=12, max_sequences=2, kv_dtype="f32")

segments = st.lists(
    st.builds(Segment, st.integers(1, 3).map(SequenceId), st.integers(-1, 13), st.integers(0, 6)),
    min_size=1,
    max_size=3,
)
steps = st.lists(segments | st.integers(1, 3).map(SequenceId), max_size=30)


def fits(held: dict[int, list[float]], batch: list[Segment]) -> bool:
    names = [segment.sequence for segment in batch]
    return (
        len(set(names)) == len(names)
        and len(held.keys() | set(names)) <= OPTIONS.max_sequences
        and all(
            0 <= segment.start <= len(held.get(segment.sequence, []))
            and segment.count >= 1
            and segment.start + segment.count <= OPTIONS.max_context
            for segment in batch
        )
    )


@given(steps)
@settings(max_examples=200)
def test_any_history(history: list[list[Segment] | SequenceId]) -> None:
    cache = SlotCache(SHAPE, 2, OPTIONS)
    held: dict[int, list[float]] = {}
    number = 0.0
    for event in history:
        if isinstance(event, int):
            cache.release(SequenceId(event))
            held.pop(event, None)
            continue
        if not fits(held, event):
            with pytest.raises(EngineError):
                cache.check(event)
            assert {name: cache.length(SequenceId(name)) for name in held} == {k: len(v) for k, v in held.items()}
            continue
        cache.check(event)
        cache.begin(event)
        for segment in event:
            new = [number + index for index in range(segment.count)]
            number += segment.count
            held[segment.sequence] = held.get(segment.sequence, [])[: segment.start] + new
            for layer in range(2):
                rows = np.array(new, np.float32)[:, None, None] + layer * 1000
                keys, values = cache.append(
                    layer, segment, np.broadcast_to(rows, (len(new), 2, 4)), np.broadcast_to(-rows, (len(new), 2, 3))
                )
                expected = np.array(held[segment.sequence], np.float32) + layer * 1000
                np.testing.assert_array_equal(keys[1, :, 2], expected)
                np.testing.assert_array_equal(values[0, :, 0], -expected)
        cache.commit(event)
        for name, positions in held.items():
            assert cache.length(SequenceId(name)) == len(positions)


def test_half_precision_rounds() -> None:
    cache = SlotCache(SHAPE, 1, EngineOptions(max_context=4, kv_dtype="f16"))
    segment = Segment(SequenceId(1), 0, 1)
    cache.begin([segment])
    keys, _ = cache.append(0, segment, np.full((1, 2, 4), 1 / 3, np.float32), np.zeros((1, 2, 3), np.float32))
    assert keys.dtype == np.float32
    assert keys[0, 0, 0] == np.float32(np.float16(1 / 3)) != np.float32(1 / 3)


def test_bytes_of_all_slots() -> None:
    assert SlotCache(SHAPE, 5, OPTIONS).nbytes == 2 * 5 * 12 * 2 * (4 + 3) * 4


def test_an_unknown_dtype_is_an_error() -> None:
    with pytest.raises(EngineError, match="q4_0"):
        SlotCache(SHAPE, 1, EngineOptions(kv_dtype="q4_0"))
