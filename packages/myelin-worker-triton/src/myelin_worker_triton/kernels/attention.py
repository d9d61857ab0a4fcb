"""Attention of single positions over paged keys and values, split along the context (flash-decoding; Dao et al., 2023).

Program ``(row, kv head, split)`` takes all query heads that share a kv head and a fixed run of ``PAGES_A_SPLIT`` pages,
counted from position 0, so that how a row is split never depends on the batch. For its positions ``t``::

    s[t] = cap(q·k[t] * scale);  m = max s;  l = sum e^(s - m);  o = sum e^(s - m) v[t]

The program that finishes last for a row and head merges the splits, in their order, and quantises the result for the
output projection. With ``STORE`` (every sequence has one row in the batch) the program of the last split first puts the
row's own key and value into the cache; otherwise ``store_rows`` has done that.
"""

# Triton's language is not typed Python, writes constants in capitals, and has an `if` of its own for compile time.
# mypy: ignore-errors
# ruff: noqa: N803, N806, SIM102

import triton
import triton.language as tl

from myelin_worker_triton.kernels.heads import keep, kept, rotated
from myelin_worker_triton.kernels.project import tanh
from myelin_worker_triton.kernels.quantise import store_quantised


@triton.jit
def _store(
    qkv,
    page_table,
    position,
    slot,
    kv_head,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    k_weight,
    cosines,
    sines,
    epsilon,
    N_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    DIMS: tl.constexpr,
    HALVES: tl.constexpr,
    NORM: tl.constexpr,
    KV_KIND: tl.constexpr,
    PAGE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
):
    page = tl.load(page_table + slot * TABLE_STRIDE + position // PAGE).to(tl.int64)
    place = (page * KV_HEADS + kv_head) * PAGE + position % PAGE
    one = tl.arange(0, 1)
    key = rotated(
        qkv + (N_HEADS + kv_head) * HEAD + one,
        one == 0,
        k_weight,
        cosines,
        sines,
        epsilon,
        HEAD,
        HEAD_PADDED,
        DIMS,
        HALVES,
        NORM,
    )
    keep(key, k_cache, k_scales, place, HEAD, HEAD_PADDED, KV_KIND)
    e = one[:, None] + tl.arange(0, VALUE_PADDED)[None, :]
    value = tl.load(qkv + (N_HEADS + KV_HEADS) * HEAD + kv_head * VALUE + e, mask=e < VALUE, other=0.0)
    keep(value, v_cache, v_scales, place, VALUE, VALUE_PADDED, KV_KIND)


@triton.jit
def store_rows(
    qkv,
    positions,
    slots,
    page_table,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    k_weight,
    cosines,
    sines,
    epsilon,
    QKV_STRIDE: tl.constexpr,
    N_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    DIMS: tl.constexpr,
    HALVES: tl.constexpr,
    NORM: tl.constexpr,
    KV_KIND: tl.constexpr,
    PAGE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
):
    """Put keys and values of rows into the cache; program ``(row, kv head)``. Arguments as :func:`attend`'s."""
    row = tl.program_id(0)
    position = tl.load(positions + row)
    _store(
        qkv + row.to(tl.int64) * QKV_STRIDE, page_table, position, tl.load(slots + row), tl.program_id(1), k_cache,
        v_cache,
        k_scales, v_scales, k_weight, cosines + position * (DIMS // 2), sines + position * (DIMS // 2), epsilon,
        N_HEADS,
        KV_HEADS, HEAD, HEAD_PADDED, VALUE, VALUE_PADDED, DIMS, HALVES, NORM, KV_KIND, PAGE, TABLE_STRIDE,
    )  # fmt: skip


@triton.jit
def attend(
    qkv,
    positions,
    slots,
    page_table,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    q_weight,
    k_weight,
    cosines,
    sines,
    part_values,
    part_sums,
    counters,
    attended,
    xq,
    xd,
    xi,
    epsilon,
    scale,
    cap,
    window,
    max_splits,
    QKV_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    N_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    FLAT_PADDED: tl.constexpr,
    DIMS: tl.constexpr,
    HALVES: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    CAP: tl.constexpr,
    QUANTISE: tl.constexpr,
    KV_KIND: tl.constexpr,
    PAGE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    PAGES_A_SPLIT: tl.constexpr,
    SHARED_PADDED: tl.constexpr,
):
    """See the module's text.

    Args:
        qkv: ``float32[rows, QKV_STRIDE]``: queries, keys and values of the rows, neither normalised nor rotated.
        positions, slots: ``int32[rows]``; page_table: ``int32[slots, TABLE_STRIDE]``.
        k_cache, v_cache, k_scales, v_scales: The layer's, see ``heads.py``.
        q_weight, k_weight: ``float32[HEAD]`` with ``NORM``.
        cosines, sines: ``float32[positions, DIMS / 2]``.
        part_values: ``float32[rows, KV_HEADS, max_splits, SHARED_PADDED, VALUE_PADDED]``; part_sums: the maxima and
            sums, ``float32[rows, KV_HEADS, max_splits, 2, SHARED_PADDED]``; counters: ``int32[rows, KV_HEADS]``, zero.
        attended: ``float32[rows, X_STRIDE]``; xq, xd, xi: the same quantised, with ``QUANTISE``.
        window: Positions that a row sees, its own included; 0 is all.
        FLAT_PADDED: ``N_HEADS / KV_HEADS * VALUE``, to the next power of two.
        SHARED_PADDED: ``N_HEADS / KV_HEADS``, to a power of two that ``tl.dot`` takes.
    """
    SHARED: tl.constexpr = N_HEADS // KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    position = tl.load(positions + row)
    slot = tl.load(slots + row)
    oldest = 0
    if window > 0:
        oldest = tl.maximum(position + 1 - window, 0)
    first_split = oldest // (PAGE * PAGES_A_SPLIT)
    n_splits = position // (PAGE * PAGES_A_SPLIT) - first_split + 1
    split = tl.program_id(2)
    if split < n_splits:
        qkv += row * QKV_STRIDE
        cosines += position * (DIMS // 2)
        sines += position * (DIMS // 2)
        if STORE:
            if split == n_splits - 1:
                _store(
                    qkv, page_table, position, slot, kv_head, k_cache, v_cache, k_scales, v_scales, k_weight, cosines,
                    sines, epsilon, N_HEADS, KV_HEADS, HEAD, HEAD_PADDED, VALUE, VALUE_PADDED, DIMS, HALVES, NORM,
                    KV_KIND, PAGE, TABLE_STRIDE,
                )  # fmt: skip
                tl.debug_barrier()
        shared = tl.arange(0, SHARED_PADDED)
        query = rotated(
            qkv + (kv_head * SHARED + shared) * HEAD, shared < SHARED, q_weight, cosines, sines, epsilon, HEAD,
            HEAD_PADDED, DIMS, HALVES, NORM,
        )  # fmt: skip
        if KV_KIND != 1:
            query = query.to(tl.float16)
        best = tl.full([SHARED_PADDED], float("-inf"), tl.float32)
        total = tl.zeros([SHARED_PADDED], tl.float32)
        mixed = tl.zeros([SHARED_PADDED, VALUE_PADDED], tl.float32)
        begin = tl.maximum((first_split + split) * PAGES_A_SPLIT, oldest // PAGE)
        end = tl.minimum((first_split + split + 1) * PAGES_A_SPLIT, position // PAGE + 1)
        for number in range(begin, end):
            page = tl.load(page_table + slot * TABLE_STRIDE + number).to(tl.int64)
            t = tl.arange(0, PAGE)
            seen = (number * PAGE + t <= position) & (number * PAGE + t >= oldest)
            place = (page * KV_HEADS + kv_head) * PAGE + t
            keys = kept(k_cache, k_scales, place, seen, HEAD, HEAD_PADDED, KV_KIND)
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
            if CAP:
                scores = cap * tanh(scores / cap)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            peak = tl.maximum(best, tl.max(scores, axis=1))
            weights = tl.exp(scores - peak[:, None])
            fade = tl.exp(best - peak)
            values = kept(v_cache, v_scales, place, seen, VALUE, VALUE_PADDED, KV_KIND)
            total = total * fade + tl.sum(weights, axis=1)
            mixed = mixed * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            best = peak
        unit = row * KV_HEADS + kv_head
        e = tl.arange(0, VALUE_PADDED)
        part_values += unit * max_splits * (SHARED_PADDED * VALUE_PADDED)
        part_sums += unit * max_splits * (2 * SHARED_PADDED)
        inside = shared[:, None] * VALUE_PADDED + e[None, :]
        tl.store(part_values + split * (SHARED_PADDED * VALUE_PADDED) + inside, mixed)
        tl.store(part_sums + split * (2 * SHARED_PADDED) + shared, best)
        tl.store(part_sums + split * (2 * SHARED_PADDED) + SHARED_PADDED + shared, total)
        tl.debug_barrier()
        done = tl.atomic_add(counters + unit, 1, sem="acq_rel")
        if done == n_splits - 1:
            tl.store(counters + unit, 0)
            best = tl.full([SHARED_PADDED], float("-inf"), tl.float32)
            total = tl.zeros([SHARED_PADDED], tl.float32)
            mixed = tl.zeros([SHARED_PADDED, VALUE_PADDED], tl.float32)
            for other in range(n_splits):
                part_best = tl.load(part_sums + other * (2 * SHARED_PADDED) + shared)
                part_total = tl.load(part_sums + other * (2 * SHARED_PADDED) + SHARED_PADDED + shared)
                peak = tl.maximum(best, part_best)
                fade = tl.exp(best - peak)
                part_fade = tl.exp(part_best - peak)
                part = tl.load(part_values + other * (SHARED_PADDED * VALUE_PADDED) + inside)
                total = total * fade + part_total * part_fade
                mixed = mixed * fade[:, None] + part * part_fade[:, None]
                best = peak
            mixed = mixed / total[:, None]
            at = (kv_head * SHARED + shared[:, None]) * VALUE + e[None, :]
            attended += row * X_STRIDE
            tl.store(attended + at, mixed, mask=(shared[:, None] < SHARED) & (e[None, :] < VALUE))
            if QUANTISE:
                tl.debug_barrier()
                flat = tl.arange(0, FLAT_PADDED)
                start = kv_head * (SHARED * VALUE)
                output = tl.load(attended + start + flat, mask=flat < SHARED * VALUE, other=0.0)
                store_quantised(
                    output,
                    start,
                    xq + row * X_STRIDE,
                    xd + row * (X_STRIDE // 32),
                    xi + row * (X_STRIDE // 32),
                    start + SHARED * VALUE,
                    FLAT_PADDED // 32,
                )
