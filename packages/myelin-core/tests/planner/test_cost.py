"""The arithmetic of planning, as tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from myelin.model.architecture import Hyperparameters, stage_tensors
from myelin.model.facts import ModelFacts
from myelin.planner import cost
from myelin.planner.texts import count, readable_bytes
from myelin.wire.record import HEADER_BYTES

MakeModel = Callable[..., tuple[ModelFacts, Hyperparameters]]

# Width 32 in float32: a row or a norm is 128 bytes. Layers of 1, 2 and 3 rows and a norm: 256, 384, 512 bytes.
EMBEDDING, NORM = 64 * 128, 128


@pytest.mark.parametrize(
    ("tied", "first", "end", "held", "read"),
    [
        (True, 0, 3, 256 + 384 + 512 + EMBEDDING + NORM, 256 + 384 + 512 + EMBEDDING + NORM),
        (True, 0, 1, 256 + EMBEDDING, 256),
        (True, 1, 2, 384, 384),
        (True, 1, 3, 384 + 512 + EMBEDDING + NORM, 384 + 512 + EMBEDDING + NORM),
        (False, 0, 3, 256 + 384 + 512 + 2 * EMBEDDING + NORM, 256 + 384 + 512 + EMBEDDING + NORM),
        (False, 0, 2, 256 + 384 + EMBEDDING, 256 + 384),
        (False, 2, 3, 512 + EMBEDDING + NORM, 512 + EMBEDDING + NORM),
    ],
)
def test_bytes_held_and_read(make_model: MakeModel, tied: bool, first: int, end: int, held: int, read: int) -> None:
    facts, parameters = make_model((1, 2, 3), tied=tied)
    layout = cost.weight_layout(facts, parameters)
    assert cost.stage_weight_bytes(layout, first, end) == held
    assert cost.bytes_read_per_token(layout, first, end) == read


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rope_freqs", [True, False])
def test_weight_bytes_are_those_of_the_stages_tensors(make_model: MakeModel, tied: bool, rope_freqs: bool) -> None:
    facts, parameters = make_model((1, 2, 3, 5), tied=tied, rope_freqs=rope_freqs)
    layout = cost.weight_layout(facts, parameters)
    for first in range(4):
        for end in range(first + 1, 5):
            names = stage_tensors(facts, parameters, first, end)
            assert cost.stage_weight_bytes(layout, first, end) == sum(facts.tensors[name].nbytes for name in names)


@pytest.mark.parametrize(
    ("first", "end", "windowed", "expected"),
    [
        # 2 kv heads * (8 + 8) * 2 bytes = 64 bytes a position, 3 sequences
        (0, 1, False, 100 * 64 * 3),
        (0, 3, False, 300 * 64 * 3),
        (0, 3, True, (100 + 10 + 100) * 64 * 3),
        (1, 2, True, 10 * 64 * 3),
        (2, 3, True, 100 * 64 * 3),  # its window of 1000 is more than the context
    ],
)
def test_kv_bytes(make_model: MakeModel, first: int, end: int, windowed: bool, expected: int) -> None:
    _, parameters = make_model((1, 1, 1), window=(0, 10, 1000))
    assert (
        cost.stage_kv_bytes(
            parameters, first, end, max_context=100, max_sequences=3, bytes_per_value=2, windowed=windowed
        )
        == expected
    )


def test_scratch_bytes_count_the_logits_in_the_tail_only(make_model: MakeModel) -> None:
    _, parameters = make_model((1, 1))
    limits = {"max_context": 100, "max_sequences": 3, "max_batch_tokens": 10}
    inner = cost.stage_scratch_bytes(parameters, 0, 1, **limits)
    tail = cost.stage_scratch_bytes(parameters, 1, 2, **limits)
    assert tail - inner == 4 * 3 * 64
    assert inner == 4 * (10 * (3 * 32 + 6 * 16 + 2 * 64) + 4 * 100 + 2 * 10 * 32)


def test_seconds() -> None:
    assert cost.stage_seconds(3_000_000, 1e9) == pytest.approx(0.003)
    assert cost.token_seconds([0.003]) == pytest.approx(0.003)
    assert cost.token_seconds([0.003], hop_seconds=0.001) == pytest.approx(0.003)
    assert cost.token_seconds([0.003, 0.002, 0.001], hop_seconds=0.001) == pytest.approx(0.009)


def test_record_bytes(make_model: MakeModel) -> None:
    _, parameters = make_model()
    width = cost.activation_token_bytes(parameters)
    assert width == 4 * 32
    assert cost.record_bytes(10, width, segments=2) == HEADER_BYTES + 64 + 2 * 64 + 1280


def test_a_layer_of_no_weight_changes_nothing(make_model: MakeModel) -> None:
    facts, parameters = make_model((1, 2, 3))
    layout = cost.weight_layout(facts, parameters)
    assert cost.layer_weight_bytes(layout, 1, 1) == 0
    assert cost.bytes_read_per_token(replace(layout, output_bytes=0, tied_output=False), 0, 3) == 256 + 384 + 512


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (12_345_678_901, "11.5 GiB"),
        (150 << 20, "150 MiB"),
    ],
)
def test_readable_bytes(size: int, text: str) -> None:
    assert readable_bytes(size) == text


def test_count() -> None:
    assert [count(n, "layer") for n in (0, 1, 1200)] == ["0 layers", "1 layer", "1,200 layers"]
