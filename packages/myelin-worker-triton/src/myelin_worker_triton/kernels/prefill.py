"""Many rows at once: tiled matrix products on tensor cores, and attention of a run of positions.

Here activations are float16, each row divided by a scale of its own (its largest element becomes 256), weights are
unpacked to float16 tile by tile, and products are added in float32. That rounds otherwise than the integer dot
products of decoding do, and is nearer to the exact product.
"""

# Triton's language is not typed Python, writes constants in capitals, and has an `if` of its own for compile time.
# mypy: ignore-errors
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from myelin_worker_triton.kernels.embed import elements
from myelin_worker_triton.kernels.gate_up import activate
from myelin_worker_triton.kernels.heads import kept, rotated
from myelin_worker_triton.kernels.normalise import inverse_rms
from myelin_worker_triton.kernels.project import tanh
from myelin_worker_triton.kernels.unpack import elements_of


@triton.jit
def _source(x, up, weight, e, K: tl.constexpr, inverse, NORM: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr):
    mask = e < K
    value = tl.load(x + e, mask=mask, other=0.0)
    if NORM:
        value = value * inverse * tl.load(weight + e, mask=mask, other=0.0)
    if GATED:
        value = activate(value, GELU) * tl.load(up + e, mask=mask, other=0.0)
    return value


