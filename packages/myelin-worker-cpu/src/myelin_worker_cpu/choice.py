"""The output head: final norm, logits, and the greedy choice with its log-probability.

Logits are looked at while they are still in the processor's caches: whoever has computed a *chunk* of 1,024 of them
notes its largest and the sum of its exponentials. The chunks are the same whatever the number of threads, and are put
together in order, so that the result is too.
"""

from __future__ import annotations

import math
from typing import Any

from myelin_worker_cpu import tables as t
from myelin_worker_cpu.division import barrier, block_width, multiply, share
from myelin_worker_cpu.jit import inlined
from myelin_worker_cpu.matrix_input import arrange, normalise
from myelin_worker_cpu.pointers import doubles, floats, integers, load_f32, store_f32
from myelin_worker_cpu.row_ops import largest, soft_cap, sum_exponentials

CHUNK_TILES = 64
"""Tiles of the output head, 16 logits each, in a chunk."""
NOTE_BYTES = 8
"""What is noted of a chunk: its largest logit, and the sum of ``exp(logit - largest)``, both f32."""


@inlined
def output_head(
    thread: int,
    tables: Any,
    shape: Any,
    buffers: Any,
    count: int,
    x: int,
    records: int,
    numbers: int,
    own: int,
    rows: Any,
) -> None:
    """Logits and choices of the ``count`` rows of ``x`` whose numbers are in ``rows``, at most 16."""
    sync, threads = tables[t.SYNC], tables[t.THREADS]
    constants = floats(tables[t.CONSTANTS])
    chosen, logprobs = integers(tables[t.CHOSEN]), doubles(tables[t.LOGPROBS])
    columns, stride = shape[t.WIDTH], shape[t.WIDTH_STRIDE]
    row_buffer = buffers[t.PRIVATE] + thread * shape[t.PRIVATE_BYTES] + shape[t.PRIVATE_ROW]
    sharers = 1 if own else threads
    barrier(sync, sharers)
    for index in range(count):
        if own or index % threads == thread:
            source = x + rows[index] * stride
            normalise(source, shape[t.OUTPUT_NORM], columns, constants[t.NORM_EPSILON], row_buffer)
            arrange(row_buffer, columns, index, block_width(count), shape[t.OUTPUT_NEEDS], records, numbers)
    barrier(sync, sharers)
    matrix = integers(tables[t.MATRIX_TABLE] + shape[t.OUTPUT_HEAD] * t.MATRIX_SIZE * 8)
    logits, logit_stride = buffers[t.LOGITS], shape[t.LOGIT_STRIDE]
    notes, chunks = buffers[t.CHUNK_NOTES], shape[t.CHUNKS]
    first, end = share(chunks, thread, threads)
    for chunk in range(first, end):
        first_tile = chunk * CHUNK_TILES
        end_tile = min(first_tile + CHUNK_TILES, matrix[t.TILES])
        multiply(matrix, records, numbers, count, logits, logit_stride, first_tile, end_tile)
        for index in range(count):
            _note(
                logits + index * logit_stride,
                first_tile,
                end_tile,
                shape[t.VOCABULARY],
                constants[t.SOFT_CAP],
                notes + (index * chunks + chunk) * NOTE_BYTES,
            )
    barrier(sync, threads)
    for index in range(count):
        if index % threads == thread:
            best, logprob = _choose(logits + index * logit_stride, notes + index * chunks * NOTE_BYTES, chunks)
            chosen[index] = best
            logprobs[index] = logprob


@inlined
def _note(logits: int, first_tile: int, end_tile: int, vocabulary: int, cap: float, note: int) -> None:
    """Cap a chunk's logits, cut off what pads them, and note what :func:`_choose` must know."""
    start = logits + first_tile * 64
    if cap > 0.0:
        soft_cap(start, cap, end_tile - first_tile)
    for column in range(vocabulary, end_tile * 16):
        store_f32(-math.inf, logits + column * 4)
    peak = largest(start, end_tile - first_tile)
    store_f32(peak, note)
    store_f32(sum_exponentials(start, peak, end_tile - first_tile), note + 4)


@inlined
def _choose(logits: int, notes: int, chunks: int) -> tuple[int, float]:
    """The greedy choice (ties to the lowest id) and its log-probability."""
    winner = 0
    for chunk in range(1, chunks):
        if load_f32(notes + chunk * NOTE_BYTES) > load_f32(notes + winner * NOTE_BYTES):
            winner = chunk
    peak = load_f32(notes + winner * NOTE_BYTES)
    total = 0.0
    for chunk in range(chunks):
        note = notes + chunk * NOTE_BYTES
        total += load_f32(note + 4) * math.exp(load_f32(note) - peak)
    best = winner * CHUNK_TILES * 16
    end = best + CHUNK_TILES * 16 - 1
    while load_f32(logits + best * 4) != peak and best < end:
        best += 1
    return best, -math.log(total)
