"""A whole stage for a batch of rows, in one compiled call that every compute thread enters.

Each thread does its part of every step and meets the others at a barrier. Matrices are divided by tiles, rows by rows,
attention by blocks of queries; no sum is ever divided, so results don't depend on the number of threads. With a single row
(decode), dividing rows makes no sense: each thread does the row's norms by itself, on a copy of its own, and saves a
barrier.
"""

from __future__ import annotations

import math

import numba
from numba import types

from myelin_worker_cpu import records as r
from myelin_worker_cpu import synchronise as s
from myelin_worker_cpu import tables as t
from myelin_worker_cpu.attention import attend_half, attend_single, remember
from myelin_worker_cpu.embedding import read_row
from myelin_worker_cpu.pointers import call_matmul, load_f32, store_f32
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

INT_ROW = types.Array(types.int64, 1, "C")
INT_TABLE = types.Array(types.int64, 2, "C")
FLOAT_ROW = types.Array(types.float32, 1, "C")

STAGE_ARGUMENTS = (
    types.int64,  # threads
    types.int64,  # bytes of a key or value element
    INT_ROW,  # shape
    FLOAT_ROW,  # constants
    types.Array(types.float64, 2, "C"),  # frequencies[2, rope_dims / 2]: radians for each position, global and local
    INT_TABLE,  # layers
    INT_TABLE,  # matrices
    INT_ROW,  # buffers
    INT_ROW,  # step
    types.Array(types.int32, 1, "C"),  # tokens of the rows
    INT_ROW,  # positions of the rows
    INT_TABLE,  # segments
    INT_ROW,  # output rows
    INT_ROW,  # chosen tokens, one for each output
    types.Array(types.float64, 1, "C"),  # their log-probabilities
    types.int64,  # address of the sync block
)

