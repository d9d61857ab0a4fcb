"""Repacking: what the planes say is what the GGUF rows say, for every type and odd shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.model.quant import BLOCKS, GgmlType, dequantize
from myelin_testkit.blocks import random_blocks
from myelin_worker_triton.layouts import BOOKS, E2M1_CODES, LAYOUTS, Book, Plain, padded_stride
from myelin_worker_triton.planes import plane_strides, planned_bytes, read_planes, repack
from myelin_worker_triton.support import SUPPORTED_TYPES


@pytest.mark.parametrize("kind", LAYOUTS)
@settings(deadline=None, max_examples=8, derandomize=True)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 3), seed=st.integers(0, 99), data=st.data())
def test_planes_mean_what_the_rows_mean(kind: str, rows: int, blocks: int, seed: int, data: st.DataObject) -> None:
    ggml_type = GgmlType[kind]
    columns = blocks * max(BLOCKS[ggml_type][0], 32)
    raw = random_blocks(ggml_type, rows, columns, np.random.default_rng(seed), deviation=0.05)
    cut = data.draw(st.integers(0, rows))
    matrix = repack(kind, rows, columns, [torch.from_numpy(raw[:cut].copy()), torch.from_numpy(raw[cut:].copy())])
    expected = dequantize(ggml_type, np.ascontiguousarray(raw)).astype(np.float64)
    # Scales that ggml multiplies out on the fly are rounded to float16 here: 2^-11 of themselves, and of the addend.
    near = 2 * 2.0**-11 * np.abs(expected).max() + 1e-12
    np.testing.assert_allclose(read_planes(matrix), expected, rtol=0, atol=near)
    if kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"):
        np.testing.assert_array_equal(read_planes(matrix).astype(np.float32), expected.astype(np.float32))
    assert matrix.nbytes == planned_bytes(kind, rows, columns)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "MXFP4"])
@pytest.mark.parametrize("deviation", [1e-7, 1e-4, 1e3])
def test_tiny_and_huge_weights_keep_their_digits(kind: str, deviation: float) -> None:
    raw = random_blocks(GgmlType[kind], 4, 256, np.random.default_rng(0), deviation=deviation)
    expected = dequantize(GgmlType[kind], raw).astype(np.float64)
    found = read_planes(repack(kind, 4, 256, [torch.from_numpy(raw)]))
    assert np.abs(found - expected).max() <= 2e-3 * np.abs(expected).max()


def test_a_matrix_of_zeros_is_zeros() -> None:
    for kind in ("Q4_0", "Q6_K", "Q4_K"):
        size = BLOCKS[GgmlType[kind]]
        raw = torch.zeros((3, 256 // size[0] * size[1]), dtype=torch.uint8)
        assert not read_planes(repack(kind, 3, 256, [raw])).any()


def test_missing_rows_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 rows came, of 3"):
        repack("Q8_0", 3, 32, [torch.zeros((2, 34), dtype=torch.uint8)])


@pytest.mark.parametrize(("kind", "columns"), [("Q4_0", 48), ("F16", 33)])
def test_columns_that_do_not_fit_are_an_error(kind: str, columns: int) -> None:
    with pytest.raises(ValueError, match="columns"):
        plane_strides(kind, columns)


@given(st.integers(1, 100_000))
def test_strides_allow_wide_loads_and_avoid_one_memory_channel(words: int) -> None:
    stride = padded_stride(words)
    assert stride >= words
    assert stride % 4 == 0
    assert stride % 128 != 0
    assert stride < words + 40


def test_the_table_covers_the_types_and_each_has_its_own_code() -> None:
    assert {kind.name for kind in SUPPORTED_TYPES} == set(LAYOUTS)
    distinct = {kind: layout.code for kind, layout in LAYOUTS.items()}
    same = {"Q4_K": "Q4_1", "Q5_K": "Q5_1", "IQ4_XS": "IQ4_NL"}
    for kind, twin in same.items():
        assert distinct.pop(kind) == distinct[twin]
    assert len(set(distinct.values())) == len(distinct)
    for layout in LAYOUTS.values():
        code = layout.code
        assert (code & 15, code >> 4 & 3, code >> 6 & 3) == (layout.low, layout.high, layout.scales)
        assert (code >> 8 & 3, code >> 10 & 63, code >> 16 & 3) == (layout.book, layout.offset, layout.plain)


def test_layouts_cost_little_more_than_the_file() -> None:
    for kind, layout in LAYOUTS.items():
        elements, size = BLOCKS[GgmlType[kind]]
        # Two float16 for each group instead of six-bit scales: 0.5 bits a weight; Q2_K and Q3_K pay most.
        assert layout.bytes_per_weight <= size / elements * (1.54 if kind == "Q2_K" else 1.17)


def test_codebooks_are_those_of_ggml() -> None:
    from gguf import quants

    np.testing.assert_array_equal(BOOKS[Book.IQ4], quants.IQ4_NL.kvalues)
    np.testing.assert_array_equal(np.array(BOOKS[Book.E2M1])[list(E2M1_CODES)], quants.MXFP4.kvalues)
    codes = np.arange(16)
    more = np.array(BOOKS[Book.E2M1]) - (codes - 12)
    assert not more[8:].any()
    assert ((more[:8] >= 0) & (more[:8] < 128)).all()  # a byte whose sign isn't set
    assert not Plain.NO  # the kernels take it for false
