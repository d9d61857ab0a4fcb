"""Repacking GGUF rows into planes, wherever the tensor lies (torch, CPU or GPU), and the NumPy oracle that reads
planes.

The layouts are those of :mod:`myelin_worker_triton.layouts`; the block formats are ggml's (``ggml-common.h``). A
matrix is never dequantised whole: codes stay codes, and only the scales of a group are multiplied out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from myelin_worker_triton.layouts import BOOKS, E2M1_CODES, GROUP, LAYOUTS, Book, Layout, Plain, Scales, padded_stride

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix in planes.

    Attributes:
        kind: GGML's name of the type.
        rows, columns: Its shape.
        low: ``int32[rows, low stride]``; an unquantized matrix is here.
        high: ``int32[rows, high stride]``; one element where the format has no high plane.
        scales: ``int16`` or ``int32``, ``[rows, scale stride]``; one element where the format has none.
        gain: What scales were divided by, a power of two that puts the largest near the top of float16's range.
    """

    kind: str
    rows: int
    columns: int
    low: Tensor
    high: Tensor
    scales: Tensor
    gain: float

    @property
    def layout(self) -> Layout:
        """Of its type."""
        return LAYOUTS[self.kind]

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return sum(plane.numel() * plane.element_size() for plane in (self.low, self.high, self.scales))


def planned_bytes(kind: str, rows: int, columns: int) -> int:
    """What :func:`repack` will hold for such a matrix."""
    low, high, scales = plane_strides(kind, columns)
    layout = LAYOUTS[kind]
    scale_size = 2 if layout.plain or layout.scales is Scales.ONE else 4
    total = rows * low * 4
    total += rows * high * 4 if high else 4
    return total + (rows * scales * scale_size if scales else scale_size)


