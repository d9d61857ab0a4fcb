"""The first half of the feed-forward block in one launch: ``act(gate @ h) * (up @ h)``, quantised for the second half.

A program takes the same ``REPEAT * ROWS`` rows (a multiple of 32) of both matrices, so that it can quantise whole
groups of what they give. Activations: SiLU, ``g / (1 + e^-g)``; GELU in its tanh form.
"""

# Triton's language is not typed Python, writes constants in capitals, and has an `if` of its own for compile time.
# mypy: ignore-errors
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from myelin_worker_triton.kernels.normalise import prepare
from myelin_worker_triton.kernels.project import tanh
from myelin_worker_triton.kernels.quantise import store_quantised
from myelin_worker_triton.kernels.row_dots import row_dots


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """SiLU or GELU (tanh form) of float32."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = 0.5 * gate * (1.0 + tanh(inner))
    else:
        result = gate / (1.0 + tl.exp(-gate))
    return result


@triton.jit
def gate_up(
    x,
    y,
    post_weight,
    x_out,
    weight,
    xq,
    xd,
    xi,
    xf,
    hq,
    hd,
    hi,
    hf,
    epsilon,
    low_a,
    high_a,
    scales_a,
    gain_a,
    low_b,
    high_b,
    scales_b,
    gain_b,
    rows,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    H_STRIDE: tl.constexpr,
    FORMAT_A: tl.constexpr,
    LOW_A: tl.constexpr,
    HIGH_A: tl.constexpr,
    SCALE_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    LOW_B: tl.constexpr,
    HIGH_B: tl.constexpr,
    SCALE_B: tl.constexpr,
    A0: tl.constexpr,
    A1: tl.constexpr,
    A2: tl.constexpr,
    A3: tl.constexpr,
    B0: tl.constexpr,
    B1: tl.constexpr,
    B2: tl.constexpr,
    B3: tl.constexpr,
    POST: tl.constexpr,
    WANT_INT8: tl.constexpr,
    WANT_FLOAT: tl.constexpr,
    EXACT: tl.constexpr,
    QUANTISE: tl.constexpr,
    GELU: tl.constexpr,
    REPEAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Arguments as those of ``project.project``; matrix a is the gate, b is up.

    Args:
        hq, hd, hi, hf: The result as activations of ``rows`` elements: ``hf`` (``float32[COLUMNS, H_STRIDE]``) always,
            the others with ``QUANTISE``.
        EXACT: ``rows`` are whole tiles.
    """
    TILE: tl.constexpr = REPEAT * ROWS
    UNROLL_A: tl.constexpr = 2 if ((FORMAT_A >> 8) & 3) != 0 and COLUMNS == 1 else 1
    UNROLL_B: tl.constexpr = 2 if ((FORMAT_B >> 8) & 3) != 0 and COLUMNS == 1 else 1
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
    for tile in range(tl.program_id(0), tl.cdiv(rows, TILE), tl.num_programs(0)):
        row0 = tile * TILE
        gates = row_dots(
            low_a, high_a, scales_a, gain_a, words, xd, xi, xf, row0, rows - 1, 0, K, LOW_A, HIGH_A, SCALE_A, X_STRIDE,
            FORMAT_A, REPEAT, COLUMNS, ROWS, GROUPS, EXACT, 1, UNROLL_A, A0, A1, A2, A3, USE_ASM,
        )  # fmt: skip
        ups = row_dots(
            low_b, high_b, scales_b, gain_b, words, xd, xi, xf, row0, rows - 1, 0, K, LOW_B, HIGH_B, SCALE_B, X_STRIDE,
            FORMAT_B, REPEAT, COLUMNS, ROWS, GROUPS, EXACT, 1, UNROLL_B, B0, B1, B2, B3, USE_ASM,
        )  # fmt: skip
        for r in tl.static_range(REPEAT):
            row = row0 + r * ROWS + tl.arange(0, ROWS)
            for c in tl.static_range(COLUMNS):
                value = activate(gates[r * COLUMNS + c], GELU) * ups[r * COLUMNS + c]
                tl.store(hf + c * H_STRIDE + row, value, mask=row < rows)
        if QUANTISE:
            tl.debug_barrier()  # the groups' elements come back from other threads
            elements = row0 + tl.arange(0, TILE)
            for c in tl.static_range(COLUMNS):
                values = tl.load(hf + c * H_STRIDE + elements, mask=elements < rows, other=0.0)
                store_quantised(
                    values,
                    row0,
                    hq + c * H_STRIDE,
                    hd + c * (H_STRIDE // 32),
                    hi + c * (H_STRIDE // 32),
                    rows,
                    TILE // 32,
                )
