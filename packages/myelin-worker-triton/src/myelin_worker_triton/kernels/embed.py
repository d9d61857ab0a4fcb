"""Single elements of a matrix in planes, and with them the token embedding."""

# Triton's language is not typed Python, writes constants in capitals, and has an `if` of its own for compile time.
# mypy: ignore-errors
# ruff: noqa: N803, N806

import triton
import triton.language as tl


@triton.jit
def elements(
    low,
    high,
    scales,
    gain,
    row,
    e,
    mask,
    K: tl.constexpr,
    LOW_STRIDE: tl.constexpr,
    HIGH_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    T0: tl.constexpr,
    T1: tl.constexpr,
    T2: tl.constexpr,
    T3: tl.constexpr,
):
    """Elements ``e`` of rows ``row`` (int64), as float32: arrays of one shape, ``mask`` too. See ``layouts.py``."""
    LOW: tl.constexpr = FORMAT & 15
    HIGH: tl.constexpr = (FORMAT >> 4) & 3
    SCALES: tl.constexpr = (FORMAT >> 6) & 3
    BOOK: tl.constexpr = (FORMAT >> 8) & 3
    OFFSET: tl.constexpr = (FORMAT >> 10) & 63
    PLAIN: tl.constexpr = (FORMAT >> 16) & 3
    if PLAIN == 3:
        result = tl.load(low + row * LOW_STRIDE + e, mask=mask, other=0).to(tl.float32, bitcast=True)
    elif PLAIN:
        word = tl.load(low + row * LOW_STRIDE + e % (K // 2), mask=mask, other=0)
        upper = e >= K // 2
        if PLAIN == 1:
            bits = tl.where(upper, word >> 16, word).to(tl.int16)
            result = bits.to(tl.float16, bitcast=True).to(tl.float32)
        else:
            result = tl.where(upper, word & -65536, word << 16).to(tl.float32, bitcast=True)
    else:
        group = e // 32
        half = (e // 16) % 2
        word = (e // 4) % 4
        byte = e % 4
        if LOW == 8:
            found = tl.load(low + row * LOW_STRIDE + half * (LOW_STRIDE // 2) + group * 4 + word, mask=mask, other=0)
            code = (found << (24 - 8 * byte)) >> 24
        elif LOW == 2:
            found = tl.load(low + row * LOW_STRIDE + group * 2 + half, mask=mask, other=0)
            code = (found >> (8 * byte + 2 * word)) & 3
        else:
            found = tl.load(low + row * LOW_STRIDE + group * 4 + word, mask=mask, other=0)
            if BOOK == 1:
                code = (found >> (16 * half + 4 * byte)) & 15
            else:
                code = (found >> (8 * byte + 4 * half)) & 15
            if BOOK:
                table = tl.where(code < 8, tl.where(code < 4, T0, T1), tl.where(code < 12, T2, T3))
                code = (table << (24 - 8 * (code & 3))) >> 24
        if HIGH == 1:
            bits = tl.load(high + row * HIGH_STRIDE + group, mask=mask, other=0)
            code = code | (((bits >> (8 * byte + 4 * half + word)) & 1) << LOW)
        if HIGH == 2:
            bits = tl.load(high + row * HIGH_STRIDE + group * 2 + half, mask=mask, other=0)
            code = code | (((bits >> (8 * byte + 2 * word)) & 3) << LOW)
        value = (code - OFFSET).to(tl.float32)
        if SCALES == 0:
            scale = tl.load(scales + row * SCALE_STRIDE + group, mask=mask, other=0).to(tl.float16, bitcast=True)
            result = value * (scale.to(tl.float32) * gain)
        elif SCALES == 2:
            pair = tl.load(scales + row * SCALE_STRIDE + group, mask=mask, other=0)
            scale = (pair >> (16 * half)).to(tl.int16).to(tl.float16, bitcast=True)
            result = value * (scale.to(tl.float32) * gain)
        else:
            if SCALES == 1:
                pair = tl.load(scales + row * SCALE_STRIDE + group, mask=mask, other=0)
            else:
                pair = tl.load(scales + row * SCALE_STRIDE + group * 2 + half, mask=mask, other=0)
            scale = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * gain
            addend = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * gain
            result = value * scale + addend
    return result


@triton.jit
def embed(
    tokens,
    out,
    low,
    high,
    scales,
    gain,
    factor,
    K: tl.constexpr,
    LOW_STRIDE: tl.constexpr,
    HIGH_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    T0: tl.constexpr,
    T1: tl.constexpr,
    T2: tl.constexpr,
    T3: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out[row] = factor * matrix[tokens[row]]``: ``int32[rows]``, ``float32[rows, K]``; program ``(row, block)``."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64) + e * 0
    found = elements(
        low, high, scales, gain, token, e, e < K, K, LOW_STRIDE, HIGH_STRIDE, SCALE_STRIDE, FORMAT, T0, T1, T2, T3
    )
    tl.store(out + row * K + e, found * factor, mask=e < K)
