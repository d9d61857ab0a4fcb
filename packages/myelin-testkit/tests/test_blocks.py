"""Quantizers and random blocks against the dequantizers of the ``gguf`` package, which define what a block means."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from myelin.engine.reference import REFERENCE_TYPES
from myelin.model.quant import GgmlType, row_bytes
from myelin_testkit.blocks import can_encode, encode, random_blocks

# How far a normal distribution may come back, as a share of its deviation: about half a step of each type.
ERRORS = {
    GgmlType.Q2_K: 0.40,
    GgmlType.Q3_K: 0.20,
    GgmlType.Q4_K: 0.10,
    GgmlType.Q5_K: 0.05,
    GgmlType.Q6_K: 0.03,
    GgmlType.Q4_0: 0.11,
    GgmlType.Q4_1: 0.10,
    GgmlType.Q5_0: 0.055,
    GgmlType.Q5_1: 0.05,
    GgmlType.Q8_0: 0.007,
    GgmlType.F16: 0.001,
    GgmlType.BF16: 0.004,
    GgmlType.F32: 0.0,
}


def decoded(packed: NDArray[np.uint8], kind: GgmlType) -> NDArray[np.float32]:
    return np.asarray(dequantize(packed, GGMLQuantizationType(int(kind))), np.float32)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.name)
@given(st.integers(0, 2**32), st.sampled_from([1e-3, 0.1, 1.0, 50.0]))
@settings(max_examples=20)
def test_what_is_encoded_comes_back(kind: GgmlType, seed: int, deviation: float) -> None:
    values = np.random.default_rng(seed).normal(0, deviation, (3, 512)).astype(np.float32)
    packed = encode(values, kind)
    assert packed.shape == (3, row_bytes(kind, 512))
    assert packed.dtype == np.uint8
    error = np.sqrt(np.mean((decoded(packed, kind) - values) ** 2)) / deviation
    assert error <= ERRORS[kind]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [0.0, 0.5, -0.5])
def test_constant_rows(kind: GgmlType, value: float) -> None:
    values = np.full((1, 256), value, np.float32)
    np.testing.assert_allclose(decoded(encode(values, kind), kind), values, atol=0.13)  # a quarter of a step of Q3_K


def test_columns_that_are_no_whole_number_of_blocks() -> None:
    with pytest.raises(ValueError, match="Q4_K"):
        encode(np.zeros((1, 128), np.float32), GgmlType.Q4_K)


def test_what_has_no_quantizer() -> None:
    assert not can_encode(GgmlType.IQ3_S)
    assert can_encode(GgmlType.Q3_K)
    with pytest.raises(ValueError, match="IQ3_S"):
        encode(np.zeros((1, 256), np.float32), GgmlType.IQ3_S)


@pytest.mark.parametrize("kind", sorted(REFERENCE_TYPES), ids=lambda kind: kind.name)
def test_random_blocks_are_sane(kind: GgmlType) -> None:
    generator = np.random.default_rng(0)
    packed = random_blocks(kind, 700, 512, generator, deviation=0.05)
    assert packed.shape == (700, row_bytes(kind, 512))
    values = decoded(packed, kind)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(0.05, rel=0.2)
    assert abs(values.mean()) < 0.02
    assert len(np.unique(packed, axis=0)) > 600
