"""The table of tensor types against the gguf package's own, and the dequantizing oracle."""

from __future__ import annotations

import numpy as np
import pytest

from myelin.model.quant import (
    BLOCKS,
    FLOATS,
    FORMATS,
    READABLE,
    RETIRED_TYPES,
    FormatKind,
    GgmlType,
    dequantize,
    row_bytes,
)

gguf = pytest.importorskip("gguf")


def test_the_table_is_ggmls() -> None:
    theirs = {int(kind): (kind.name, sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {int(kind): (kind.name, BLOCKS[kind]) for kind in GgmlType}
    assert {number: ours[number] for number in ours if number in theirs} == {
        number: theirs[number] for number in theirs if number in ours
    }
    assert set(theirs) <= set(ours)
    assert not set(RETIRED_TYPES) & set(ours)


def test_every_readable_type_has_a_format_that_fits_its_block() -> None:
    assert FLOATS <= READABLE
    for kind in READABLE:
        elements, size = BLOCKS[kind]
        described = FORMATS[kind]
        assert elements % described.group == 0
        # The codes fit into the block, and scales and minimums take the rest: less than a byte for each 4 elements.
        if described.kind is not FormatKind.LATTICE and kind is not GgmlType.TQ1_0:
            assert elements * described.bits <= 8 * size <= elements * described.bits + 2 * elements


@pytest.mark.parametrize("kind", sorted(READABLE))
def test_rows_of_every_readable_type_become_numbers(kind: GgmlType) -> None:
    elements, size = BLOCKS[kind]
    columns = 512
    stored = np.zeros((3, row_bytes(kind, columns)), dtype=np.uint8)
    values = dequantize(kind, stored)
    assert values.shape == (3, columns)
    assert values.dtype == np.float32
    assert values.flags.c_contiguous
    assert not np.shares_memory(values, stored)
    assert row_bytes(kind, columns) == columns // elements * size


@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.F16, GgmlType.BF16])
def test_floats_come_back_as_they_were(kind: GgmlType) -> None:
    values = np.array([[0.0, -1.5, 3.0, 1024.0], [2.0**-10, -0.0, 7.0, 0.25]], dtype=np.float32)
    stored = gguf.quantize(values, gguf.GGMLQuantizationType(int(kind)))
    assert np.array_equal(dequantize(kind, np.ascontiguousarray(stored).view(np.uint8)), values)


def test_quantized_rows_mean_what_their_scales_say() -> None:
    scale = np.float16(0.5).tobytes()
    q8 = np.frombuffer(scale + bytes(range(32)), dtype=np.uint8)[None]
    assert np.array_equal(dequantize(GgmlType.Q8_0, q8)[0], 0.5 * np.arange(32))
    q4 = np.frombuffer(scale + bytes([0x80] * 16), dtype=np.uint8)[None]
    assert np.array_equal(dequantize(GgmlType.Q4_0, q4)[0], [-4.0] * 16 + [0.0] * 16)


def test_what_is_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="33 elements are not a whole number of Q4_0 blocks"):
        row_bytes(GgmlType.Q4_0, 33)
    with pytest.raises(ValueError, match="19 bytes"):
        dequantize(GgmlType.Q4_0, np.zeros((1, 19), dtype=np.uint8))
    with pytest.raises(ValueError, match="I8"):
        dequantize(GgmlType.I8, np.zeros((1, 19), dtype=np.uint8))
