"""A whole stage for a batch of rows, in one compiled call that every compute thread enters.

Each thread does its part of every step and meets the others at a barrier. Matrices are divided by tiles, rows by rows,
attention by blocks of queries; no sum is ever divided, so results don't depend on the number of threads. With a
single row (decode), dividing rows makes no sense: each thread does the row's norms by itself, on a copy of its own,
and saves a barrier.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from myelin_worker_cpu import records as r
from myelin_worker_cpu import synchronise as s
from myelin_worker_cpu import tables as t
from myelin_worker_cpu.embedding import read_row
from myelin_worker_cpu.jit import inlined, kernel
from myelin_worker_cpu.pointers import call, doubles, floats, integers, load_f32, short_integers, store_f32
from myelin_worker_cpu.row_ops import (
    add_to,
    copy_group,
    gate,
    largest,
    quantise_group,
    scale_by,
    soft_cap,
    sum_exponentials,
    sum_squares,
)
from myelin_worker_cpu.synchronise import advance, read_word, swap_add, wait_while_equal

_WIDE = 16
_CHUNK_VECTORS = 64


@inlined
def _barrier(sync: int, threads: int) -> None:
    """Wait until every thread is here."""
    if threads == 1:
        return
    generation = read_word(sync + s.GENERATION)
    if swap_add(sync + s.ARRIVED, 1) == threads - 1:
        swap_add(sync + s.ARRIVED, -threads)
        advance(sync + s.GENERATION, sync + s.SLEEPERS)
    else:
        wait_while_equal(sync + s.GENERATION, generation, sync + s.SLEEPERS, s.BARRIER_SPINS)


@inlined
def _normalise(source: int, weight: int, size: int, epsilon: float, target: int) -> None:
    """RMS norm of a row of ``size`` numbers, padded with zeros to whole vectors."""
    vectors = (size + 15) // 16
    mean = sum_squares(source, vectors) / np.float32(size)
    scale_by(source, weight, np.float32(1.0) / math.sqrt(mean + epsilon), target, vectors)


@inlined
def _arrange(row: int, columns: int, index: int, width: int, needs: int, records: int, numbers: int) -> None:
    """Put a row (address ``row``, padded with zeros) as number ``index`` into the blocks of a matrix's input."""
    groups = (columns + 31) // 32
    slots = (columns + 63) // 64 * 2
    first = index // width * slots * width + index % width
    if needs & t.NEEDS_RECORDS:
        for group in range(groups):
            quantise_group(row + group * 128, records + (first + group * width) * r.RECORD_BYTES)
    if needs & t.NEEDS_FLOATS:
        for group in range(groups):
            copy_group(row + group * 128, numbers + (first + group * width) * r.FLOAT_ENTRY_BYTES)


@inlined
def _share(count: int, thread: int, threads: int) -> tuple[int, int]:
    """Which of ``count`` things are this thread's."""
    return count * thread // threads, count * (thread + 1) // threads


@inlined
def _block_width(rows: int) -> int:
    """The compiled twin of :func:`myelin_worker_cpu.records.block_width`."""
    return 1 if rows == 1 else 4 if rows <= 4 else _WIDE


@inlined
def _turn(position: int, frequencies: Any, first: int, half: int, place: int) -> None:
    """A position's cosines and sines."""
    for index in range(half):
        angle = position * frequencies[first + index]
        store_f32(math.cos(angle), place + index * 4)
        store_f32(math.sin(angle), place + (half + index) * 4)


@inlined
def _pick(logits: int, vocabulary: int) -> tuple[int, float]:
    """The greedy choice (ties to the lowest id) and its log-probability; ``logits`` are padded with -inf to vectors."""
    vectors = (vocabulary + 15) // 16
    peak = largest(logits, vectors)
    best = 0
    while load_f32(logits + best * 4) != peak and best < vocabulary - 1:
        best += 1
    total = 0.0
    for first in range(0, vectors, _CHUNK_VECTORS):
        total += sum_exponentials(logits + first * 64, peak, min(_CHUNK_VECTORS, vectors - first))
    return best, -math.log(total)


@inlined
def _multiply(
    matrix: Any, records: int, numbers: int, rows: int, out: int, out_stride: int, thread: int, threads: int
) -> None:
    """This thread's tiles of a matrix times the blocks of its input."""
    width = _block_width(rows)
    function = matrix[t.KERNEL_16]
    if width == 1:
        function = matrix[t.KERNEL_1]
    elif width == 4:
        function = matrix[t.KERNEL_4]
    first, end = _share(matrix[t.TILES], thread, threads)
    call(
        function,
        (
            matrix[t.WEIGHTS],
            matrix[t.TILE_BYTES],
            first,
            end,
            matrix[t.SLABS],
            numbers if matrix[t.ELEMENT] else records,
            (rows + width - 1) // width,
            out,
            out_stride,
        ),
    )


