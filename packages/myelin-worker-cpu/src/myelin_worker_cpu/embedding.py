"""One row of a tiled matrix as float32: the token embedding's look-up, and the readable twin of :mod:`tile_dot`."""

from __future__ import annotations

from typing import Any

from myelin_worker_cpu import tables as t
from myelin_worker_cpu.formats import HEADER_BYTES, Scales
from myelin_worker_cpu.jit import inlined
from myelin_worker_cpu.pointers import load_f32, load_half, load_u8, load_u16_as_bfloat, store_f32

_HALF_MIN = int(Scales.HALF_MIN)
_SUPER_MIN = int(Scales.SUPER_MIN)
_SUPER_16 = int(Scales.SUPER_16)
_HEADER_BYTES = HEADER_BYTES[Scales.SUPER_MIN]


@inlined
def read_row(matrix: Any, row: int, factor: float, out: int) -> None:
    """Write row ``row`` of the matrix (a row of the matrices table) times ``factor`` to the f32 at address ``out``."""
    lane = row % 16
    tile = matrix[t.WEIGHTS] + row // 16 * matrix[t.TILE_BYTES]
    columns = matrix[t.COLUMNS]
    kind = matrix[t.ELEMENT]
    if kind == 1:
        for column in range(columns):
            store_f32(load_f32(tile + column * 64 + lane * 4) * factor, out + column * 4)
    elif kind == 2:
        for column in range(columns):
            store_f32(load_half(tile + column * 32 + lane * 2) * factor, out + column * 4)
    elif kind == 3:
        for column in range(columns):
            store_f32(load_u16_as_bfloat(tile + column * 32 + lane * 2) * factor, out + column * 4)
    else:
        for group in range(columns // 32):
            _read_group(matrix, tile, group, lane, factor, out + group * 128)


@inlined
def _six_bits(packed: int, slab: int) -> Any:
    """A packed number: of the slab, and at an address in the first of the three vectors (see :mod:`formats`)."""
    if slab < 3:
        return load_u8(packed + slab * 64) & 63
    return load_u8(packed) >> 6 | load_u8(packed + 64) >> 6 << 2 | load_u8(packed + 128) >> 6 << 4


@inlined
def _read_group(matrix: Any, tile: int, group: int, lane: int, factor: float, out: int) -> None:
    """32 columns of a quantised row."""
    low_bits, high_bits, scales = matrix[t.LOW_BITS], matrix[t.HIGH_BITS], matrix[t.SCALES]
    low_bytes, high_bytes = 64 * low_bits, 64 * high_bits
    slab_bytes = matrix[t.SLAB_BYTES]
    slab_index = group // 2
    if scales >= _SUPER_MIN:
        header_bytes = _HEADER_BYTES if scales == _SUPER_MIN else 64
        header = tile + slab_index // 4 * (4 * slab_bytes + header_bytes)
        slab = header + header_bytes + slab_index % 4 * slab_bytes
    else:
        header = tile
        slab = tile + slab_index * slab_bytes
    scale_bytes = 64 if scales == _HALF_MIN else 32
    low = slab + group % 2 * low_bytes
    high = slab + 2 * low_bytes + group % 2 * high_bytes
    scale_at = slab + 2 * (low_bytes + high_bytes) + group % 2 * scale_bytes

    for column in range(32):
        quad, within = column // 4, lane * 4 + column % 4
        if low_bits == 8:
            code = load_u8(low + quad * 64 + within)
        elif low_bits == 4:
            code = load_u8(low + quad % 4 * 64 + within) >> (quad // 4 * 4) & 15
        else:
            code = load_u8(low + quad // 4 * 64 + within) >> (quad % 4 * 2) & 3
        if high_bits == 1:
            code |= (load_u8(high + quad * 8 + within // 8) >> (within % 8) & 1) << low_bits
        elif high_bits == 2:
            code |= (load_u8(high + quad // 4 * 64 + within) >> (quad % 4 * 2) & 3) << low_bits
        part = column // 16
        minimum = 0.0
        if scales < _SUPER_MIN:
            scale = load_half(scale_at + lane * 2)
            if scales == _HALF_MIN:
                minimum = load_half(scale_at + 32 + lane * 2)
        elif scales == _SUPER_MIN:
            packed = header + 64 + group % 2 * 32 + lane
            scale = load_half(header + lane * 2) * _six_bits(packed, slab_index % 4)
            minimum = load_half(header + 32 + lane * 2) * _six_bits(packed + 16, slab_index % 4)
        else:
            byte = load_u8(scale_at + part * 16 + lane)
            if scales == _SUPER_16:
                signed = byte - 256 if byte > 127 else byte
                scale = load_half(header + lane * 2) * signed
            else:
                scale = load_half(header + lane * 2) * (byte & 15)
                minimum = load_half(header + 32 + lane * 2) * (byte >> 4)
        store_f32(((code - matrix[t.OFFSET]) * scale - minimum) * factor, out + column * 4)
