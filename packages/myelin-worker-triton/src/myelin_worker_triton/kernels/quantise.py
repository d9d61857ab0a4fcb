"""Activations as int8 in groups of 32, with the sums that offsets and minimums need (ggml's Q8_1, in planes).

For a group ``h[0..31]``: ``d = max|h| / 127`` with its last three bits of mantissa cleared, ``p = round(h * 127 /
max|h|)``, and the sums of the ``p`` of both halves of 16. Stored are ``p`` (``int8[K]``), ``d`` (``float32[K / 32]``)
and both sums in one word (``int32[K / 32]``, the first half's below).
"""

# Triton's language is not typed Python, writes constants in capitals, and has an `if` of its own for compile time.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl

from myelin_worker_triton.kernels.row_dots import MAGIC, MAGIC_FLOAT


@triton.jit
def quantise(values, GROUPS: tl.constexpr):
    """``float32[32 * GROUPS]`` as ``(p int8[32 * GROUPS], d float32[GROUPS], sums int32[GROUPS])``."""
    groups = tl.reshape(values, [GROUPS, 32])
    largest = tl.max(tl.abs(groups), axis=1)
    scale = ((largest * (1.0 / 127.0)).to(tl.int32, bitcast=True) & -8).to(tl.float32, bitcast=True)
    inverse = tl.where(largest > 1e-30, 127.0 / tl.maximum(largest, 1e-30), 0.0)
    # Adding 1.5 * 2^23 rounds to nearest and leaves the integer in the low bits of the float's pattern.
    codes = (groups * inverse[:, None] + MAGIC_FLOAT).to(tl.int32, bitcast=True) - MAGIC
    first, second = tl.split(tl.sum(tl.reshape(codes, [GROUPS, 2, 16]), axis=2))
    sums = (first & 0xFFFF) | (second << 16)
    return tl.reshape(codes, [GROUPS * 32]).to(tl.int8), scale, sums


@triton.jit
def store_quantised(values, at, xq, xd, xi, count, GROUPS: tl.constexpr):
    """Quantise ``values`` and store them as elements ``at + [0, 32 * GROUPS)`` of a column of ``count``."""
    codes, scale, sums = quantise(values, GROUPS)
    elements = at + tl.arange(0, GROUPS * 32)
    groups = at // 32 + tl.arange(0, GROUPS)
    tl.store(xq + elements, codes, mask=elements < count)
    tl.store(xd + groups, scale, mask=groups * 32 < count)
    tl.store(xi + groups, sums, mask=groups * 32 < count)


@triton.jit
def quantise_rows(x, xq, xd, xi, X_ROW: tl.constexpr, X_STRIDE: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr):
    """Quantise whole rows: program ``(row, block)`` takes ``32 * GROUPS`` elements of ``float32[rows, X_ROW]``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * (GROUPS * 32)
    elements = at + tl.arange(0, GROUPS * 32)
    values = tl.load(x + row * X_ROW + elements, mask=elements < K, other=0.0)
    store_quantised(
        values, at, xq + row * X_STRIDE, xd + row * (X_STRIDE // 32), xi + row * (X_STRIDE // 32), K, GROUPS
    )
