"""Compiled loops over tiles and blocks: the functions that a stage calls through pointers, one for each format and width."""

from __future__ import annotations

from typing import Any

import numba
from numba import types

from myelin_worker_cpu.formats import TileFormat
from myelin_worker_cpu.tile_dot import tile_dot

SIGNATURE = types.void(*[types.int64] * 9)
"""``(weights, tile_bytes, first_tile, end_tile, slabs, x, blocks, out, out_stride)``: addresses, counts, bytes."""


def compile_matmul(tile_format: TileFormat, width: int, *, cached: bool) -> Any:
    """The product of tiles ``[first_tile, end_tile)`` with ``blocks`` blocks of ``width`` activations.

    ``out`` is the address of ``f32[blocks * width, out_stride / 4]``; the columns ``16 * first_tile`` to ``16 * end_tile``
    of it are written. A tile meets all blocks before the next tile is read, so weights come from memory once.
    """
    ggml_type = int(tile_format.ggml_type)
    record = 128 if tile_format.is_float else 64
    group_bytes = record * width

    def matmul(weights, tile_bytes, first_tile, end_tile, slabs, x, blocks, out, out_stride):  # type: ignore[no-untyped-def]  # typed by SIGNATURE
        for tile in range(first_tile, end_tile):
            for block in range(blocks):
                tile_dot(
                    ggml_type,
                    width,
                    weights + tile * tile_bytes,
                    x + block * (slabs * 2) * group_bytes,
                    out + block * width * out_stride + tile * 64,
                    out_stride,
                    slabs,
                )

    return numba.cfunc(SIGNATURE, cache=cached, nopython=True)(matmul)
