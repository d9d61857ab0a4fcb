"""Tiles: their sizes, and that they hold exactly what the file holds."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.engine_api import BLOCKS, GgmlType, row_bytes
from myelin_testkit.blocks import random_blocks
from myelin_worker_cpu import tables as t
from myelin_worker_cpu.embedding import read_row
from myelin_worker_cpu.formats import FORMATS, HEADER_SLABS, SLAB_COLUMNS, TILE_ROWS, tiles
from myelin_worker_cpu.jit import kernel
from myelin_worker_cpu.program import describe_matrix
from myelin_worker_cpu.repack import TileWriter, repack
from myelin_worker_cpu.weights import Matrix

TYPES = sorted(FORMATS)
WHAT_THE_ISSUE_ASKS = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K Q2_K Q3_K"


def columns_of(ggml_type: GgmlType, blocks: int) -> int:
    """A number of columns that is odd in every way the type allows."""
    return blocks * BLOCKS[ggml_type][0] if BLOCKS[ggml_type][0] > 1 else 24 * blocks - 7


def dequantized(raw: np.ndarray, ggml_type: GgmlType, columns: int) -> np.ndarray:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if ggml_type is GgmlType.F32:
        return raw.view(np.float32)
    return dequantize(raw, GGMLQuantizationType(int(ggml_type))).reshape(len(raw), columns)


def raw_rows(ggml_type: GgmlType, rows: int, columns: int, seed: int) -> np.ndarray:
    return random_blocks(ggml_type, rows, columns, np.random.default_rng(seed), deviation=0.5)


@pytest.fixture(scope="module")
def look_up():
    """``look_up(matrix, row)``: a row of a tiled matrix, through compiled code."""

    def compiled(table: int, row: int, out: int) -> None:
        read_row(pointer(table), row, np.float32(1.0), out)

    from myelin_worker_cpu.pointers import integers as pointer

    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)((holder := kernel(compiled, 3, cached=False)).address)

    def call(matrix: Matrix, row: int) -> np.ndarray:
        assert holder is not None
        table = np.zeros(t.MATRIX_SIZE, dtype=np.int64)
        describe_matrix(table, matrix)
        out = np.full(matrix.columns, np.nan, dtype=np.float32)
        function(table.ctypes.data, row, out.ctypes.data)
        return out

    return call


def test_every_type_of_the_issue_is_there() -> None:
    assert {kind.name for kind in FORMATS} == set(WHAT_THE_ISSUE_ASKS.split())


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda kind: kind.name)
def test_slabs_are_aligned_and_small(ggml_type: GgmlType) -> None:
    fmt = FORMATS[ggml_type]
    assert fmt.slab_bytes % 64 == 0
    assert fmt.header_bytes % 64 == 0
    columns = SLAB_COLUMNS * HEADER_SLABS
    assert fmt.tile_bytes(columns) == HEADER_SLABS * fmt.slab_bytes + fmt.header_bytes
    # decoding is as fast as these bytes can be read: the common types have none that the file hasn't
    surplus = {"Q3_K": 1.06, "Q6_K": 1.01}.get(ggml_type.name, 1.0)
    assert fmt.tile_bytes(columns) <= surplus * TILE_ROWS * row_bytes(ggml_type, columns)
    if fmt.offset:
        assert fmt.offset & (fmt.offset - 1) == 0  # kernels shift by it


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (17, 3), (33, 2)])
def test_tiles_hold_what_the_file_holds(look_up, ggml_type: GgmlType, rows: int, blocks: int) -> None:
    columns = columns_of(ggml_type, blocks)
    raw = raw_rows(ggml_type, rows, columns, 1)
    matrix = Matrix(FORMATS[ggml_type], rows, columns, repack(ggml_type, raw, columns))
    found = np.stack([look_up(matrix, row) for row in range(rows)])
    np.testing.assert_allclose(found, dequantized(raw, ggml_type, columns), rtol=2e-6, atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(
    ggml_type=st.sampled_from(TYPES), rows=st.integers(1, 70), blocks=st.integers(1, 3), step=st.sampled_from([16, 32])
)
def test_chunks_of_rows_make_the_same_tiles(ggml_type: GgmlType, rows: int, blocks: int, step: int) -> None:
    columns = columns_of(ggml_type, blocks)
    raw = raw_rows(ggml_type, rows, columns, 2)
    writer = TileWriter(ggml_type, rows, columns)
    for first in range(0, rows, step):
        writer.put(first, raw[first : first + step])
    assert writer.tiles.ctypes.data % 64 == 0
    assert len(writer.tiles) == tiles(rows) * FORMATS[ggml_type].tile_bytes(columns)
    np.testing.assert_array_equal(writer.tiles, repack(ggml_type, raw, columns))
