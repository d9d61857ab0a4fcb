"""The layer's formulas against independent ways to write them, one row at a time, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.engine.formulas import TILE, Tiles, activate, attend, rms_norm, rope_angles, rotate, softcap
from myelin.model.architecture import Activation, RopeStyle


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(0)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40))
def test_tiles_multiply_and_keep_the_order(positions: list[int]) -> None:
    rows = np.arange(len(positions) * 3, dtype=np.float32).reshape(-1, 3)
    weight = np.array([[1, 0, 0], [0, 2, 0], [1, 1, 1], [0, 0, -1]], np.float32)
    np.testing.assert_array_equal(Tiles(np.array(positions)).product(weight, rows), rows @ weight.T)


@given(st.integers(0, 200), st.lists(st.integers(0, 200), max_size=40), st.integers(0, 2**32))
def test_a_product_does_not_depend_on_the_other_rows(position: int, others: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    weight = generator.normal(0, 1, (37, 96)).astype(np.float32)
    row = generator.normal(0, 1, (1, 96)).astype(np.float32)
    alone = Tiles(np.array([position])).product(weight, row)
    crowd = np.concatenate([generator.normal(0, 1, (len(others), 96)).astype(np.float32), row])
    together = Tiles(np.array([*others, position])).product(weight, crowd)
    np.testing.assert_array_equal(together[-1:], alone)
    assert TILE > 1


def test_rms_norm(generator: np.random.Generator) -> None:
    rows = generator.normal(0, 3, (4, 33)).astype(np.float32)
    weight = generator.normal(1, 0.1, 33).astype(np.float32)
    for row, normal in zip(rows, rms_norm(rows, weight, 1e-5), strict=True):
        root = math.sqrt(sum(float(x) ** 2 for x in row) / 33 + 1e-5)
        np.testing.assert_allclose(
            normal, [float(x) / root * float(w) for x, w in zip(row, weight, strict=True)], rtol=1e-5
        )


def test_rms_norm_of_nothing_is_nothing() -> None:
    assert not rms_norm(np.zeros((1, 8), np.float32), np.ones(8, np.float32), 1e-6).any()


def test_activations() -> None:
    rows = np.array([[-200, -2, -0.5, 0, 0.5, 2, 200]], np.float32)
    silu = [float(x) / (1 + math.exp(-float(x))) for x in rows[0]]
    np.testing.assert_allclose(activate(rows, Activation.SILU)[0], silu, rtol=1e-6, atol=1e-30)
    gelu = [0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) for x in map(float, rows[0])]
    np.testing.assert_allclose(activate(rows, Activation.GELU_TANH)[0], gelu, rtol=1e-5, atol=1e-6)


def test_softcap() -> None:
    logits = np.array([-1000.0, -1.0, 0.0, 1.0, 1000.0], np.float32)
    np.testing.assert_array_equal(softcap(logits, 0.0), logits)
    capped = softcap(logits, 30.0)
    assert np.abs(capped).max() == pytest.approx(30)
    np.testing.assert_allclose(capped[1:4], [-30 * math.tanh(1 / 30), 0, 30 * math.tanh(1 / 30)], rtol=1e-6)


@pytest.mark.parametrize("style", list(RopeStyle))
@pytest.mark.parametrize("factors", [None, np.array([1, 2, 4], np.float32)])
def test_rotation_is_a_complex_product(
    style: RopeStyle, factors: np.ndarray | None, generator: np.random.Generator
) -> None:
    """Pair i of a head, as a complex number, is multiplied by e^(i * angle); what lies beyond the dims stays."""
    heads = generator.normal(0, 1, (2, 3, 8)).astype(np.float32)
    positions = np.array([0, 1234])
    turned = rotate(heads, *rope_angles(positions, 6, 10000.0, 0.25, factors), style)
    for row, position in enumerate(positions):
        for pair in range(3):
            first, second = (2 * pair, 2 * pair + 1) if style is RopeStyle.INTERLEAVED else (pair, pair + 3)
            angle = position * 0.25 / 10000.0 ** (2 * pair / 6) / (1 if factors is None else factors[pair])
            for head in range(3):
                before = complex(heads[row, head, first], heads[row, head, second])
                after = before * complex(math.cos(angle), math.sin(angle))
                np.testing.assert_allclose(turned[row, head, [first, second]], [after.real, after.imag], atol=1e-6)
    np.testing.assert_array_equal(turned[..., 6:], heads[..., 6:])
    np.testing.assert_array_equal(turned[0], heads[0])


def test_rotated_products_depend_on_the_distance(generator: np.random.Generator) -> None:
    query, key = generator.normal(0, 1, (2, 1, 1, 16)).astype(np.float32)

    def product(first: int, second: int) -> float:
        turned = [
            rotate(head, *rope_angles(np.array([position]), 16, 10000.0, 1.0, None), RopeStyle.HALVES)
            for head, position in ((query, first), (key, second))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(100, 90) == pytest.approx(product(4010, 4000), abs=1e-4)
    assert product(100, 90) != pytest.approx(product(100, 80), abs=1e-4)


def test_attention_head_by_head(generator: np.random.Generator) -> None:
    queries = generator.normal(0, 1, (6, 8)).astype(np.float32)
    keys = generator.normal(0, 1, (2, 5, 8)).astype(np.float32)
    values = generator.normal(0, 1, (2, 5, 4)).astype(np.float32)
    mixed = attend(queries, keys, values, 0.5).reshape(6, 4)
    for head in range(6):
        shared = head // 3
        weights = [math.exp(0.5 * float(queries[head] @ keys[shared, seen])) for seen in range(5)]
        expected = sum(weight * values[shared, seen] for seen, weight in enumerate(weights)) / sum(weights)
        np.testing.assert_allclose(mixed[head], expected, rtol=1e-5, atol=1e-6)


def test_attention_of_large_scores_stays_finite() -> None:
    keys = np.full((1, 3, 2), 100.0, np.float32)
    mixed = attend(np.full((1, 2), 100.0, np.float32), keys, np.ones((1, 3, 2), np.float32), 1.0)
    np.testing.assert_allclose(mixed, 1.0)
