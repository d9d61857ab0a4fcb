"""From GGML's blocks to tiles, in NumPy, a chunk of rows at a time.

Each type has a function that takes its blocks apart into :class:`Parts`; what follows is the same for all of them:
rows are interleaved by transposing 4-byte units, and everything is put in its place through a structured view of the
tiles. GGML's layouts are those of ``ggml-common.h`` and ``ggml-quants.c`` (the ``gguf`` package's ``quants.py`` is
the readable form).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from myelin.engine_api import BLOCKS, GgmlType
from myelin_worker_cpu.formats import (
    FLOAT_HEADER_BYTES,
    FORMATS,
    HEADER_SLABS,
    PACKED_VECTORS,
    TILE_ROWS,
    Plane,
    Scales,
    TileFormat,
    tiles,
)
from myelin_worker_cpu.memory import Bytes, aligned


@dataclass(frozen=True, slots=True)
class Parts:
    """The blocks of some rows, taken apart. ``G`` is the number of groups of 32 columns.

    Attributes:
        low: ``uint8[rows, G, 16]`` for a nibble plane (column ``i`` low, ``16+i`` high), else codes ``uint8[rows, G,
        32]``.
        high: For a bit plane ``uint8[rows, G, 4]``, bit ``k`` (little endian) that of column ``k``; for a pair plane
        codes
            ``uint8[rows, G, 32]``; or None.
        scales: ``uint16[rows, G, 1 or 2]`` for halves, ``uint8[rows, G, 2]`` for the K types.
        header: ``uint16[rows, G/8, 2]`` for the K types, or None.
    """

    low: Bytes
    high: Bytes | None
    scales: NDArray[np.uint8] | NDArray[np.uint16]
    header: NDArray[np.uint16] | None = None


class TileWriter:
    """Fills the tiles of one matrix, chunk after chunk.

    Args:
        ggml_type: Of the matrix.
        rows, columns: Its size.
        memory: Zeroed room for the tiles, at a multiple of 64; new memory if it isn't given.

    Attributes:
        tiles: ``uint8[matrix_bytes]``, 64-byte aligned.
    """

    def __init__(self, ggml_type: GgmlType, rows: int, columns: int, memory: Bytes | None = None) -> None:
        self.format = FORMATS[ggml_type]
        self.rows = rows
        self.columns = columns
        self.tiles = aligned(self.format.matrix_bytes(rows, columns)) if memory is None else memory
        self._slabs = self.format.slabs(columns)

    def put(self, first_row: int, raw: Bytes) -> None:
        """Repack rows ``first_row…``: ``raw`` is ``uint8[count, row_bytes]``.

        ``first_row`` must be a multiple of 16, and so must ``count``, unless they are the last rows.
        """
        count = len(raw)
        padded = tiles(count) * TILE_ROWS
        if padded != count:
            raw = np.concatenate([raw, np.zeros((padded - count, raw.shape[1]), dtype=np.uint8)])
        size = self.format.tile_bytes(self.columns)
        first = first_row // TILE_ROWS
        target = self.tiles[first * size : (first + tiles(count)) * size]
        if self.format.is_float:
            self._put_floats(target, raw)
        else:
            self._put_parts(target, _UNPACK[self.format.ggml_type](_blocks(self.format, raw)))

    def _put_floats(self, target: Bytes, raw: Bytes) -> None:
        kind = np.dtype(f"<u{self.format.element_bytes}")
        numbers = raw.view(kind).reshape(-1, TILE_ROWS, self.columns)
        place = target.view(kind).reshape(len(numbers), -1, TILE_ROWS)
        place[:, : self.columns] = numbers.transpose(0, 2, 1)

    def _put_parts(self, target: Bytes, parts: Parts) -> None:
        fmt = self.format
        groups = 2 * self._slabs
        slab = np.dtype(
            [
                ("low", "<u4", (2, fmt.low_bytes // 64, TILE_ROWS)),
                ("high", "u1", (2, fmt.high_bytes)),
                ("scales", "u1", (2, fmt.scale_bytes)),
            ]
        )
        if fmt.header_bytes:
            packed = fmt.header_bytes - FLOAT_HEADER_BYTES
            block = np.dtype(
                [("header", "<u2", (2, TILE_ROWS)), ("packed", "u1", (packed,)), ("slabs", slab, (HEADER_SLABS,))]
            )
            view = target.view(block).reshape(-1, self._slabs // HEADER_SLABS)
            assert parts.header is not None
            view["header"] = parts.header.reshape(len(view), TILE_ROWS, -1, 2).transpose(0, 2, 3, 1)
            slabs = view["slabs"]
            shape: tuple[int, ...] = (len(view), self._slabs // HEADER_SLABS, HEADER_SLABS, 2)
        else:
            slabs = target.view(slab).reshape(-1, self._slabs)
            shape = (len(slabs), self._slabs, 2)
        low = _low_plane(fmt.low, _pad_groups(parts.low, groups))
        slabs["low"] = low.reshape(*shape, fmt.low_bytes // 64, TILE_ROWS)
        if parts.high is not None:
            slabs["high"] = _high_plane(fmt.high, _pad_groups(parts.high, groups)).reshape(*shape, fmt.high_bytes)
        scales = _pad_groups(parts.scales, groups).reshape(-1, TILE_ROWS, groups, parts.scales.shape[2])
        ordered = np.ascontiguousarray(scales.transpose(0, 2, 3, 1)).view(np.uint8)
        if fmt.scales is Scales.SUPER_MIN:
            view["packed"] = _pack_six_bits(ordered.reshape(*view.shape, HEADER_SLABS, 64))
        else:
            slabs["scales"] = ordered.reshape(*shape, fmt.scale_bytes)


def repack(ggml_type: GgmlType, raw: Bytes, columns: int) -> Bytes:
    """A whole matrix at once: ``uint8[rows, row_bytes]`` to the bytes of its tiles."""
    writer = TileWriter(ggml_type, len(raw), columns)
    writer.put(0, raw)
    return writer.tiles


def _blocks(fmt: TileFormat, raw: Bytes) -> Bytes:
    return np.ascontiguousarray(raw).reshape(len(raw), -1, BLOCKS[fmt.ggml_type][1])


def _pad_groups(array: NDArray, groups: int) -> NDArray:  # type: ignore[type-arg]  # of either unsigned type
    missing = groups - array.shape[1]
    if not missing:
        return array
    return np.concatenate([array, np.zeros((len(array), missing, array.shape[2]), dtype=array.dtype)], axis=1)


def _low_plane(plane: Plane, low: Bytes) -> NDArray[np.uint32]:
    """``uint32[tiles, G, vectors, 16]``."""
    if plane is Plane.PAIR:
        low = _join_pairs(low)
    words = np.ascontiguousarray(low).view("<u4")
    interleaved: NDArray[np.uint32] = words.reshape(-1, TILE_ROWS, *words.shape[1:]).transpose(0, 2, 3, 1)
    return interleaved


def _high_plane(plane: Plane, high: Bytes) -> Bytes:
    """``uint8[tiles, G, bytes]``."""
    if plane is Plane.PAIR:
        return np.ascontiguousarray(_low_plane(Plane.PAIR, high)).view(np.uint8).reshape(-1, high.shape[1], 128)
    bits = np.unpackbits(high, axis=2, bitorder="little")
    quads = bits.reshape(-1, TILE_ROWS, high.shape[1], 8, 4).transpose(0, 2, 3, 1, 4)
    return np.packbits(quads.reshape(len(quads), high.shape[1], -1), axis=2, bitorder="little")


def _pack_six_bits(numbers: Bytes) -> Bytes:
    """``uint8[…, 4, 64]`` of six bits each to ``uint8[…, 192]``: the fourth 64 lie two bits each above the others."""
    shifts = np.arange(0, 2 * PACKED_VECTORS, 2, dtype=np.uint8)[:, None]
    packed = numbers[..., :PACKED_VECTORS, :] | (numbers[..., PACKED_VECTORS:, :] >> shifts & 3) << 6
    return packed.astype(np.uint8, copy=False).reshape(*numbers.shape[:-2], 64 * PACKED_VECTORS)


def _join_pairs(codes: Bytes) -> Bytes:
    """2-bit codes ``[rows, G, 32]`` to ``[rows, G, 8]``: byte ``4h+c`` has columns ``16h+4s+c`` at bits ``2s``."""
    parts = codes.reshape(*codes.shape[:2], 2, 4, 4)
    joined = parts[..., 0, :] | parts[..., 1, :] << 2 | parts[..., 2, :] << 4 | parts[..., 3, :] << 6
    return joined.astype(np.uint8, copy=False).reshape(*codes.shape[:2], 8)


def _halves(blocks: Bytes, first: int, count: int) -> NDArray[np.uint16]:
    return np.ascontiguousarray(blocks[..., first : first + 2 * count]).view("<u2")


def _with_minimum(blocks: Bytes) -> NDArray[np.uint16]:
    """Scale and minimum of Q4_1 and Q5_1; they add the minimum, we subtract it."""
    both = _halves(blocks, 0, 2)
    both[..., 1] ^= 0x8000
    return both


def _q4_0(blocks: Bytes) -> Parts:
    return Parts(blocks[..., 2:], None, _halves(blocks, 0, 1))


def _q4_1(blocks: Bytes) -> Parts:
    return Parts(blocks[..., 4:], None, _with_minimum(blocks))


def _q5_0(blocks: Bytes) -> Parts:
    return Parts(blocks[..., 6:], blocks[..., 2:6], _halves(blocks, 0, 1))


def _q5_1(blocks: Bytes) -> Parts:
    return Parts(blocks[..., 8:], blocks[..., 4:8], _with_minimum(blocks))


def _q8_0(blocks: Bytes) -> Parts:
    return Parts((blocks[..., 2:] ^ 0x80).astype(np.uint8, copy=False), None, _halves(blocks, 0, 1))


def _q2_k(blocks: Bytes) -> Parts:
    rows, count = blocks.shape[:2]
    codes = _two_bits(blocks[..., 16:80])
    return Parts(codes, None, blocks[..., :16].reshape(rows, 8 * count, 2), _halves(blocks, 80, 2))


def _q3_k(blocks: Bytes) -> Parts:
    rows, count = blocks.shape[:2]
    codes = _two_bits(blocks[..., 32:96])
    packed = blocks[..., 96:108]
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    shifts = np.repeat(np.arange(0, 8, 2, dtype=np.uint8), 4)
    high = np.tile(packed[..., 8:], 4) >> shifts & 3
    scales = ((low | high << 4).view(np.int8) - 32).view(np.uint8)
    header = np.concatenate([_halves(blocks, 108, 1), np.zeros((rows, count, 1), np.uint16)], axis=-1)
    return Parts(codes, _bit_planes(blocks[..., :32]), scales.reshape(rows, 8 * count, 2), header)


def _q4_k(blocks: Bytes) -> Parts:
    return Parts(_nibble_pairs(blocks[..., 16:]), None, _six_bit_scales(blocks), _halves(blocks, 0, 2))


def _q5_k(blocks: Bytes) -> Parts:
    return Parts(
        _nibble_pairs(blocks[..., 48:]), _bit_planes(blocks[..., 16:48]), _six_bit_scales(blocks), _halves(blocks, 0, 2)
    )


def _q6_k(blocks: Bytes) -> Parts:
    rows, count = blocks.shape[:2]
    # 64 bytes for 128 columns: 32 bytes hold columns 0-31 (low) and 64-95 (high), the next 32-63 and 96-127
    quarters = blocks[..., :128].reshape(rows, count, 2, 2, 32)
    codes = np.stack([quarters & 15, quarters >> 4], axis=3).reshape(rows, 8 * count, 32)
    header = np.concatenate([_halves(blocks, 208, 1), np.zeros((rows, count, 1), np.uint16)], axis=-1)
    scales = blocks[..., 192:208].reshape(rows, 8 * count, 2)
    return Parts(_join_nibbles(codes), _two_bits(blocks[..., 128:192]), scales, header)


def _two_bits(packed: Bytes) -> Bytes:
    """``[rows, blocks, 64]`` to codes ``[rows, G, 32]``: 32 bytes hold four groups, two bits each."""
    rows, count = packed.shape[:2]
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = packed.reshape(rows, count, 2, 1, 32) >> shifts & 3
    return codes.astype(np.uint8, copy=False).reshape(rows, 8 * count, 32)


def _bit_planes(packed: Bytes) -> Bytes:
    """``[rows, blocks, 32]``, bit ``g`` of byte ``k`` for column ``k`` of group ``g``, to ``[rows, G, 4]``."""
    rows, count = packed.shape[:2]
    bits = np.unpackbits(packed[..., None], axis=-1, bitorder="little").swapaxes(-1, -2)
    return np.packbits(bits, axis=-1, bitorder="little").reshape(rows, 8 * count, 4)


def _join_nibbles(codes: Bytes) -> Bytes:
    return (codes[..., :16] | codes[..., 16:] << 4).astype(np.uint8, copy=False)


def _nibble_pairs(packed: Bytes) -> Bytes:
    """``[rows, blocks, 128]``, 32 bytes for two groups (low and high halves), to a nibble plane's ``[rows, G, 16]``."""
    rows, count = packed.shape[:2]
    chunks = packed.reshape(rows, count, 4, 2, 16)
    first, second = chunks[..., 0, :], chunks[..., 1, :]
    even = first & 15 | second << 4
    odd = first >> 4 | second & 0xF0
    return np.stack([even, odd], axis=3).reshape(rows, 8 * count, 16)


def _six_bit_scales(blocks: Bytes) -> Bytes:
    """Scale and minimum of the eight groups of a Q4_K or Q5_K block (``get_scale_min_k4``): ``[rows, G, 2]``."""
    rows, count = blocks.shape[:2]
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minimums = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return np.stack([scales, minimums], axis=-1).reshape(rows, 8 * count, 2)


_UNPACK: dict[GgmlType, Callable[[Bytes], Parts]] = {
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q2_K: _q2_k,
    GgmlType.Q3_K: _q3_k,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
}
