"""Projection of up to eight columns through one to three matrices in one launch: QKV, attention output, FFN down, head.

Programs take tiles of ``REPEAT * ROWS`` rows, tile after tile, those of the first matrix first. The prologue (see
``normalise.py``) is done once a program. Epilogues: store (with a bias), add to the residual stream, store with a soft
cap (``cap * tanh(v / cap)``).

With ``SPLITS`` above 1 a program takes one of so many parts of each row. It leaves its sums in scratch, and the one
that comes last for a tile adds those of all parts, in their order, and does the epilogue; nobody waits for anybody.
"""

# Triton's language is not typed Python, writes constants in capitals, and has an `if` of its own for compile time.
# mypy: ignore-errors
# ruff: noqa: N803, SIM102

import triton
import triton.language as tl

from myelin_worker_triton.kernels.normalise import prepare
from myelin_worker_triton.kernels.row_dots import row_dots

STORE: tl.constexpr = tl.constexpr(0)
ADD: tl.constexpr = tl.constexpr(1)


@triton.jit
def tanh(x):
    """``tanh`` by ``exp``, which unlike a library's is everywhere."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _finish(
    value,
    out,
    bias,
    row,
    mask,
    softcap,
    EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    if HAS_BIAS:
        value = value + tl.load(bias + row, mask=mask, other=0.0)
    if SOFTCAP:
        value = softcap * tanh(value / softcap)
    if EPILOGUE == 1:
        value = tl.load(out + row, mask=mask, other=0.0) + value
    tl.store(out + row, value, mask=mask)


@triton.jit
def _tile(
    tile,
    low,
    high,
    scales,
    gain,
    bias,
    rows,
    xq,
    xd,
    xi,
    xf,
    out,
    parts,
    counter,
    softcap,
    K: tl.constexpr,
    LOW_STRIDE: tl.constexpr,
    HIGH_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    EXACT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr,
    REPEAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    T0: tl.constexpr,
    T1: tl.constexpr,
    T2: tl.constexpr,
    T3: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    row0 = tile * (REPEAT * ROWS)
    split = tl.program_id(1)
    dots = row_dots(
        low,
        high,
        scales,
        gain,
        xq,
        xd,
        xi,
        xf,
        row0,
        rows - 1,
        split,
        K,
        LOW_STRIDE,
        HIGH_STRIDE,
        SCALE_STRIDE,
        X_STRIDE,
        FORMAT,
        REPEAT,
        COLUMNS,
        ROWS,
        GROUPS,
        EXACT,
        SPLITS,
        2 if ((FORMAT >> 8) & 3) != 0 and COLUMNS == 1 else 1,
        T0,
        T1,
        T2,
        T3,
        USE_ASM,
    )
    if SPLITS > 1:
        for r in tl.static_range(REPEAT):
            row = row0 + r * ROWS + tl.arange(0, ROWS)
            for c in tl.static_range(COLUMNS):
                at = parts + (split * COLUMNS + c) * OUT_STRIDE + row
                tl.store(at, dots[r * COLUMNS + c], mask=row < rows)
        tl.debug_barrier()
        done = tl.atomic_add(counter, 1, sem="acq_rel")
        if done == SPLITS - 1:
            tl.store(counter, 0)
            for r in tl.static_range(REPEAT):
                row = row0 + r * ROWS + tl.arange(0, ROWS)
                mask = row < rows
                for c in tl.static_range(COLUMNS):
                    value = tl.load(parts + c * OUT_STRIDE + row, mask=mask, other=0.0)
                    for other in tl.static_range(1, SPLITS):
                        at = parts + (other * COLUMNS + c) * OUT_STRIDE + row
                        value = value + tl.load(at, mask=mask, other=0.0)
                    _finish(value, out + c * OUT_STRIDE, bias, row, mask, softcap, EPILOGUE, HAS_BIAS, SOFTCAP)
    else:
        for r in tl.static_range(REPEAT):
            row = row0 + r * ROWS + tl.arange(0, ROWS)
            for c in tl.static_range(COLUMNS):
                value = dots[r * COLUMNS + c]
                _finish(value, out + c * OUT_STRIDE, bias, row, row < rows, softcap, EPILOGUE, HAS_BIAS, SOFTCAP)


@triton.jit
def project(
    x,
    y,
    post_weight,
    x_out,
    weight,
    xq,
    xd,
    xi,
    xf,
    out,
    bias,
    parts,
    counters,
    epsilon,
    softcap,
    low_a,
    high_a,
    scales_a,
    gain_a,
    rows_a,
    low_b,
    high_b,
    scales_b,
    gain_b,
    rows_b,
    low_c,
    high_c,
    scales_c,
    gain_c,
    rows_c,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    FORMAT_A: tl.constexpr,
    LOW_A: tl.constexpr,
    HIGH_A: tl.constexpr,
    SCALE_A: tl.constexpr,
    EXACT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    LOW_B: tl.constexpr,
    HIGH_B: tl.constexpr,
    SCALE_B: tl.constexpr,
    EXACT_B: tl.constexpr,
    FORMAT_C: tl.constexpr,
    LOW_C: tl.constexpr,
    HIGH_C: tl.constexpr,
    SCALE_C: tl.constexpr,
    EXACT_C: tl.constexpr,
    A0: tl.constexpr,
    A1: tl.constexpr,
    A2: tl.constexpr,
    A3: tl.constexpr,
    B0: tl.constexpr,
    B1: tl.constexpr,
    B2: tl.constexpr,
    B3: tl.constexpr,
    C0: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    C3: tl.constexpr,
    PREPARE: tl.constexpr,
    POST: tl.constexpr,
    WANT_INT8: tl.constexpr,
    WANT_FLOAT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    REPEAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """``out[:, rows of a, then b, then c] = h @ matrix.T`` for ``COLUMNS`` columns ``h``.

    Args:
        x, y, post_weight, x_out, weight: Of the prologue (``PREPARE``), see ``normalise.prepare``.
        xq, xd, xi, xf: Scratch that the prologue fills; without it, the input. ``xq`` is ``int8``.
        out: ``float32[COLUMNS, OUT_STRIDE]``; with ``EPILOGUE`` 1 it is added to.
        low_*, high_*, scales_*, gain_*, rows_*: The matrices, see ``layouts.py``; ``FORMAT_*`` is their layout's code,
            ``LOW_*``, ``HIGH_*``, ``SCALE_*`` their strides, ``EXACT_*`` whether their rows are whole tiles, ``A0``…
            the words of their codebooks.
        bias: ``float32``, one for each row of ``out``, with ``HAS_BIAS``.
        parts: ``float32[SPLITS, COLUMNS, OUT_STRIDE]``; counters: ``int32``, zero, one for each tile; with ``SPLITS``
            above 1, which then is the second dimension of the grid.
    """
    if PREPARE:
        prepare(
            x,
            y,
            post_weight,
            x_out,
            weight,
            xq,
            xd,
            xi,
            xf,
            epsilon,
            K,
            X_STRIDE,
            POST,
            WANT_INT8,
            WANT_FLOAT,
            COLUMNS,
            BLOCK,
        )
    words = xq.to(tl.pointer_type(tl.int32), bitcast=True)
    tiles_a = tl.cdiv(rows_a, REPEAT * ROWS)
    tiles_b = tiles_a
    if PARTS > 1:
        tiles_b = tiles_a + tl.cdiv(rows_b, REPEAT * ROWS)
    tiles_c = tiles_b
    if PARTS > 2:
        tiles_c = tiles_b + tl.cdiv(rows_c, REPEAT * ROWS)
    for tile in range(tl.program_id(0), tiles_c, tl.num_programs(0)):
        if tile < tiles_a:
            _tile(
                tile, low_a, high_a, scales_a, gain_a, bias, rows_a, words, xd, xi, xf, out, parts, counters + tile,
                softcap, K, LOW_A, HIGH_A, SCALE_A, X_STRIDE, OUT_STRIDE, FORMAT_A, EXACT_A, EPILOGUE, HAS_BIAS,
                SOFTCAP, SPLITS, REPEAT, COLUMNS, ROWS, GROUPS, A0, A1, A2, A3, USE_ASM,
            )  # fmt: skip
        if PARTS > 1:
            if (tile >= tiles_a) & (tile < tiles_b):
                _tile(
                    tile - tiles_a, low_b, high_b, scales_b, gain_b, bias + rows_a, rows_b, words, xd, xi, xf,
                    out + rows_a, parts + rows_a, counters + tile, softcap, K, LOW_B, HIGH_B, SCALE_B, X_STRIDE,
                    OUT_STRIDE, FORMAT_B, EXACT_B, EPILOGUE, HAS_BIAS, SOFTCAP, SPLITS, REPEAT, COLUMNS, ROWS, GROUPS,
                    B0, B1, B2, B3, USE_ASM,
                )  # fmt: skip
        if PARTS > 2:
            if tile >= tiles_b:
                _tile(
                    tile - tiles_b, low_c, high_c, scales_c, gain_c, bias + rows_a + rows_b, rows_c, words, xd, xi, xf,
                    out + rows_a + rows_b, parts + rows_a + rows_b, counters + tile, softcap, K, LOW_C, HIGH_C, SCALE_C,
                    X_STRIDE, OUT_STRIDE, FORMAT_C, EXACT_C, EPILOGUE, HAS_BIAS, SOFTCAP, SPLITS, REPEAT, COLUMNS, ROWS,
                    GROUPS, C0, C1, C2, C3, USE_ASM,
                )  # fmt: skip
