"""Attention of a block of queries over one key/value head's cache, with an online softmax in steps of 64 positions.

A query's result depends only on its own position and on the cache: steps begin at multiples of 64 positions, and what a
query must not see has weight exactly 0, so chunks, other rows of the batch, and the number of threads change nothing.
Memory is one score row of 64 for each query, however long the context.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from myelin_worker_cpu import tables as t
from myelin_worker_cpu.attention_ops import BLOCK, POSITIONS, gather_values, quantise_block, score_tile, soften
from myelin_worker_cpu.jit import inlined, kernel
from myelin_worker_cpu.pointers import floats, integers, load_f32, store_f32, store_half
from myelin_worker_cpu.row_ops import multiply, sum_squares

_EIGHT = 8
_FOUR = 4
_NOTHING_YET = np.float32(-1.0e30)
"""The running maximum before any score: finite, so that the difference of two of them is 0 and not NaN."""
_HIDDEN = np.float32("-inf")


@inlined
def prepare_head(
    source: int,
    target: int,
    size: int,
    padded: int,
    bias: int,
    norm: int,
    epsilon: float,
    rope: int,
    rope_dims: int,
    halves: int,
    scale: float,
) -> None:
    """Bias, norm, rotation and scale of one query or key head, from ``source`` to ``target`` (padded with zeros).

    ``bias`` and ``norm`` are addresses or 0; ``rope`` that of the row's cosines, then sines, ``rope_dims/2`` each.
    """
    for index in range(size):
        value = load_f32(source + index * 4)
        if bias:
            value += load_f32(bias + index * 4)
        store_f32(value, target + index * 4)
    for index in range(size, padded):
        store_f32(0.0, target + index * 4)
    if norm:
        mean = sum_squares(target, padded // 16) / np.float32(size)
        factor = np.float32(1.0) / math.sqrt(mean + epsilon)
        for index in range(size):
            store_f32(load_f32(target + index * 4) * factor * load_f32(norm + index * 4), target + index * 4)
    half = rope_dims // 2
    step = 4 if halves else 8
    other = half * 4 if halves else 4
    for index in range(half):
        cosine = load_f32(rope + index * 4)
        sine = load_f32(rope + (half + index) * 4)
        place = target + index * step
        first, second = load_f32(place), load_f32(place + other)
        store_f32(first * cosine - second * sine, place)
        store_f32(first * sine + second * cosine, place + other)
    if scale != 1.0:
        multiply(target, scale, padded // 16)


@inlined
def _store_row(source: int, count: int, target: int, stride: int, element_bytes: int) -> None:
    """Write f32 as f16 or f32, ``stride`` bytes apart."""
    for index in range(count):
        if element_bytes == 2:
            store_half(load_f32(source + index * 4), target + index * stride)
        else:
            store_f32(load_f32(source + index * 4), target + index * stride)


def compile_remember(element_bytes: int, *, cached: bool) -> Any:
    """``remember(context, layer, cache, position, keys, values, rope, scratch)``: put one row into a slot.

    ``layer`` is the address of the layer's entry, ``cache`` that of its part of the slot's first block; ``keys``,
    ``values`` and ``rope`` are the row's; ``scratch`` is one padded head, of keys or of values.
    """

    def remember(
        context: int, layer: int, cache: int, position: int, keys: int, values: int, rope: int, scratch: int
    ) -> None:
        shape = integers(integers(context)[t.SHAPE])
        epsilon = floats(integers(context)[t.CONSTANTS])[t.NORM_EPSILON]
        entry = integers(layer)
        head_dim, padded = shape[t.HEAD_DIM], shape[t.HEAD_DIM_PADDED]
        value_dim, value_padded = shape[t.VALUE_DIM], shape[t.VALUE_DIM_PADDED]
        for head in range(shape[t.KV_HEADS]):
            bias = entry[t.KEY_BIAS]
            prepare_head(
                keys + head * head_dim * 4,
                scratch,
                head_dim,
                padded,
                bias + head * head_dim * 4 if bias else bias,
                entry[t.KEY_NORM],
                epsilon,
                rope,
                shape[t.ROPE_DIMS],
                shape[t.ROPE_HALVES],
                np.float32(1.0),
            )
            block = cache + position // POSITIONS * shape[t.KV_BLOCK_BYTES] + head * shape[t.KV_HEAD_BYTES]
            within = position % POSITIONS
            place = block + (within // 16 * padded * 16 + within % 16) * element_bytes
            if element_bytes == 1:
                scales = block + shape[t.KV_KEY_SCALES] + within // 16 * padded + within % 16 * 2
                for part in range(padded // BLOCK):
                    quantise_block(scratch + part * BLOCK * 4, place + part * BLOCK * 16, 16, scales + part * 32)
            else:
                _store_row(scratch, head_dim, place, 16 * element_bytes, element_bytes)

            source = values + head * value_dim * 4
            bias = entry[t.VALUE_BIAS]
            for index in range(value_padded):
                value = np.float32(0.0)
                if index < value_dim:
                    value = load_f32(source + index * 4)
                    if bias:
                        value += load_f32(bias + (head * value_dim + index) * 4)
                store_f32(value, scratch + index * 4)
            place = block + shape[t.KV_VALUES] + within * value_padded * element_bytes
            if element_bytes == 1:
                scales = block + shape[t.KV_VALUE_SCALES] + within * 2
                for part in range(value_padded // BLOCK):
                    quantise_block(scratch + part * BLOCK * 4, place + part * BLOCK, 1, scales + part * POSITIONS * 2)
            else:
                _store_row(scratch, value_dim, place, element_bytes, element_bytes)

    return kernel(remember, 8, cached=cached)


def compile_attend(element_bytes: int, *, cached: bool) -> Any:
    """``attend(context, layer, cache, segment, head, first, count, queries, rope, out, scratch)``.

    Attention of queries ``first…first+count`` of a segment (row by row, in each the heads of the group) over
    key/value head ``head``. ``layer`` and ``segment`` are addresses of rows of their tables; ``queries``, ``rope``
    and ``out`` those of the batch's first row.
    """

    def attend(
        context: int,
        layer: int,
        cache: int,
        segment_at: int,
        head: int,
        first: int,
        count: int,
        queries: int,
        rope: int,
        out: int,
        scratch: int,
    ) -> None:
        shape = integers(integers(context)[t.SHAPE])
        constants = floats(integers(context)[t.CONSTANTS])
        entry, segment = integers(layer), integers(segment_at)
        head_dim, padded = shape[t.HEAD_DIM], shape[t.HEAD_DIM_PADDED]
        value_dim, value_padded = shape[t.VALUE_DIM], shape[t.VALUE_DIM_PADDED]
        group = shape[t.HEADS] // shape[t.KV_HEADS]
        window = entry[t.WINDOW]
        query_stride, out_stride = padded * 4, value_padded * 4
        gathered = scratch + t.QUERY_BLOCK * query_stride
        scores = gathered + t.QUERY_BLOCK * out_stride
        states = scores + t.QUERY_BLOCK * t.SCORE_STRIDE

        for index in range(count):
            row = segment[t.FIRST_ROW] + (first + index) // group
            query_head = head * group + (first + index) % group
            bias = entry[t.QUERY_BIAS]
            prepare_head(
                queries + row * shape[t.QUERY_STRIDE] + query_head * head_dim * 4,
                scratch + index * query_stride,
                head_dim,
                padded,
                bias + query_head * head_dim * 4 if bias else bias,
                entry[t.QUERY_NORM],
                constants[t.NORM_EPSILON],
                rope + row * shape[t.ROPE_ROW_BYTES],
                shape[t.ROPE_DIMS],
                shape[t.ROPE_HALVES],
                constants[t.ATTENTION_SCALE],
            )
            store_f32(_NOTHING_YET, states + index * t.STATE_STRIDE)
            store_f32(0.0, states + index * t.STATE_STRIDE + 4)
            for element in range(value_padded):
                store_f32(0.0, gathered + index * out_stride + element * 4)

        lowest = segment[t.START] + first // group
        highest = segment[t.START] + (first + count - 1) // group
        begin = max(0, lowest - window + 1) // POSITIONS * POSITIONS if window else 0

        for base in range(begin, highest + 1, POSITIONS):
            keys = cache + base // POSITIONS * shape[t.KV_BLOCK_BYTES] + head * shape[t.KV_HEAD_BYTES]
            values = keys + shape[t.KV_VALUES]
            here = min(POSITIONS, highest + 1 - base)
            tiles = (here + 15) // 16
            for tile in range(tiles):
                key_tile = keys + tile * padded * 16 * element_bytes
                scales = keys + shape[t.KV_KEY_SCALES] + tile * padded
                for done in range(0, count, _EIGHT):
                    query = scratch + done * query_stride
                    target = scores + tile * 64 + done * t.SCORE_STRIDE
                    if count - done > _FOUR:
                        score_tile(
                            _EIGHT, element_bytes, query, query_stride, key_tile, scales, padded, target, t.SCORE_STRIDE
                        )
                    else:
                        score_tile(
                            _FOUR, element_bytes, query, query_stride, key_tile, scales, padded, target, t.SCORE_STRIDE
                        )
            for index in range(count):
                position = segment[t.START] + (first + index) // group
                row_scores = scores + index * t.SCORE_STRIDE
                for offset in range(min(POSITIONS, max(0, position + 1 - base)), POSITIONS):
                    store_f32(_HIDDEN, row_scores + offset * 4)
                if window:
                    for offset in range(min(POSITIONS, max(0, position - window + 1 - base))):
                        store_f32(_HIDDEN, row_scores + offset * 4)
                soften(row_scores, states + index * t.STATE_STRIDE)
            for chunk in range(value_padded // 16):
                source = values + chunk * 16 * element_bytes
                scales = keys + shape[t.KV_VALUE_SCALES] + chunk // 2 * POSITIONS * 2
                for done in range(0, count, _EIGHT):
                    target = gathered + done * out_stride + chunk * 64
                    weights = scores + done * t.SCORE_STRIDE
                    state = states + done * t.STATE_STRIDE
                    if count - done > _FOUR:
                        gather_values(
                            _EIGHT,
                            element_bytes,
                            weights,
                            t.SCORE_STRIDE,
                            state,
                            t.STATE_STRIDE,
                            source,
                            value_padded * element_bytes,
                            scales,
                            here,
                            target,
                            out_stride,
                        )
                    else:
                        gather_values(
                            _FOUR,
                            element_bytes,
                            weights,
                            t.SCORE_STRIDE,
                            state,
                            t.STATE_STRIDE,
                            source,
                            value_padded * element_bytes,
                            scales,
                            here,
                            target,
                            out_stride,
                        )

        for index in range(count):
            row = segment[t.FIRST_ROW] + (first + index) // group
            query_head = head * group + (first + index) % group
            place = out + row * shape[t.ATTENDED_STRIDE] + query_head * value_dim * 4
            total = load_f32(states + index * t.STATE_STRIDE + 4)
            for element in range(value_dim):
                store_f32(load_f32(gathered + index * out_stride + element * 4) / total, place + element * 4)

    return kernel(attend, 11, cached=cached)