@inlined
def _add_projected(x: int, projected: int, post_norm: int, size: int, epsilon: float, scratch: int) -> None:
    """Add a block's output to the residual stream, through its post norm where there is one.

    ``projected`` is not changed: with a single row every thread reads it.
    """
    if post_norm:
        _normalise(projected, post_norm, size, epsilon, scratch)
        add_to(x, scratch, (size + 15) // 16)
    else:
        add_to(x, projected, (size + 15) // 16)


def compile_layer(*, cached: bool) -> Any:
    """``layer(thread, context, number, x, records, numbers, first, end, own)``: one decoder block.

    ``x`` is the residual stream, ``records`` and ``numbers`` are room for the inputs of matrices; rows ``first…end``
    are this thread's to prepare. ``own`` is 1 where all three are this thread's alone (a single row), else 0.
    """

    def layer(
        thread: int, context: int, number: int, x: int, records: int, numbers: int, first: int, end: int, own: int
    ) -> None:
        tables = integers(context)
        shape, buffers, step = integers(tables[t.SHAPE]), integers(tables[t.BUFFERS]), integers(tables[t.STEP])
        positions = integers(tables[t.POSITIONS])
        layer_at = tables[t.LAYER_TABLE] + number * t.LAYER_SIZE * 8
        entry = integers(layer_at)
        matrices = tables[t.MATRIX_TABLE] + number * t.LAYER_MATRICES * t.MATRIX_SIZE * 8
        segments = tables[t.SEGMENT_TABLE]
        sync, threads = tables[t.SYNC], tables[t.THREADS]
        epsilon = floats(tables[t.CONSTANTS])[t.NORM_EPSILON]
        rows, columns, stride = step[t.ROWS], shape[t.WIDTH], shape[t.WIDTH_STRIDE]
        width = _block_width(rows)
        private = buffers[t.PRIVATE] + thread * shape[t.PRIVATE_BYTES]
        row_buffer = private + shape[t.PRIVATE_ROW]
        scratch = private + shape[t.PRIVATE_ATTENTION]
        rope = buffers[t.ROPE] + entry[t.ROPE_KIND] * shape[t.ROPE_KIND_BYTES]
        projected = buffers[t.PROJECTED]
        # where rows were divided, nobody may go on before all are prepared
        sharers = 1 if own else threads

        for row in range(first, end):
            _normalise(x + row * stride, entry[t.ATTENTION_NORM], columns, epsilon, row_buffer)
            _arrange(row_buffer, columns, row, width, entry[t.NEEDS_QKV], records, numbers)
        _barrier(sync, sharers)
        for which in range(3):
            _multiply(
                integers(matrices + which * t.MATRIX_SIZE * 8),
                records,
                numbers,
                rows,
                buffers[t.QUERIES + which],
                shape[t.QUERY_STRIDE + which],
                thread,
                threads,
            )
        _barrier(sync, threads)

        cache_offset = number * shape[t.KV_LAYER_BYTES]
        for index in range(step[t.SEGMENTS]):
            segment = integers(segments + index * t.SEGMENT_SIZE * 8)
            begin = max(first, segment[t.FIRST_ROW])
            stop = min(end, segment[t.FIRST_ROW] + segment[t.COUNT])
            for row in range(begin, stop):
                # a single row is put in place by every thread, each the same bytes: cheaper than a barrier
                call(
                    tables[t.REMEMBER_KERNEL],
                    (
                        context,
                        layer_at,
                        segment[t.SLOT] + cache_offset,
                        positions[row],
                        buffers[t.KEYS] + row * shape[t.KEY_STRIDE],
                        buffers[t.VALUES] + row * shape[t.VALUE_STRIDE],
                        rope + row * shape[t.ROPE_ROW_BYTES],
                        scratch,
                    ),
                )
        _barrier(sync, sharers)

        group = shape[t.HEADS] // shape[t.KV_HEADS]
        task = 0
        for index in range(step[t.SEGMENTS]):
            segment_at = segments + index * t.SEGMENT_SIZE * 8
            segment = integers(segment_at)
            queries = segment[t.COUNT] * group
            block = min(t.QUERY_BLOCK, queries)
            if threads > 1 and segment[t.COUNT] == 1:
                block = max(1, min(block, shape[t.HEADS] // threads))
            for head in range(shape[t.KV_HEADS]):
                for begin in range(0, queries, block):
                    if task % threads == thread:
                        call(
                            tables[t.ATTEND_KERNEL],
                            (
                                context,
                                layer_at,
                                segment[t.SLOT] + cache_offset,
                                segment_at,
                                head,
                                begin,
                                min(block, queries - begin),
                                buffers[t.QUERIES],
                                rope,
                                buffers[t.ATTENTION],
                                scratch,
                            ),
                        )
                    task += 1
        _barrier(sync, threads)

        for row in range(first, end):
            source = buffers[t.ATTENTION] + row * shape[t.ATTENDED_STRIDE]
            _arrange(source, shape[t.ATTENDED], row, width, entry[t.NEEDS_OUT], records, numbers)
        _barrier(sync, sharers)
        out_matrix = integers(matrices + t.ATTENTION_OUT * t.MATRIX_SIZE * 8)
        _multiply(out_matrix, records, numbers, rows, projected, stride, thread, threads)
        _barrier(sync, threads)

        for row in range(first, end):
            _add_projected(
                x + row * stride, projected + row * stride, entry[t.POST_ATTENTION_NORM], columns, epsilon, row_buffer
            )
            _normalise(x + row * stride, entry[t.FFN_NORM], columns, epsilon, row_buffer)
            _arrange(row_buffer, columns, row, width, entry[t.NEEDS_FFN], records, numbers)
        _barrier(sync, sharers)
        gates, ups, ffn_stride = buffers[t.GATES], buffers[t.UPS], shape[t.FFN_STRIDE]
        for which in range(2):
            matrix = integers(matrices + (t.FFN_GATE + which) * t.MATRIX_SIZE * 8)
            _multiply(matrix, records, numbers, rows, buffers[t.GATES + which], ffn_stride, thread, threads)
        first_tile, end_tile = _share(integers(matrices + t.FFN_GATE * t.MATRIX_SIZE * 8)[t.TILES], thread, threads)
        for row in range(rows):
            offset = row * ffn_stride + first_tile * 64
            gate(shape[t.GATE_KIND], gates + offset, ups + offset, end_tile - first_tile)
        _barrier(sync, threads)

        for row in range(first, end):
            source = gates + row * ffn_stride
            _arrange(source, shape[t.FFN_WIDTH], row, width, entry[t.NEEDS_DOWN], records, numbers)
        _barrier(sync, sharers)
        down_matrix = integers(matrices + t.FFN_DOWN * t.MATRIX_SIZE * 8)
        _multiply(down_matrix, records, numbers, rows, projected, stride, thread, threads)
        _barrier(sync, threads)
        for row in range(first, end):
            _add_projected(
                x + row * stride, projected + row * stride, entry[t.POST_FFN_NORM], columns, epsilon, row_buffer
            )

    return kernel(layer, 9, cached=cached)


@inlined
def _begin(thread: int, tables: Any, shape: Any, buffers: Any, x: int, first: int, end: int) -> None:
    """Fill the residual stream of rows ``first…end``, from token ids or from the stage before, and their rotations."""
    columns, stride = shape[t.WIDTH], shape[t.WIDTH_STRIDE]
    tokens, positions = short_integers(tables[t.TOKENS]), integers(tables[t.POSITIONS])
    frequencies = doubles(tables[t.FREQUENCIES])
    embedding = integers(tables[t.MATRIX_TABLE] + shape[t.EMBEDDING] * t.MATRIX_SIZE * 8)
    scale = floats(tables[t.CONSTANTS])[t.EMBEDDING_SCALE]
    half = shape[t.ROPE_DIMS] // 2
    for row in range(first, end):
        if shape[t.IS_HEAD]:
            read_row(embedding, tokens[row], scale, x + row * stride)
        else:
            source = buffers[t.HIDDEN_IN] + row * columns * 4
            for column in range(columns):
                store_f32(load_f32(source + column * 4), x + row * stride + column * 4)
        for kind in range(2):
            place = buffers[t.ROPE] + kind * shape[t.ROPE_KIND_BYTES] + row * shape[t.ROPE_ROW_BYTES]
            _turn(positions[row], frequencies, kind * half, half, place)


@inlined
def _output(
    thread: int, tables: Any, shape: Any, buffers: Any, count: int, x: int, records: int, numbers: int, own: int
) -> None:
    """Final norm and logits of the output rows, at most 16, and the greedy choice of each."""
    sync, threads = tables[t.SYNC], tables[t.THREADS]
    constants = floats(tables[t.CONSTANTS])
    rows, chosen, logprobs = integers(tables[t.OUTPUT_ROWS]), integers(tables[t.CHOSEN]), doubles(tables[t.LOGPROBS])
    columns, stride = shape[t.WIDTH], shape[t.WIDTH_STRIDE]
    row_buffer = buffers[t.PRIVATE] + thread * shape[t.PRIVATE_BYTES] + shape[t.PRIVATE_ROW]
    sharers = 1 if own else threads
    _barrier(sync, sharers)
    for index in range(count):
        if own or index % threads == thread:
            source = x + rows[index] * stride
            _normalise(source, shape[t.OUTPUT_NORM], columns, constants[t.NORM_EPSILON], row_buffer)
            _arrange(row_buffer, columns, index, _block_width(count), shape[t.OUTPUT_NEEDS], records, numbers)
    _barrier(sync, sharers)
    matrix = integers(tables[t.MATRIX_TABLE] + shape[t.OUTPUT_HEAD] * t.MATRIX_SIZE * 8)
    logits, logit_stride = buffers[t.LOGITS], shape[t.LOGIT_STRIDE]
    _multiply(matrix, records, numbers, count, logits, logit_stride, thread, threads)
    if constants[t.SOFT_CAP] > 0.0:
        first, end = _share(matrix[t.TILES], thread, threads)
        for index in range(count):
            soft_cap(logits + index * logit_stride + first * 64, constants[t.SOFT_CAP], end - first)
    _barrier(sync, threads)
    for index in range(count):
        if index % threads == thread:
            row = logits + index * logit_stride
            for column in range(shape[t.VOCABULARY], (shape[t.VOCABULARY] + 15) // 16 * 16):
                store_f32(-math.inf, row + column * 4)
            best, logprob = _pick(row, shape[t.VOCABULARY])
            chosen[index] = best
            logprobs[index] = logprob


def compile_stage(*, cached: bool) -> Any:
    """``stage(thread, context)``: one step for thread 0; for any other its part of every step, until it is stopped."""

    def stage(thread: int, context: int) -> None:
        tables = integers(context)
        shape, buffers, step = integers(tables[t.SHAPE]), integers(tables[t.BUFFERS]), integers(tables[t.STEP])
        sync, threads = tables[t.SYNC], tables[t.THREADS]
        private = buffers[t.PRIVATE] + thread * shape[t.PRIVATE_BYTES]
        seen = 0
        while True:
            if thread > 0:
                wait_while_equal(sync + s.STARTED, seen, sync + s.START_SLEEPERS, s.START_SPINS)
                seen += 1
                if read_word(sync + s.STOP):
                    return
            elif threads > 1:
                advance(sync + s.STARTED, sync + s.START_SLEEPERS)

            rows = step[t.ROWS]
            own = 1 if rows == 1 else 0
            x, records, numbers = buffers[t.X], buffers[t.RECORDS], buffers[t.FLOATS]
            first, end = _share(rows, thread, threads)
            if own:
                x = private + shape[t.PRIVATE_X]
                records = private + shape[t.PRIVATE_RECORDS]
                numbers = private + shape[t.PRIVATE_FLOATS]
                first, end = 0, 1
            _begin(thread, tables, shape, buffers, x, first, end)
            for number in range(shape[t.LAYERS]):
                call(tables[t.LAYER_KERNEL], (thread, context, number, x, records, numbers, first, end, own))
            if not shape[t.IS_TAIL]:
                if not own or thread == 0:
                    for row in range(first, end):
                        for column in range(shape[t.WIDTH]):
                            value = load_f32(x + row * shape[t.WIDTH_STRIDE] + column * 4)
                            store_f32(value, buffers[t.HIDDEN_OUT] + (row * shape[t.WIDTH] + column) * 4)
            elif step[t.OUTPUTS] > 0:
                _output(thread, tables, shape, buffers, step[t.OUTPUTS], x, records, numbers, own)
            _barrier(sync, threads)
            if thread == 0:
                return

    return kernel(stage, 2, cached=cached)


def compile_stop(*, cached: bool) -> Any:
    """``stop(sync)``: make every helper return."""

    def stop(sync: int) -> None:
        swap_add(sync + s.STOP, 1)
        advance(sync + s.STARTED, sync + s.START_SLEEPERS)

    return kernel(stop, 1, cached=cached)
