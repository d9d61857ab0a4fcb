"""A whole stage for a batch of rows, in one compiled call that every compute thread enters.

Each thread does its part of every step and meets the others at a barrier. Matrices are divided by tiles, rows by rows,
attention by blocks of queries; no sum is ever divided, so results don't depend on the number of threads. With a
single row (decode), dividing rows makes no sense: each thread does the row's norms by itself, on a copy of its own,
and saves a barrier.
"""

from __future__ import annotations

import math
from typing import Any

from myelin_worker_cpu import synchronise as s
from myelin_worker_cpu import tables as t
from myelin_worker_cpu.choice import output_head
from myelin_worker_cpu.division import barrier, share
from myelin_worker_cpu.embedding import read_row
from myelin_worker_cpu.jit import inlined, kernel
from myelin_worker_cpu.pointers import call, doubles, floats, integers, load_f32, short_integers, store_f32
from myelin_worker_cpu.synchronise import advance, read_word, swap_add, wait_while_equal


@inlined
def _turn(position: int, frequencies: Any, first: int, half: int, place: int) -> None:
    """A position's cosines and sines."""
    for index in range(half):
        angle = position * frequencies[first + index]
        store_f32(math.cos(angle), place + index * 4)
        store_f32(math.sin(angle), place + (half + index) * 4)


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


def compile_stage(*, cached: bool) -> Any:
    """``stage(thread, context)``: one step for thread 0; for any other its part of every step, until it is stopped."""

    def stage(thread: int, context: int) -> None:
        tables = integers(context)
        shape, buffers, step = integers(tables[t.SHAPE]), integers(tables[t.BUFFERS]), integers(tables[t.STEP])
        sync = tables[t.SYNC]
        private = buffers[t.PRIVATE] + thread * shape[t.PRIVATE_BYTES]
        seen = 0
        while True:
            if thread > 0:
                wait_while_equal(sync + s.STARTED, seen, sync + s.START_SLEEPERS, s.START_SPINS)
                seen += 1
                if read_word(sync + s.STOP):
                    return
            elif tables[t.THREADS] > 1:  # where this one computes alone, the others sleep on
                advance(sync + s.STARTED, sync + s.START_SLEEPERS)

            threads = tables[t.THREADS]
            rows = step[t.ROWS]
            own = 1 if rows == 1 else 0
            x, records, numbers = buffers[t.X], buffers[t.RECORDS], buffers[t.FLOATS]
            first, end = share(rows, thread, threads)
            if own:
                x = private + shape[t.PRIVATE_X]
                records = private + shape[t.PRIVATE_RECORDS]
                numbers = private + shape[t.PRIVATE_FLOATS]
                first, end = 0, 1
            _begin(thread, tables, shape, buffers, x, first, end)
            # the rows that nobody wants logits of are done with once the last layer has their keys and values
            narrow = 1 if shape[t.IS_TAIL] and step[t.OUTPUTS] < rows else 0
            last = shape[t.LAYERS] - 1
            for number in range(last + 1):
                narrowed = narrow if number == last else 0
                call(tables[t.LAYER_KERNEL], (thread, context, number, x, records, numbers, first, end, own, narrowed))
            if not shape[t.IS_TAIL]:
                if not own or thread == 0:
                    for row in range(first, end):
                        for column in range(shape[t.WIDTH]):
                            value = load_f32(x + row * shape[t.WIDTH_STRIDE] + column * 4)
                            store_f32(value, buffers[t.HIDDEN_OUT] + (row * shape[t.WIDTH] + column) * 4)
            elif step[t.OUTPUTS] > 0:
                wanted = integers(tables[t.NARROWED_ROWS if narrow else t.OUTPUT_ROWS])
                output_head(thread, tables, shape, buffers, step[t.OUTPUTS], x, records, numbers, own, wanted)
            barrier(sync, threads)
            if thread == 0:
                return

    return kernel(stage, 2, cached=cached)


def compile_stop(*, cached: bool) -> Any:
    """``stop(sync)``: make every helper return."""

    def stop(sync: int) -> None:
        swap_add(sync + s.STOP, 1)
        advance(sync + s.STARTED, sync + s.START_SLEEPERS)

    return kernel(stop, 1, cached=cached)