_WIDE = 16
_CHUNK_VECTORS = 64


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]  # numba has no types
def _barrier(sync, threads):  # type: ignore[no-untyped-def]  # typed by numba
    """Wait until every thread is here."""
    if threads == 1:
        return
    generation = read_word(sync + s.GENERATION)
    if swap_add(sync + s.ARRIVED, 1) == threads - 1:
        swap_add(sync + s.ARRIVED, -threads)
        advance(sync + s.GENERATION, sync + s.SLEEPERS)
    else:
        wait_while_equal(sync + s.GENERATION, generation, sync + s.SLEEPERS, s.BARRIER_SPINS)


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _normalise(source, weight, size, epsilon, target):  # type: ignore[no-untyped-def]
    """RMS norm of a row of ``size`` numbers, padded with zeros to whole vectors."""
    vectors = (size + 15) // 16
    mean = sum_squares(source, vectors) / numba.float32(size)
    scale_by(source, weight, numba.float32(1.0) / math.sqrt(mean + epsilon), target, vectors)


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _arrange(row, columns, index, width, needs, records, floats):  # type: ignore[no-untyped-def]
    """Put a row (address ``row``, padded with zeros) as number ``index`` into the blocks of a matrix's input."""
    groups = (columns + 31) // 32
    slots = (columns + 63) // 64 * 2
    first = index // width * slots * width + index % width
    if needs & t.NEEDS_RECORDS:
        for group in range(groups):
            quantise_group(row + group * 128, records + (first + group * width) * r.RECORD_BYTES)
    if needs & t.NEEDS_FLOATS:
        for group in range(groups):
            copy_group(row + group * 128, floats + (first + group * width) * r.FLOAT_ENTRY_BYTES)


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _multiply(matrix, records, floats, width, blocks, out, out_stride, thread, threads):  # type: ignore[no-untyped-def]
    """This thread's tiles of a matrix times the blocks of its input."""
    kernel = matrix[t.KERNEL_16]
    if width == 1:
        kernel = matrix[t.KERNEL_1]
    elif width == 4:
        kernel = matrix[t.KERNEL_4]
    tiles = matrix[t.TILES]
    call_matmul(
        kernel,
        matrix[t.WEIGHTS],
        matrix[t.TILE_BYTES],
        tiles * thread // threads,
        tiles * (thread + 1) // threads,
        matrix[t.SLABS],
        floats if matrix[t.ELEMENT] else records,
        blocks,
        out,
        out_stride,
    )


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _turn(position, frequencies, dims, place):  # type: ignore[no-untyped-def]
    """A position's cosines and sines."""
    half = dims // 2
    for index in range(half):
        angle = position * frequencies[index]
        store_f32(math.cos(angle), place + index * 4)
        store_f32(math.sin(angle), place + (half + index) * 4)


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _add_projected(x, projected, post_norm, width, epsilon):  # type: ignore[no-untyped-def]
    """Add a block's output to the residual stream, through its post norm where there is one."""
    if post_norm:
        _normalise(projected, post_norm, width, epsilon, projected)
    add_to(x, projected, (width + 15) // 16)


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _pick(logits, vocabulary):  # type: ignore[no-untyped-def]
    """The greedy choice (ties to the lowest id) and its log-probability; ``logits`` is padded with -inf to whole vectors."""
    vectors = (vocabulary + 15) // 16
    peak = largest(logits, vectors)
    best = 0
    while load_f32(logits + best * 4) != peak and best < vocabulary - 1:
        best += 1
    total = 0.0
    for first in range(0, vectors, _CHUNK_VECTORS):
        total += sum_exponentials(logits + first * 64, peak, min(_CHUNK_VECTORS, vectors - first))
    return best, -math.log(total)


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _layer(  # type: ignore[no-untyped-def]
    thread,
    threads,
    element_bytes,
    shape,
    constants,
    layer,
    matrices,
    buffers,
    step,
    positions,
    segments,
    sync,
    number,
    x,
    records,
    floats,
    first,
    end,
    own,
):
    """One decoder block for rows whose residual stream is at ``x``; rows ``first…end`` are this thread's to prepare.

    ``own`` is 1 where ``x``, ``records`` and ``floats`` are this thread's own memory (a single row).
    """
    rows = step[t.ROWS]
    width = 1 if rows == 1 else 4 if rows <= 4 else _WIDE
    blocks = (rows + width - 1) // width
    columns = shape[t.WIDTH]
    stride = shape[t.WIDTH_STRIDE]
    epsilon = constants[t.NORM_EPSILON]
    private = buffers[t.PRIVATE] + thread * shape[t.PRIVATE_BYTES]
    row_buffer = private + shape[t.PRIVATE_ROW]
    scratch = private + shape[t.PRIVATE_ATTENTION]
    mine = 1 if own else threads
    rope = buffers[t.ROPE] + layer[t.ROPE_KIND] * shape[t.ROPE_KIND_BYTES]
    base = number * t.LAYER_MATRICES

    for row in range(first, end):
        _normalise(x + row * stride, layer[t.ATTENTION_NORM], columns, epsilon, row_buffer)
        _arrange(row_buffer, columns, row, width, layer[t.NEEDS_QKV], records, floats)
    _barrier(sync, mine)
    _multiply(
        matrices[base + t.QUERY],
        records,
        floats,
        width,
        blocks,
        buffers[t.QUERIES],
        shape[t.QUERY_STRIDE],
        thread,
        threads,
    )
    _multiply(
        matrices[base + t.KEY], records, floats, width, blocks, buffers[t.KEYS], shape[t.KEY_STRIDE], thread, threads
    )
    _multiply(
        matrices[base + t.VALUE],
        records,
        floats,
        width,
        blocks,
        buffers[t.VALUES],
        shape[t.VALUE_STRIDE],
        thread,
        threads,
    )
    _barrier(sync, threads)

    cache_offset = number * shape[t.KV_LAYER_BYTES]
    for index in range(step[t.SEGMENTS]):
        segment = segments[index]
        begin = max(first, segment[t.FIRST_ROW])
        stop = min(end, segment[t.FIRST_ROW] + segment[t.COUNT])
        for row in range(begin, stop):
            # a single row is written by every thread, each the same bytes: cheaper than a barrier
            remember(
                shape,
                constants,
                layer,
                segment[t.SLOT] + cache_offset,
                positions[row],
                buffers[t.KEYS] + row * shape[t.KEY_STRIDE],
                buffers[t.VALUES] + row * shape[t.VALUE_STRIDE],
                rope + row * shape[t.ROPE_ROW_BYTES],
                scratch,
                element_bytes,
            )
    _barrier(sync, mine)

    group = shape[t.HEADS] // shape[t.KV_HEADS]
    task = 0
    for index in range(step[t.SEGMENTS]):
        segment = segments[index]
        queries = segment[t.COUNT] * group
        block = min(t.QUERY_BLOCK, queries)
        if threads > 1 and segment[t.COUNT] == 1:
            block = max(1, min(block, shape[t.HEADS] // threads))
        for head in range(shape[t.KV_HEADS]):
            for begin in range(0, queries, block):
                if task % threads == thread:
                    if element_bytes == 2:
                        attend_half(
                            shape,
                            constants,
                            layer,
                            segment[t.SLOT] + cache_offset,
                            segment,
                            head,
                            begin,
                            min(block, queries - begin),
                            buffers[t.QUERIES],
                            rope,
                            buffers[t.ATTENTION],
                            scratch,
                        )
                    else:
                        attend_single(
                            shape,
                            constants,
                            layer,
                            segment[t.SLOT] + cache_offset,
                            segment,
                            head,
                            begin,
                            min(block, queries - begin),
                            buffers[t.QUERIES],
                            rope,
                            buffers[t.ATTENTION],
                            scratch,
                        )
                task += 1
    _barrier(sync, threads)

    for row in range(first, end):
        _arrange(
            buffers[t.ATTENTION] + row * shape[t.ATTENDED_STRIDE],
            shape[t.ATTENDED],
            row,
            width,
            layer[t.NEEDS_OUT],
            records,
            floats,
        )
    _barrier(sync, mine)
    _multiply(
        matrices[base + t.ATTENTION_OUT],
        records,
        floats,
        width,
        blocks,
        buffers[t.PROJECTED],
        stride,
        thread,
        threads,
    )
    _barrier(sync, threads)

    for row in range(first, end):
        if own:
            # the projected row is everyone's: a copy, as the post norm writes
            for vector in range((columns + 31) // 32):
                copy_group(buffers[t.PROJECTED] + vector * 128, row_buffer + vector * 128)
            _add_projected(x, row_buffer, layer[t.POST_ATTENTION_NORM], columns, epsilon)
        else:
            _add_projected(
                x + row * stride, buffers[t.PROJECTED] + row * stride, layer[t.POST_ATTENTION_NORM], columns, epsilon
            )
        _normalise(x + row * stride, layer[t.FFN_NORM], columns, epsilon, row_buffer)
        _arrange(row_buffer, columns, row, width, layer[t.NEEDS_FFN], records, floats)
    _barrier(sync, mine)
    gates, ups, ffn_stride = buffers[t.GATES], buffers[t.UPS], shape[t.FFN_STRIDE]
    _multiply(matrices[base + t.FFN_GATE], records, floats, width, blocks, gates, ffn_stride, thread, threads)
    _multiply(matrices[base + t.FFN_UP], records, floats, width, blocks, ups, ffn_stride, thread, threads)
    tiles = matrices[base + t.FFN_GATE][t.TILES]
    first_tile, end_tile = tiles * thread // threads, tiles * (thread + 1) // threads
    for row in range(rows):
        offset = row * ffn_stride + first_tile * 64
        gate(shape[t.GATE_KIND], gates + offset, ups + offset, end_tile - first_tile)
    _barrier(sync, threads)

    for row in range(first, end):
        _arrange(gates + row * ffn_stride, shape[t.FFN_WIDTH], row, width, layer[t.NEEDS_DOWN], records, floats)
    _barrier(sync, mine)
    _multiply(
        matrices[base + t.FFN_DOWN], records, floats, width, blocks, buffers[t.PROJECTED], stride, thread, threads
    )
    _barrier(sync, threads)
    for row in range(first, end):
        if own:
            for vector in range((columns + 31) // 32):
                copy_group(buffers[t.PROJECTED] + vector * 128, row_buffer + vector * 128)
            _add_projected(x, row_buffer, layer[t.POST_FFN_NORM], columns, epsilon)
        else:
            _add_projected(
                x + row * stride, buffers[t.PROJECTED] + row * stride, layer[t.POST_FFN_NORM], columns, epsilon
            )


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _output_head(  # type: ignore[no-untyped-def]
    thread,
    threads,
    shape,
    constants,
    matrices,
    buffers,
    step,
    outputs,
    chosen,
    logprobs,
    sync,
    x,
    records,
    floats,
    own,
):
    """Final norm and logits of the output rows, at most 16, and the greedy choice of each."""
    count = step[t.OUTPUTS]
    width = 1 if count == 1 else 4 if count <= 4 else _WIDE
    blocks = (count + width - 1) // width
    columns, stride = shape[t.WIDTH], shape[t.WIDTH_STRIDE]
    private = buffers[t.PRIVATE] + thread * shape[t.PRIVATE_BYTES]
    row_buffer = private + shape[t.PRIVATE_ROW]
    if not own:
        _barrier(sync, threads)
    for index in range(count):
        if own or index % threads == thread:
            _normalise(
                x + outputs[index] * stride, shape[t.OUTPUT_NORM], columns, constants[t.NORM_EPSILON], row_buffer
            )
            _arrange(row_buffer, columns, index, width, shape[t.OUTPUT_NEEDS], records, floats)
    if not own:
        _barrier(sync, threads)
    matrix = matrices[shape[t.OUTPUT_HEAD]]
    logits, logit_stride = buffers[t.LOGITS], shape[t.LOGIT_STRIDE]
    _multiply(matrix, records, floats, width, blocks, logits, logit_stride, thread, threads)
    if constants[t.SOFT_CAP] > 0.0:
        tiles = matrix[t.TILES]
        first_tile, end_tile = tiles * thread // threads, tiles * (thread + 1) // threads
        for index in range(count):
            soft_cap(logits + index * logit_stride + first_tile * 64, constants[t.SOFT_CAP], end_tile - first_tile)
    _barrier(sync, threads)
    for index in range(count):
        if index % threads == thread:
            row = logits + index * logit_stride
            for column in range(shape[t.VOCABULARY], (shape[t.VOCABULARY] + 15) // 16 * 16):
                store_f32(-math.inf, row + column * 4)
            best, logprob = _pick(row, shape[t.VOCABULARY])
            chosen[index] = best
            logprobs[index] = logprob


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _run(  # type: ignore[no-untyped-def]
    thread,
    threads,
    element_bytes,
    shape,
    constants,
    frequencies,
    layers,
    matrices,
    buffers,
    step,
    tokens,
    positions,
    segments,
    outputs,
    chosen,
    logprobs,
    sync,
):
    """One thread's part of a step."""
    rows = step[t.ROWS]
    columns, stride = shape[t.WIDTH], shape[t.WIDTH_STRIDE]
    own = 1 if rows == 1 else 0
    private = buffers[t.PRIVATE] + thread * shape[t.PRIVATE_BYTES]
    if own:
        x, records, floats = (
            private + shape[t.PRIVATE_X],
            private + shape[t.PRIVATE_RECORDS],
            private + shape[t.PRIVATE_FLOATS],
        )
        first, end = 0, 1
    else:
        x, records, floats = buffers[t.X], buffers[t.RECORDS], buffers[t.FLOATS]
        first, end = rows * thread // threads, rows * (thread + 1) // threads

    for row in range(first, end):
        if shape[t.IS_HEAD]:
            read_row(matrices[shape[t.EMBEDDING]], tokens[row], constants[t.EMBEDDING_SCALE], x + row * stride)
        else:
            source = buffers[t.HIDDEN_IN] + row * columns * 4
            for column in range(columns):
                store_f32(load_f32(source + column * 4), x + row * stride + column * 4)
        for kind in range(2):
            place = buffers[t.ROPE] + kind * shape[t.ROPE_KIND_BYTES] + row * shape[t.ROPE_ROW_BYTES]
            _turn(positions[row], frequencies[kind], shape[t.ROPE_DIMS], place)

    for number in range(shape[t.LAYERS]):
        _layer(
            thread,
            threads,
            element_bytes,
            shape,
            constants,
            layers[number],
            matrices,
            buffers,
            step,
            positions,
            segments,
            sync,
            number,
            x,
            records,
            floats,
            first,
            end,
            own,
        )

    if not shape[t.IS_TAIL]:
        if not own or thread == 0:
            for row in range(first, end):
                target = buffers[t.HIDDEN_OUT] + row * columns * 4
                for column in range(columns):
                    store_f32(load_f32(x + row * stride + column * 4), target + column * 4)
    elif step[t.OUTPUTS] > 0:
        _output_head(
            thread,
            threads,
            shape,
            constants,
            matrices,
            buffers,
            step,
            outputs,
            chosen,
            logprobs,
            sync,
            x,
            records,
            floats,
            own,
        )
    _barrier(sync, threads)


def run_stage(  # type: ignore[no-untyped-def]  # typed by STAGE_ARGUMENTS
    threads,
    element_bytes,
    shape,
    constants,
    frequencies,
    layers,
    matrices,
    buffers,
    step,
    tokens,
    positions,
    segments,
    outputs,
    chosen,
    logprobs,
    sync,
):
    """One step, called by the engine's thread; the helpers are woken and have done their part on return."""
    if threads > 1:
        advance(sync + s.STARTED, sync + s.START_SLEEPERS)
    _run(
        0,
        threads,
        element_bytes,
        shape,
        constants,
        frequencies,
        layers,
        matrices,
        buffers,
        step,
        tokens,
        positions,
        segments,
        outputs,
        chosen,
        logprobs,
        sync,
    )


def help_stage(  # type: ignore[no-untyped-def]  # typed by HELPER_ARGUMENTS
    thread,
    threads,
    element_bytes,
    shape,
    constants,
    frequencies,
    layers,
    matrices,
    buffers,
    step,
    tokens,
    positions,
    segments,
    outputs,
    chosen,
    logprobs,
    sync,
):
    """A helper thread's life: its part of every step, until the stop word is set."""
    seen = 0
    while True:
        wait_while_equal(sync + s.STARTED, seen, sync + s.START_SLEEPERS, s.START_SPINS)
        seen += 1
        if read_word(sync + s.STOP):
            return
        _run(
            thread,
            threads,
            element_bytes,
            shape,
            constants,
            frequencies,
            layers,
            matrices,
            buffers,
            step,
            tokens,
            positions,
            segments,
            outputs,
            chosen,
            logprobs,
            sync,
        )


HELPER_ARGUMENTS = (types.int64, *STAGE_ARGUMENTS)


def stop_helpers(sync):  # type: ignore[no-untyped-def]  # an int64 address
    """Make every helper return."""
    swap_add(sync + s.STOP, 1)
    advance(sync + s.STARTED, sync + s.START_SLEEPERS)
