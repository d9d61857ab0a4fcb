"""Compiled loops over tiles and blocks: the products that a stage calls by address, one for each format and width."""

from __future__ import annotations

from typing import Any

from myelin_worker_cpu.formats import SLAB_GROUPS, TileFormat
from myelin_worker_cpu.jit import kernel
from myelin_worker_cpu.records import FLOAT_ENTRY_BYTES, RECORD_BYTES
from myelin_worker_cpu.tile_dot import tile_dot

ARGUMENTS = 9
"""``(weights, tile_bytes, first_tile, end_tile, slabs, x, blocks, out, out_stride)``: addresses, counts, bytes."""


def compile_matmul(tile_format: TileFormat, width: int, *, cached: bool) -> Any:
    """The product of tiles ``[first_tile, end_tile)`` with ``blocks`` blocks of ``width`` activations.

    ``out`` is the address of ``f32[blocks * width, out_stride / 4]``; its columns ``16 * first_tile`` to ``16 *
    end_tile`` are written. A tile meets all blocks before the next is read, so weights come from memory once.
    """
    ggml_type = int(tile_format.ggml_type)
    entry = FLOAT_ENTRY_BYTES if tile_format.is_float else RECORD_BYTES
    slab_entries = SLAB_GROUPS * width * entry

    def matmul(
        weights: int,
        tile_bytes: int,
        first_tile: int,
        end_tile: int,
        slabs: int,
        x: int,
        blocks: int,
        out: int,
        out_stride: int,
    ) -> None:
        for tile in range(first_tile, end_tile):
            for block in range(blocks):
                tile_dot(
                    ggml_type,
                    width,
                    weights + tile * tile_bytes,
                    x + block * slabs * slab_entries,
                    out + block * width * out_stride + tile * 64,
                    out_stride,
                    slabs,
                )

    return kernel(matmul, ARGUMENTS, cached=cached)
