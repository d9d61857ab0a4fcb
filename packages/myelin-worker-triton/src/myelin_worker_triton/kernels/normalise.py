"""The prologue of a projection: residual, RMS norm, quantisation of the activations.

::

    x = x + y / sqrt(mean(y^2) + eps) * post_weight        only with POST (Gemma): y is the block's output
    h = x / sqrt(mean(x^2) + eps) * weight

and ``h`` is quantised (``WANT_INT8``) or kept (``WANT_FLOAT``) in a scratch buffer. Every program of the projection
that follows does all of it for itself and writes the same bytes to the same place, then reads back, after a barrier,
what it has written: that costs a few instructions a column, where a kernel of its own would cost a launch.
"""

# Triton's language is not typed Python, writes constants in capitals, and has an `if` of its own for compile time.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl

from myelin_worker_triton.kernels.quantise import store_quantised


@triton.jit
def inverse_rms(x, epsilon, K: tl.constexpr, BLOCK: tl.constexpr):
    """``1 / sqrt(mean(x^2) + epsilon)`` of ``float32[K]``."""
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, K, BLOCK):
        elements = at + tl.arange(0, BLOCK)
        values = tl.load(x + elements, mask=elements < K, other=0.0)
        total += values * values
    return 1.0 / tl.sqrt(tl.sum(total, axis=0) / K + epsilon)


@triton.jit
def add_normalised(x, y, post_weight, out, epsilon, K: tl.constexpr, BLOCK: tl.constexpr):
    """``out = x + rms_norm(y) * post_weight``, each ``float32[K]``."""
    inverse = inverse_rms(y, epsilon, K, BLOCK)
    for at in range(0, K, BLOCK):
        elements = at + tl.arange(0, BLOCK)
        mask = elements < K
        addend = tl.load(y + elements, mask=mask, other=0.0) * inverse
        addend = addend * tl.load(post_weight + elements, mask=mask, other=0.0)
        tl.store(out + elements, tl.load(x + elements, mask=mask, other=0.0) + addend, mask=mask)


@triton.jit
def prepare(
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
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    POST: tl.constexpr,
    WANT_INT8: tl.constexpr,
    WANT_FLOAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do it for every column.

    Args:
        x, y: ``float32[COLUMNS, K]``; x_out: the same, where the new residual stream goes with POST (not ``x`` itself,
            which other programs still read).
        post_weight, weight: ``float32[K]``.
        xq: ``int8[COLUMNS, X_STRIDE]``; xd, xi: ``[COLUMNS, X_STRIDE / 32]``; xf: ``float32[COLUMNS, X_STRIDE]``.
    """
    for column in range(COLUMNS):
        source = x + column * K
        if POST:
            add_normalised(source, y + column * K, post_weight, x_out + column * K, epsilon, K, BLOCK)
            tl.debug_barrier()
            source = x_out + column * K
        inverse = inverse_rms(source, epsilon, K, BLOCK)
        for at in range(0, K, BLOCK):
            elements = at + tl.arange(0, BLOCK)
            mask = elements < K
            normal = tl.load(source + elements, mask=mask, other=0.0) * inverse
            normal = normal * tl.load(weight + elements, mask=mask, other=0.0)
            if WANT_INT8:
                store_quantised(
                    normal,
                    at,
                    xq + column * X_STRIDE,
                    xd + column * (X_STRIDE // 32),
                    xi + column * (X_STRIDE // 32),
                    K,
                    BLOCK // 32,
                )
            if WANT_FLOAT:
                tl.store(xf + column * X_STRIDE + elements, normal, mask=mask)
    tl.debug_barrier()


@triton.jit
def add_normalised_rows(x, y, post_weight, out, epsilon, K: tl.constexpr, BLOCK: tl.constexpr):
    """:func:`add_normalised` of one row for each program: where a stage ends after a normalised block."""
    row = tl.program_id(0).to(tl.int64)
    add_normalised(x + row * K, y + row * K, post_weight, out + row * K, epsilon, K, BLOCK)
