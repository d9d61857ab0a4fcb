"""Quantized blocks for synthetic models: a simple quantizer for each K-type, and valid random blocks of every type.

The ``gguf`` package quantizes the older types and dequantizes them all, but has no quantizer for K-types. Those here
are plain: they take each sub-block's extremes and round to nearest. They needn't be good, for the dequantizer defines
what a block means; they must be *valid*, and near enough to their input that a model made with them behaves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from myelin.model.quant import BLOCKS, GgmlType, row_bytes

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

SUPER = 256
"""Elements of a K-type's block."""


def encode(values: Floats, ggml_type: GgmlType) -> Bytes:
    """Quantize ``float32[rows, columns]`` to ``uint8[rows, row_bytes]``.

    Raises:
        ValueError: ``columns`` is not a whole number of blocks, or nobody here quantizes to this type (use
            :func:`random_blocks`).
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    rows, columns = values.shape
    width = row_bytes(ggml_type, columns)
    quantizer = _K_QUANTIZERS.get(ggml_type)
    if quantizer is not None:
        return quantizer(values.reshape(-1, SUPER).astype(np.float32)).reshape(rows, width)
    try:
        packed = quantize(np.ascontiguousarray(values, np.float32), GGMLQuantizationType(int(ggml_type)))
    except NotImplementedError as error:
        raise ValueError(f"no quantizer for {ggml_type.name}") from error
    return np.ascontiguousarray(packed).view(np.uint8).reshape(rows, width)


def can_encode(ggml_type: GgmlType) -> bool:
    """Whether :func:`encode` has a quantizer for this type."""
    try:
        encode(np.zeros((1, SUPER), np.float32), ggml_type)
    except ValueError:
        return False
    return True


def random_blocks(
    ggml_type: GgmlType, rows: int, columns: int, generator: np.random.Generator, *, deviation: float
) -> Bytes:
    """Valid random rows, ``uint8[rows, row_bytes]``, whose values have about mean 0 and this standard deviation.

    Fast whatever the size: some thousands of blocks are drawn, and then repeated in shuffled order.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    elements, size = BLOCKS[ggml_type]
    count = rows * row_bytes(ggml_type, columns) // size
    drawn = min(count, max(64, 65536 // elements))
    if ggml_type in (GgmlType.F32, GgmlType.F16, GgmlType.BF16):
        sample = encode(generator.normal(0, deviation, (drawn, 1)).astype(np.float32), ggml_type)
    else:
        # Any bits are valid quants; the scales alone must be sane. With unit scales the values' real deviation is
        # measured, and the scales are then set to what makes it the one that was asked for.
        sample = generator.integers(0, 256, (drawn, size), dtype=np.uint8)
        if ggml_type is GgmlType.Q8_0:
            sample[sample == 0x80] = 0x81  # no quantizer writes -128, and kernels may rely on that
        if ggml_type is GgmlType.TQ2_0:
            sample &= ~(sample >> np.uint8(1) & np.uint8(0x55))  # trits are 0, 1, 2: 3 becomes 2
        _set_scales(sample, ggml_type, 1.0)
        unit = dequantize(sample[: min(drawn, 256)], GGMLQuantizationType(int(ggml_type)))
        _set_scales(sample, ggml_type, deviation / max(float(np.std(unit)), 1e-6))
    if count > drawn:
        sample = sample[generator.integers(0, drawn, count)]
    return sample.reshape(rows, -1)


def _set_scales(blocks: Bytes, ggml_type: GgmlType, scale: float) -> None:
    """Write block scales (and minimums that centre the values) into random blocks, in place."""
    if ggml_type is GgmlType.MXFP4:  # a power of two, as its exponent plus 127
        blocks[:, 0] = np.clip(round(np.log2(scale)) + 127, 1, 254)
        return
    if ggml_type is GgmlType.IQ1_M:  # the float16's four nibbles are the top ones of four 16-bit groups of sub-scales
        bits = int(np.float16(scale).view(np.uint16))
        for index in range(4):
            high = blocks[:, 48 + 2 * index + 1]
            high &= 0x0F
            high |= ((bits >> (4 * index)) & 0x0F) << 4
        return
    at, minimum_at, minimum = _SCALES[ggml_type]
    blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    if minimum_at is not None:
        blocks[:, minimum_at : minimum_at + 2] = np.array([scale * minimum], np.float16).view(np.uint8)


# type: (offset of the float16 scale, offset of the float16 minimum or None, minimum for a scale of 1 that gives mean 0)
_SCALES: dict[GgmlType, tuple[int, int | None, float]] = {
    GgmlType.Q4_0: (0, None, 0.0),
    GgmlType.Q4_1: (0, 2, -7.5),
    GgmlType.Q5_0: (0, None, 0.0),
    GgmlType.Q5_1: (0, 2, -15.5),
    GgmlType.Q8_0: (0, None, 0.0),
    GgmlType.Q2_K: (80, 82, 1.5),
    GgmlType.Q3_K: (108, None, 0.0),
    GgmlType.Q4_K: (0, 2, 7.5),
    GgmlType.Q5_K: (0, 2, 15.5),
    GgmlType.Q6_K: (208, None, 0.0),
    GgmlType.IQ2_XXS: (0, None, 0.0),
    GgmlType.IQ2_XS: (0, None, 0.0),
    GgmlType.IQ2_S: (0, None, 0.0),
    GgmlType.IQ3_XXS: (0, None, 0.0),
    GgmlType.IQ3_S: (0, None, 0.0),
    GgmlType.IQ1_S: (0, None, 0.0),
    GgmlType.IQ4_NL: (0, None, 0.0),
    GgmlType.IQ4_XS: (0, None, 0.0),
    GgmlType.TQ1_0: (52, None, 0.0),
    GgmlType.TQ2_0: (64, None, 0.0),
}


def _float16(values: Floats) -> tuple[Bytes, Floats]:
    """One scale for each block as its two bytes, and as the value that a reader gets back, ``float32[blocks, 1]``."""
    half = values.astype(np.float16).reshape(-1, 1)
    return half.view(np.uint8), half.astype(np.float32)


def _over(numerator: Floats, denominator: Floats) -> Floats:
    """``numerator / denominator``, and 0 where the denominator is 0."""
    safe = np.where(denominator == 0, np.float32(1), denominator)
    return np.where(denominator == 0, np.float32(0), numerator / safe).astype(np.float32)


def _with_minimums(
    blocks: Floats, parts: int, levels: int, scale_levels: int
) -> tuple[Bytes, Bytes, Bytes, Bytes, Bytes]:
    """Affine sub-blocks, ``d * scale * q - dmin * minimum``.

    Returns:
        ``d`` and ``dmin`` as bytes, the sub-blocks' scales and minimums, and the quants ``uint8[blocks, 256]``.
    """
    split = blocks.reshape(len(blocks), parts, -1)
    low = np.minimum(split.min(axis=2), 0)
    high = np.maximum(split.max(axis=2), 0)
    steps = (high - low) / np.float32(levels)
    d_bytes, d = _float16(steps.max(axis=1) / np.float32(scale_levels))
    dmin_bytes, dmin = _float16((-low).max(axis=1) / np.float32(scale_levels))
    scales = np.clip(np.rint(_over(steps, d)), 0, scale_levels).astype(np.float32)
    minimums = np.clip(np.rint(_over(-low, dmin)), 0, scale_levels).astype(np.float32)
    quants = np.rint(_over(split + (dmin * minimums)[:, :, None], (d * scales)[:, :, None]))
    packed = np.clip(quants, 0, levels).astype(np.uint8).reshape(len(blocks), SUPER)
    return d_bytes, dmin_bytes, scales.astype(np.uint8), minimums.astype(np.uint8), packed


def _symmetric(blocks: Floats, low: int, scale_levels: int) -> tuple[Bytes, Bytes, Bytes]:
    """Sub-blocks of 16, ``d * scale * (q + low)`` with ``q`` from 0 to ``-2 * low - 1``.

    Returns:
        ``d`` as bytes, the scales (not negative), and the quants ``uint8[blocks, 256]``.
    """
    split = blocks.reshape(len(blocks), 16, 16)
    steps = np.abs(split).max(axis=2) / np.float32(-low)
    d_bytes, d = _float16(steps.max(axis=1) / np.float32(scale_levels))
    scales = np.clip(np.rint(_over(steps, d)), 0, scale_levels).astype(np.float32)
    quants = np.rint(_over(split, (d * scales)[:, :, None])) - low
    packed = np.clip(quants, 0, -2 * low - 1).astype(np.uint8).reshape(len(blocks), SUPER)
    return d_bytes, scales.astype(np.uint8), packed


def _stacked(fields: NDArray[np.integer], bits: int) -> Bytes:
    """``[..., n, k]`` fields of a few bits, the n of them side by side in k bytes, the first in the lowest bits."""
    narrow = fields.astype(np.uint8)
    result = np.zeros((*fields.shape[:-2], fields.shape[-1]), np.uint8)
    for index in range(fields.shape[-2]):
        result |= narrow[..., index, :] << np.uint8(bits * index)
    return result


def _scales_6_bit(scales: Bytes, minimums: Bytes) -> Bytes:
    """Eight 6-bit scales and eight 6-bit minimums in 12 bytes, as Q4_K and Q5_K have them."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minimums[:, :4] | (minimums[:, 4:] >> 4) << 6
    third = (scales[:, 4:] & 0x0F) | (minimums[:, 4:] & 0x0F) << 4
    return np.concatenate([first, second, third], axis=1)


def _q2_k(blocks: Floats) -> Bytes:
    d, dmin, scales, minimums, quants = _with_minimums(blocks, 16, 3, 15)
    packed = _stacked(quants.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.concatenate([scales | minimums << 4, packed, d, dmin], axis=1)


def _q3_k(blocks: Floats) -> Bytes:
    d, scales, quants = _symmetric(blocks, -4, 31)
    biased = scales + np.uint8(32)
    low_scales = (biased[:, :8] & 0x0F) | (biased[:, 8:] & 0x0F) << 4
    high_scales = _stacked((biased >> 4).reshape(-1, 4, 4), 2)
    high = _stacked((quants >> 2).reshape(-1, 8, 32), 1)
    low = _stacked((quants & 3).reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.concatenate([high, low, low_scales, high_scales, d], axis=1)


def _q4_k(blocks: Floats) -> Bytes:
    d, dmin, scales, minimums, quants = _with_minimums(blocks, 8, 15, 63)
    packed = _stacked(quants.reshape(-1, 4, 2, 32), 4).reshape(-1, 128)
    return np.concatenate([d, dmin, _scales_6_bit(scales, minimums), packed], axis=1)


def _q5_k(blocks: Floats) -> Bytes:
    d, dmin, scales, minimums, quants = _with_minimums(blocks, 8, 31, 63)
    high = _stacked((quants >> 4).reshape(-1, 8, 32), 1)
    low = _stacked((quants & 0x0F).reshape(-1, 4, 2, 32), 4).reshape(-1, 128)
    return np.concatenate([d, dmin, _scales_6_bit(scales, minimums), high, low], axis=1)


def _q6_k(blocks: Floats) -> Bytes:
    d, scales, quants = _symmetric(blocks, -32, 127)
    low = _stacked((quants & 0x0F).reshape(-1, 2, 2, 64), 4).reshape(-1, 128)
    high = _stacked((quants >> 4).reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.concatenate([low, high, scales, d], axis=1)


_K_QUANTIZERS: dict[GgmlType, Callable[[Floats], Bytes]] = {
    GgmlType.Q2_K: _q2_k,
    GgmlType.Q3_K: _q3_k,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
}