@triton.jit
def half_rows(
    x,
    up,
    weight,
    out,
    factors,
    epsilon,
    X_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows as float16 with a factor each; program ``row``.

    Args:
        x: ``float32[rows, X_ROW]``: normalised with ``NORM`` (``weight``: ``float32[K]``), passed through the
            activation and multiplied by ``up`` (the same shape) with ``GATED``.
        out: ``float16[rows, OUT_ROW]``; factors: ``float32[rows]``; ``out * factors`` is the row.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * X_ROW
    up += row * X_ROW
    inverse = 1.0
    if NORM:
        inverse = inverse_rms(x, epsilon, K, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for at in range(0, K, BLOCK):
        e = at + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(_source(x, up, weight, e, K, inverse, NORM, GATED, GELU)))
    peak = tl.maximum(tl.max(largest, axis=0), 1e-30)
    tl.store(factors + row, peak / 256.0)
    for at in range(0, K, BLOCK):
        e = at + tl.arange(0, BLOCK)
        value = _source(x, up, weight, e, K, inverse, NORM, GATED, GELU) * (256.0 / peak)
        tl.store(out + row * OUT_ROW + e, value.to(tl.float16), mask=e < K)


@triton.jit
def tiled(
    x,
    factors,
    low,
    high,
    scales,
    gain,
    bias,
    out,
    rows,
    outputs,
    X_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr,
    K: tl.constexpr,
    LOW_STRIDE: tl.constexpr,
    HIGH_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    T0: tl.constexpr,
    T1: tl.constexpr,
    T2: tl.constexpr,
    T3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_K: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """``out (+)= (x * factors) @ matrix.T``; program ``(tile of outputs, tile of rows)``.

    Args:
        x, factors: From :func:`half_rows`.
        low, high, scales, gain: The matrix, see ``layouts.py``.
        out: ``float32[rows, OUT_ROW]``; added to with ``ADD``; bias: ``float32[outputs]`` with ``HAS_BIAS``.
    """
    # Scales are up to 2^14 before their gain, codes up to 127: a factor keeps their products within float16.
    PLAIN: tl.constexpr = (FORMAT >> 16) & 3
    SMALLER: tl.constexpr = 1.0 if PLAIN else 0.0078125
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    matrix_row = tl.minimum(output, outputs - 1).to(tl.int64)
    weight_row = matrix_row[:, None] + tl.zeros([1, TILE_K], tl.int64)
    total = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
    for k in range(0, K, TILE_K):
        e = k + tl.arange(0, TILE_K)
        a = tl.load(
            x + row.to(tl.int64)[:, None] * X_ROW + e[None, :], mask=(row < rows)[:, None] & (e < K)[None, :], other=0.0
        )
        if PLAIN:
            column = e[None, :] + tl.zeros([TILE_OUTPUTS, 1], tl.int32)
            b = elements(
                low, high, scales, SMALLER, weight_row, column, column < K, K, LOW_STRIDE, HIGH_STRIDE, SCALE_STRIDE,
                FORMAT, T0, T1, T2, T3,
            )  # fmt: skip
            b = tl.where(column < K, b, 0.0).to(tl.float16)
        else:
            b = elements_of(
                low, high, scales, SMALLER, matrix_row, k // 32, K // 32, LOW_STRIDE, HIGH_STRIDE, SCALE_STRIDE, FORMAT,
                TILE_OUTPUTS, TILE_K // 32, K % TILE_K != 0, T0, T1, T2, T3, USE_ASM,
            )  # fmt: skip
        total = tl.dot(a, tl.trans(b), total)
    factor = tl.load(factors + row, mask=row < rows, other=0.0) * (gain / SMALLER)
    total = total * factor[:, None]
    mask = (row < rows)[:, None] & (output < outputs)[None, :]
    if HAS_BIAS:
        total = total + tl.load(bias + output, mask=output < outputs, other=0.0)[None, :]
    at = out + row.to(tl.int64)[:, None] * OUT_ROW + output[None, :]
    if ADD:
        total = total + tl.load(at, mask=mask, other=0.0)
    tl.store(at, total, mask=mask)


@triton.jit
def rotate_queries(
    qkv,
    positions,
    weight,
    cosines,
    sines,
    epsilon,
    QKV_STRIDE: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    DIMS: tl.constexpr,
    HALVES: tl.constexpr,
    NORM: tl.constexpr,
):
    """Normalise and rotate queries where they are; program ``(row, head)``. Arguments as ``attention.attend``'s."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    one = tl.arange(0, 1)
    head = qkv + row * QKV_STRIDE + (tl.program_id(1) + one) * HEAD
    cosines += position * (DIMS // 2)
    sines += position * (DIMS // 2)
    turned = rotated(head, one == 0, weight, cosines, sines, epsilon, HEAD, HEAD_PADDED, DIMS, HALVES, NORM)
    tl.debug_barrier()  # others have read what is overwritten now
    e = tl.arange(0, HEAD_PADDED)
    tl.store(head[:, None] + e[None, :], turned, mask=(e < HEAD)[None, :])


@triton.jit
def attend_runs(
    qkv,
    run_rows,
    run_counts,
    positions,
    slots,
    page_table,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    attended,
    scale,
    cap,
    window,
    QKV_STRIDE: tl.constexpr,
    OUT_ROW: tl.constexpr,
    N_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    CAP: tl.constexpr,
    KV_KIND: tl.constexpr,
    PAGE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    RUN: tl.constexpr,
):
    """Attention of runs of up to ``RUN`` consecutive positions of one sequence (FlashAttention-2; Dao, 2023), keys and
    values being in the cache; program ``(run, head)``.

    Args:
        qkv: With queries from :func:`rotate_queries`.
        run_rows, run_counts: ``int32[runs]``: first row and number of rows.
        attended: ``float32[rows, OUT_ROW]``. The others as ``attention.attend``'s.
    """
    run = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (N_HEADS // KV_HEADS)
    first = tl.load(run_rows + run)
    count = tl.load(run_counts + run)
    position0 = tl.load(positions + first)
    slot = tl.load(slots + first)
    inside = tl.arange(0, RUN)
    valid = inside < count
    row = (first + inside).to(tl.int64)
    e = tl.arange(0, HEAD_PADDED)
    query = tl.load(
        qkv + row[:, None] * QKV_STRIDE + head * HEAD + e[None, :], mask=valid[:, None] & (e < HEAD)[None, :], other=0.0
    )
    if KV_KIND != 1:
        query = query.to(tl.float16)
    position = position0 + inside
    oldest = position * 0
    first_page = 0
    if window > 0:
        oldest = tl.maximum(position + 1 - window, 0)
        first_page = tl.maximum(position0 + 1 - window, 0) // PAGE
    best = tl.full([RUN], -1e30, tl.float32)
    total = tl.zeros([RUN], tl.float32)
    mixed = tl.zeros([RUN, VALUE_PADDED], tl.float32)
    for number in range(first_page, (position0 + count - 1) // PAGE + 1):
        page = tl.load(page_table + slot * TABLE_STRIDE + number).to(tl.int64)
        t = number * PAGE + tl.arange(0, PAGE)
        place = (page * KV_HEADS + kv_head) * PAGE + tl.arange(0, PAGE)
        filled = t < position0 + count
        keys = kept(k_cache, k_scales, place, filled, HEAD, HEAD_PADDED, KV_KIND)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if CAP:
            scores = cap * tanh(scores / cap)
        seen = (t[None, :] <= position[:, None]) & (t[None, :] >= oldest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp(scores - peak[:, None])
        fade = tl.exp(best - peak)
        values = kept(v_cache, v_scales, place, filled, VALUE, VALUE_PADDED, KV_KIND)
        total = total * fade + tl.sum(weights, axis=1)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = peak
    mixed = mixed / total[:, None]
    v = tl.arange(0, VALUE_PADDED)
    at = attended + row[:, None] * OUT_ROW + head * VALUE + v[None, :]
    tl.store(at, mixed, mask=valid[:, None] & (v < VALUE)[None, :])
