"""A head's query or key: normalised (Qwen 3, Gemma 3), rotated, and how keys and values lie in their pages.

Element ``e`` with partner ``e'`` (``e ^ 1`` where pairs are interleaved, ``e ± dims / 2`` where they are halves)
becomes ``v[e] cos - v[e'] sin`` for the first of a pair and ``v[e] cos + v[e'] sin`` for the second; elements from
``dims`` on stay. Cosines and sines come from a table, ``float32[positions, dims / 2]`` each, computed in float64.

Keys and values of a layer: ``[pages, kv heads, PAGE, size]``, in float16, float32, or int8 with one float16 scale for
each 32 elements (``[pages, kv heads, PAGE, size / 32]``). A sequence's pages are listed in a table.
"""

# Triton's language is not typed Python, writes constants in capitals, and has an `if` of its own for compile time.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl

from myelin_worker_triton.kernels.row_dots import MAGIC, MAGIC_FLOAT


@triton.jit
def rotated(
    heads,
    valid,
    weight,
    cosines,
    sines,
    epsilon,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    DIMS: tl.constexpr,
    HALVES: tl.constexpr,
    NORM: tl.constexpr,
):
    """Load heads, ``float32[n, PADDED]``.

    Args:
        heads: Pointers to the first element of each, ``[n]``; valid: which of them are there, ``[n]``.
        weight: ``float32[SIZE]`` of the norm, with ``NORM``.
        cosines, sines: The position's row, ``float32[DIMS / 2]``.
    """
    e = tl.arange(0, PADDED)
    if HALVES:
        partner = tl.where(e < DIMS // 2, e + DIMS // 2, e - DIMS // 2)
        pair = tl.where(e < DIMS // 2, e, e - DIMS // 2)
        first = e < DIMS // 2
    else:
        partner = e ^ 1
        pair = e // 2
        first = (e & 1) == 0
    turned = e < DIMS
    partner = tl.where(turned, partner, e)
    mask = valid[:, None] & (e < SIZE)[None, :]
    own = tl.load(heads[:, None] + e[None, :], mask=mask, other=0.0)
    other = tl.load(heads[:, None] + partner[None, :], mask=mask, other=0.0)
    if NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(own * own, axis=1) / SIZE + epsilon)
        own = own * inverse[:, None] * tl.load(weight + e, mask=e < SIZE, other=0.0)[None, :]
        other = other * inverse[:, None] * tl.load(weight + partner, mask=e < SIZE, other=0.0)[None, :]
    cosine = tl.load(cosines + pair, mask=turned, other=1.0)
    sine = tl.load(sines + pair, mask=turned, other=0.0)
    sine = tl.where(first, -sine, sine)
    return own * cosine[None, :] + other * sine[None, :]


@triton.jit
def keep(vector, cache, scales, place, SIZE: tl.constexpr, PADDED: tl.constexpr, KV_KIND: tl.constexpr):
    """Write one head's key or value, ``float32[1, PADDED]``, to place ``place`` (page, head and row in one)."""
    e = tl.arange(0, PADDED)
    at = cache + place * SIZE + e[None, :]
    mask = (e < SIZE)[None, :]
    if KV_KIND == 2:
        groups = tl.reshape(vector, [PADDED // 32, 32])
        scale = (tl.max(tl.abs(groups), axis=1) * (1.0 / 127.0)).to(tl.float16)
        wide = scale.to(tl.float32)
        inverse = tl.where(wide > 0.0, 1.0 / tl.maximum(wide, 1e-12), 0.0)
        codes = tl.minimum(tl.maximum(groups * inverse[:, None], -127.0), 127.0)
        codes = (codes + MAGIC_FLOAT).to(tl.int32, bitcast=True) - MAGIC
        tl.store(at, tl.reshape(codes, [1, PADDED]).to(tl.int8), mask=mask)
        g = tl.arange(0, PADDED // 32)
        tl.store(scales + place * (SIZE // 32) + g, scale, mask=g < SIZE // 32)
    elif KV_KIND == 1:
        tl.store(at, vector, mask=mask)
    else:
        tl.store(at, vector.to(tl.float16), mask=mask)


@triton.jit
def kept(cache, scales, place, valid, SIZE: tl.constexpr, PADDED: tl.constexpr, KV_KIND: tl.constexpr):
    """Read keys or values at places ``[n]``: ``[n, PADDED]`` in float16 (float32 for a float32 cache)."""
    e = tl.arange(0, PADDED)
    mask = valid[:, None] & (e < SIZE)[None, :]
    found = tl.load(cache + place[:, None] * SIZE + e[None, :], mask=mask, other=0)
    if KV_KIND == 2:
        scale = tl.load(scales + place[:, None] * (SIZE // 32) + (e // 32)[None, :], mask=mask, other=0.0)
        found = (found.to(tl.float32) * scale.to(tl.float32)).to(tl.float16)
    return found