def plane_strides(kind: str, columns: int) -> tuple[int, int, int]:
    """Elements of a row of the low, high and scale planes; 0 where there is no such plane.

    Raises:
        ValueError: ``columns`` isn't a whole number of groups (of pairs for unquantized 16-bit types).
    """
    layout = LAYOUTS[kind]
    if layout.plain:
        if layout.plain is not Plain.F32 and columns % 2:
            raise ValueError(f"{columns} columns of {kind} cannot be paired")
        return padded_stride(columns if layout.plain is Plain.F32 else columns // 2), 0, 0
    if columns % GROUP:
        raise ValueError(f"{columns} columns are not a whole number of groups of {GROUP}")
    groups = columns // GROUP
    low = padded_stride(groups * layout.low_words)
    if layout.low == 8:
        low *= 2
    high = padded_stride(groups * layout.high) if layout.high else 0
    per_group = 2 if layout.scales is Scales.HALVES_MINIMUM else 1
    return low, high, padded_stride(groups * per_group)


def repack(kind: str, rows: int, columns: int, chunks: Iterable[Tensor], device: torch.device | str = "cpu") -> Matrix:
    """Build a matrix from its GGUF rows.

    Args:
        kind: GGML's name of the type, one of :data:`~myelin_worker_triton.layouts.LAYOUTS`.
        rows, columns: Its shape.
        chunks: Consecutive rows, ``uint8[n, row_bytes]`` each, ``rows`` in all; moved to ``device`` and unpacked there.
        device: Where the planes are made.
    """
    layout = LAYOUTS[kind]
    low_stride, high_stride, scale_stride = plane_strides(kind, columns)
    low = torch.zeros((rows, low_stride), dtype=torch.int32, device=device)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    high = torch.zeros((rows, high_stride), dtype=torch.int32, device=device) if high_stride else none
    parts: list[Tensor] = []
    first = 0
    for chunk in chunks:
        if not chunk.shape[0]:
            continue
        raw = chunk.to(device, non_blocking=True)
        end = first + raw.shape[0]
        if layout.plain:
            low[first:end, : low_stride_used(layout, columns)] = _pair(layout, raw)
        else:
            codes, scales = _UNPACK[kind](raw)
            packed = _pack_low(layout, codes)
            if layout.low == 8:
                half = low_stride // 2
                low[first:end, : packed.shape[1] // 2] = packed[:, : packed.shape[1] // 2]
                low[first:end, half : half + packed.shape[1] // 2] = packed[:, packed.shape[1] // 2 :]
            else:
                low[first:end, : packed.shape[1]] = packed
            if layout.high:
                bits = _pack_bits(codes >> layout.low, layout.high)
                high[first:end, : bits.shape[1]] = bits
            parts.append(scales)
        first = end
    if first != rows:
        raise ValueError(f"{first} rows came, of {rows}")
    if layout.plain:
        return Matrix(kind, rows, columns, low, high, torch.zeros(1, dtype=torch.int16, device=device), 1.0)
    gain = _gain(parts)
    width = 1 if layout.scales is Scales.ONE else 2
    dtype = torch.int16 if width == 1 else torch.int32
    plane = torch.zeros((rows, scale_stride), dtype=dtype, device=device)
    first = 0
    for scales in parts:
        halves = (scales / gain).to(torch.float16).contiguous().view(dtype)
        plane[first : first + scales.shape[0], : halves.shape[1]] = halves
        first += scales.shape[0]
    return Matrix(kind, rows, columns, low, high, plane, gain)


def low_stride_used(layout: Layout, columns: int) -> int:
    """Words of an unquantized row."""
    return columns if layout.plain is Plain.F32 else columns // 2


def _gain(parts: list[Tensor]) -> float:
    largest = max((float(scales.abs().max()) for scales in parts if scales.numel()), default=0.0)
    if not math.isfinite(largest) or largest == 0.0:
        return 1.0
    return float(2.0 ** max(-126, min(127, math.frexp(largest)[1] - 14)))


def _pair(layout: Layout, raw: Tensor) -> Tensor:
    """Unquantized rows as words: element ``i`` below, element ``i + columns / 2`` above."""
    if layout.plain is Plain.F32:
        return raw.contiguous().view(torch.int32)
    halves = raw.contiguous().view(torch.int16)
    middle = halves.shape[1] // 2
    return torch.stack([halves[:, :middle], halves[:, middle:]], dim=2).contiguous().view(torch.int32)[:, :, 0]


def _pack_low(layout: Layout, codes: Tensor) -> Tensor:
    """Low planes, ``int32[rows, words]``, of ``uint8[rows, groups, 32]``."""
    rows = codes.shape[0]
    if layout.low == 8:
        split = torch.cat([codes[:, :, :16].reshape(rows, -1), codes[:, :, 16:].reshape(rows, -1)], dim=1)
        return split.contiguous().view(torch.int32)
    if layout.low == 2:
        return _pack_bits(codes & 3, 2)
    if layout.book is Book.IQ4:
        quads = codes.view(rows, -1, 2, 4, 2, 2)  # half, word, pair, place
        pairs = quads[..., 0] | quads[..., 1] << 4
        packed = pairs.permute(0, 1, 3, 2, 4)
    else:
        packed = codes[:, :, :16] & 15 | (codes[:, :, 16:] & 15) << 4
    return packed.reshape(rows, -1).contiguous().view(torch.int32)


def _pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Planes of 1 or 2 bits: ``uint8[rows, groups, 32]`` as ``int32[rows, groups * bits]``."""
    rows = codes.shape[0]
    words = codes.view(rows, -1, bits, 8 // bits, 4)
    packed = torch.zeros_like(words[:, :, :, 0])
    for place in range(8 // bits):
        packed |= words[:, :, :, place] << (bits * place)
    return packed.reshape(rows, -1).contiguous().view(torch.int32)


# Unpacking blocks: codes uint8[rows, groups, 32], and scales float32[rows, numbers] in the order of the scale plane
# ----

Unpacked = tuple[Tensor, Tensor]


def _blocks(raw: Tensor, size: int) -> Tensor:
    return raw.view(raw.shape[0], -1, size)


def _half(blocks: Tensor, at: int) -> Tensor:
    """A float16 of each block as ``float32[rows, blocks]``."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0].to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """Each run of bytes as its low nibbles followed by its high nibbles."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _shifted(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """``[..., n]`` bytes as ``[..., shifts, n]`` fields."""
    return torch.stack([(packed >> shift) & mask for shift in shifts], dim=-2)


def _rows(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], -1)


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    return _rows(torch.stack([first, second], dim=-1))


def _bits32(packed: Tensor) -> Tensor:
    """Four bytes of each block as 32 bits, ``uint8[rows, blocks, 32]``."""
    return _shifted(packed, tuple(range(8)), 1).transpose(-1, -2).reshape(*packed.shape[:2], 32)


def _q4_0(raw: Tensor) -> Unpacked:
    blocks = _blocks(raw, 18)
    return _nibbles(blocks[:, :, 2:]), _half(blocks, 0)


def _q4_1(raw: Tensor) -> Unpacked:
    blocks = _blocks(raw, 20)
    return _nibbles(blocks[:, :, 4:]), _interleave(_half(blocks, 0), _half(blocks, 2))


def _q5_0(raw: Tensor) -> Unpacked:
    blocks = _blocks(raw, 22)
    return _nibbles(blocks[:, :, 6:]) | _bits32(blocks[:, :, 2:6]) << 4, _half(blocks, 0)


def _q5_1(raw: Tensor) -> Unpacked:
    blocks = _blocks(raw, 24)
    codes = _nibbles(blocks[:, :, 8:]) | _bits32(blocks[:, :, 4:8]) << 4
    return codes, _interleave(_half(blocks, 0), _half(blocks, 2))


def _q8_0(raw: Tensor) -> Unpacked:
    blocks = _blocks(raw, 34)
    return blocks[:, :, 2:], _half(blocks, 0)


def _q2_k(raw: Tensor) -> Unpacked:
    blocks = _blocks(raw, 84)
    quants = blocks[:, :, 16:80].reshape(raw.shape[0], -1, 32)
    codes = _shifted(quants, (0, 2, 4, 6), 3).reshape(raw.shape[0], -1, 32)
    packed = blocks[:, :, :16]
    scales = _half(blocks, 80)[:, :, None] * (packed & 15).to(torch.float32)
    minimums = _half(blocks, 82)[:, :, None] * (packed >> 4).to(torch.float32)
    return codes, _interleave(scales, -minimums)


def _q3_k(raw: Tensor) -> Unpacked:
    blocks = _blocks(raw, 110)
    rows = raw.shape[0]
    low = _shifted(blocks[:, :, 32:96].reshape(rows, -1, 32), (0, 2, 4, 6), 3).reshape(rows, -1, 32)
    high = _shifted(blocks[:, :, :32], tuple(range(8)), 1).reshape(rows, -1, 32)
    low_scales = _nibbles(blocks[:, :, 96:104])
    high_scales = _shifted(blocks[:, :, 104:108], (0, 2, 4, 6), 3).reshape(rows, -1, 16)
    scales = (low_scales | high_scales << 4).to(torch.float32) - 32.0
    return low | high << 2, _rows(_half(blocks, 108)[:, :, None] * scales)


def _six_bit(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and eight minimums in 12 bytes of Q4_K and Q5_K, ``float32[rows, blocks, 8]`` each."""
    first, second, third = packed[:, :, 0:4], packed[:, :, 4:8], packed[:, :, 8:12]
    scales = torch.cat([first & 63, third & 15 | (first >> 2) & 48], dim=-1)
    minimums = torch.cat([second & 63, third >> 4 | (second >> 2) & 48], dim=-1)
    return scales.to(torch.float32), minimums.to(torch.float32)


def _super_scales(blocks: Tensor) -> Tensor:
    scales, minimums = _six_bit(blocks[:, :, 4:16])
    return _interleave(_half(blocks, 0)[:, :, None] * scales, -(_half(blocks, 2)[:, :, None] * minimums))


def _q4_k(raw: Tensor) -> Unpacked:
    blocks = _blocks(raw, 144)
    quants = blocks[:, :, 16:].reshape(raw.shape[0], -1, 32)
    return _shifted(quants, (0, 4), 15).reshape(raw.shape[0], -1, 32), _super_scales(blocks)


def _q5_k(raw: Tensor) -> Unpacked:
    blocks = _blocks(raw, 176)
    rows = raw.shape[0]
    low = _shifted(blocks[:, :, 48:].reshape(rows, -1, 32), (0, 4), 15).reshape(rows, -1, 32)
    high = _shifted(blocks[:, :, 16:48], tuple(range(8)), 1).reshape(rows, -1, 32)
    return low | high << 4, _super_scales(blocks)


def _q6_k(raw: Tensor) -> Unpacked:
    blocks = _blocks(raw, 210)
    rows = raw.shape[0]
    low = _shifted(blocks[:, :, :128].reshape(rows, -1, 64), (0, 4), 15).reshape(rows, -1, 32)
    high = _shifted(blocks[:, :, 128:192].reshape(rows, -1, 32), (0, 2, 4, 6), 3).reshape(rows, -1, 32)
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).to(torch.float32)
    return low | high << 4, _rows(_half(blocks, 208)[:, :, None] * scales)


def _iq4_xs(raw: Tensor) -> Unpacked:
    blocks = _blocks(raw, 136)
    codes = _nibbles(blocks[:, :, 8:].reshape(raw.shape[0], -1, 16))
    low = _shifted(blocks[:, :, 4:8], (0, 4), 15).transpose(-1, -2).reshape(raw.shape[0], -1, 8)
    high = _shifted(blocks[:, :, 2:4], (0, 2, 4, 6), 3).transpose(-1, -2).reshape(raw.shape[0], -1, 8)
    scales = (low | high << 4).to(torch.float32) - 32.0
    return codes, _rows(_half(blocks, 0)[:, :, None] * scales)


def _mxfp4(raw: Tensor) -> Unpacked:
    blocks = _blocks(raw, 17)
    exponents = blocks[:, :, 0].to(torch.float64) - 128.0  # half of 2^(e - 127): the codebook is doubled
    ours = torch.tensor(E2M1_CODES, dtype=torch.uint8, device=raw.device)
    return ours[_nibbles(blocks[:, :, 1:]).long()], torch.exp2(exponents).to(torch.float32)


_UNPACK: dict[str, Callable[[Tensor], Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


# The oracle ---------------------------------------------------------------------------------------------------------


def read_planes(matrix: Matrix) -> NDArray[np.float64]:
    """What a matrix in planes means, ``float64[rows, columns]``: slow, obvious, element by element of a group."""
    layout, columns = matrix.layout, matrix.columns
    low = matrix.low.cpu().numpy()
    if layout.plain:
        words = np.ascontiguousarray(low[:, : low_stride_used(layout, columns)])
        if layout.plain is Plain.F32:
            return words.view(np.float32).astype(np.float64)
        halves = np.concatenate([words & 0xFFFF, words >> 16 & 0xFFFF], axis=1).astype(np.uint16)
        if layout.plain is Plain.F16:
            return halves.view(np.float16).astype(np.float64)
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    groups = columns // GROUP
    numbers = np.ascontiguousarray(matrix.scales.cpu().numpy()).view(np.float16).astype(np.float64) * matrix.gain
    high = matrix.high.cpu().numpy()
    result = np.zeros((matrix.rows, groups, GROUP))
    book = np.array(BOOKS[layout.book], np.float64) if layout.book is not Book.NONE else None
    for element in range(GROUP):
        half, inside = divmod(element, 16)
        word, byte = divmod(inside, 4)
        if layout.low == 8:
            at = np.arange(groups) * 4 + word + half * (low.shape[1] // 2)
            code = ((low[:, at] >> 8 * byte & 255) ^ 128) - 128
        elif layout.low == 2:
            code = low[:, np.arange(groups) * 2 + half] >> (8 * byte + 2 * word) & 3
        elif layout.book is Book.IQ4:
            code = low[:, np.arange(groups) * 4 + word] >> (16 * half + 4 * byte) & 15
        else:
            code = low[:, np.arange(groups) * 4 + word] >> (8 * byte + 4 * half) & 15
        if layout.high == 1:
            code = code | (high[:, np.arange(groups)] >> (8 * byte + 4 * half + word) & 1) << layout.low
        elif layout.high == 2:
            code = code | (high[:, np.arange(groups) * 2 + half] >> (8 * byte + 2 * word) & 3) << layout.low
        value = book[code] if book is not None else code.astype(np.float64) - layout.offset
        if layout.scales is Scales.ONE:
            result[:, :, element] = numbers[:, :groups] * value
        elif layout.scales is Scales.MINIMUM:
            result[:, :, element] = numbers[:, 0 : 2 * groups : 2] * value + numbers[:, 1 : 2 * groups : 2]
        elif layout.scales is Scales.HALVES:
            result[:, :, element] = numbers[:, half : 2 * groups : 2] * value
        else:
            at = np.arange(groups) * 4 + 2 * half
            result[:, :, element] = numbers[:, at] * value + numbers[:, at + 1]
    return result.reshape(matrix.rows, columns)
