"""One decoder block for a batch of rows, as every compute thread runs it.

In the tail's last layer only the rows whose logits are wanted matter beyond their keys and values: they are moved
together (*narrowed*) before attention, and the rest of the layer is computed for them alone.
"""

from __future__ import annotations

from typing import Any

from myelin_worker_cpu import tables as t
from myelin_worker_cpu.division import barrier, block_width, multiply_share, share
from myelin_worker_cpu.jit import inlined, kernel
from myelin_worker_cpu.matrix_input import add_projected, arrange, normalise
from myelin_worker_cpu.pointers import call, floats, integers, load_f32, store_f32
from myelin_worker_cpu.row_ops import gate


@inlined
def _project(
    thread: int,
    tables: Any,
    entry: Any,
    matrices: int,
    x: int,
    records: int,
    numbers: int,
    first: int,
    end: int,
    own: int,
) -> None:
    """Norm, and the products that make queries, keys and values of all rows."""
    shape, buffers, step = integers(tables[t.SHAPE]), integers(tables[t.BUFFERS]), integers(tables[t.STEP])
    sync, threads = tables[t.SYNC], tables[t.THREADS]
    epsilon = floats(tables[t.CONSTANTS])[t.NORM_EPSILON]
    rows, columns, stride = step[t.ROWS], shape[t.WIDTH], shape[t.WIDTH_STRIDE]
    row_buffer = buffers[t.PRIVATE] + thread * shape[t.PRIVATE_BYTES] + shape[t.PRIVATE_ROW]
    for row in range(first, end):
        normalise(x + row * stride, entry[t.ATTENTION_NORM], columns, epsilon, row_buffer)
        arrange(row_buffer, columns, row, block_width(rows), entry[t.NEEDS_QKV], records, numbers)
    # where rows were divided, nobody may go on before all are prepared
    barrier(sync, 1 if own else threads)
    for which in range(3):
        multiply_share(
            integers(matrices + which * t.MATRIX_SIZE * 8),
            records,
            numbers,
            rows,
            buffers[t.QUERIES + which],
            shape[t.QUERY_STRIDE + which],
            thread,
            threads,
        )
    barrier(sync, threads)


@inlined
def _remember(
    thread: int, context: int, tables: Any, layer_at: int, cache_offset: int, rope: int, first: int, end: int, own: int
) -> None:
    """Put the keys and values of rows ``first…end`` into their sequences' slots."""
    shape, buffers, step = integers(tables[t.SHAPE]), integers(tables[t.BUFFERS]), integers(tables[t.STEP])
    positions = integers(tables[t.POSITIONS])
    scratch = buffers[t.PRIVATE] + thread * shape[t.PRIVATE_BYTES] + shape[t.PRIVATE_ATTENTION]
    for index in range(step[t.SEGMENTS]):
        segment = integers(tables[t.SEGMENT_TABLE] + index * t.SEGMENT_SIZE * 8)
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
    barrier(tables[t.SYNC], 1 if own else tables[t.THREADS])


@inlined
def _move(source: int, target: int, size: int) -> None:
    """Copy ``size`` bytes of float32."""
    for offset in range(0, size, 4):
        store_f32(load_f32(source + offset), target + offset)


@inlined
def _narrow(thread: int, tables: Any, x: int, rope: int) -> None:
    """Move what the rest of the last layer needs of the output rows to the front, in order."""
    shape, buffers, step = integers(tables[t.SHAPE]), integers(tables[t.BUFFERS]), integers(tables[t.STEP])
    rows = integers(tables[t.OUTPUT_ROWS])
    if thread == 0:
        for index in range(step[t.OUTPUTS]):
            row = rows[index]
            if row == index:
                continue
            _move(x + row * shape[t.WIDTH_STRIDE], x + index * shape[t.WIDTH_STRIDE], shape[t.WIDTH_STRIDE])
            queries, stride = buffers[t.QUERIES], shape[t.QUERY_STRIDE]
            _move(queries + row * stride, queries + index * stride, stride)
            stride = shape[t.ROPE_ROW_BYTES]
            _move(rope + row * stride, rope + index * stride, stride)
    barrier(tables[t.SYNC], tables[t.THREADS])


@inlined
def _attend(
    thread: int, context: int, tables: Any, layer_at: int, cache_offset: int, rope: int, segments: int, count: int
) -> None:
    """Attention of the ``count`` segments at address ``segments``, in blocks of queries that threads take in turns."""
    shape, buffers = integers(tables[t.SHAPE]), integers(tables[t.BUFFERS])
    threads = tables[t.THREADS]
    scratch = buffers[t.PRIVATE] + thread * shape[t.PRIVATE_BYTES] + shape[t.PRIVATE_ATTENTION]
    group = shape[t.HEADS] // shape[t.KV_HEADS]
    task = 0
    for index in range(count):
        segment_at = segments + index * t.SEGMENT_SIZE * 8
        segment = integers(segment_at)
        queries = segment[t.COUNT] * group
        block = min(t.QUERY_BLOCK, queries)
        if threads > 1 and segment[t.COUNT] == 1 and count < threads:
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
    barrier(tables[t.SYNC], threads)


@inlined
def _finish(
    thread: int,
    tables: Any,
    entry: Any,
    matrices: int,
    x: int,
    records: int,
    numbers: int,
    rows: int,
    first: int,
    end: int,
    own: int,
) -> None:
    """From attention's output to the layer's: its projection, the residual stream, the feed-forward part."""
    shape, buffers = integers(tables[t.SHAPE]), integers(tables[t.BUFFERS])
    sync, threads = tables[t.SYNC], tables[t.THREADS]
    epsilon = floats(tables[t.CONSTANTS])[t.NORM_EPSILON]
    columns, stride = shape[t.WIDTH], shape[t.WIDTH_STRIDE]
    width = block_width(rows)
    row_buffer = buffers[t.PRIVATE] + thread * shape[t.PRIVATE_BYTES] + shape[t.PRIVATE_ROW]
    projected = buffers[t.PROJECTED]
    sharers = 1 if own else threads

    for row in range(first, end):
        source = buffers[t.ATTENTION] + row * shape[t.ATTENDED_STRIDE]
        arrange(source, shape[t.ATTENDED], row, width, entry[t.NEEDS_OUT], records, numbers)
    barrier(sync, sharers)
    out_matrix = integers(matrices + t.ATTENTION_OUT * t.MATRIX_SIZE * 8)
    multiply_share(out_matrix, records, numbers, rows, projected, stride, thread, threads)
    barrier(sync, threads)

    for row in range(first, end):
        add_projected(
            x + row * stride, projected + row * stride, entry[t.POST_ATTENTION_NORM], columns, epsilon, row_buffer
        )
        normalise(x + row * stride, entry[t.FFN_NORM], columns, epsilon, row_buffer)
        arrange(row_buffer, columns, row, width, entry[t.NEEDS_FFN], records, numbers)
    barrier(sync, sharers)
    gates, ups, ffn_stride = buffers[t.GATES], buffers[t.UPS], shape[t.FFN_STRIDE]
    for which in range(2):
        matrix = integers(matrices + (t.FFN_GATE + which) * t.MATRIX_SIZE * 8)
        multiply_share(matrix, records, numbers, rows, buffers[t.GATES + which], ffn_stride, thread, threads)
    first_tile, end_tile = share(integers(matrices + t.FFN_GATE * t.MATRIX_SIZE * 8)[t.TILES], thread, threads)
    for row in range(rows):
        offset = row * ffn_stride + first_tile * 64
        gate(shape[t.GATE_KIND], gates + offset, ups + offset, end_tile - first_tile)
    barrier(sync, threads)

    for row in range(first, end):
        source = gates + row * ffn_stride
        arrange(source, shape[t.FFN_WIDTH], row, width, entry[t.NEEDS_DOWN], records, numbers)
    barrier(sync, sharers)
    down_matrix = integers(matrices + t.FFN_DOWN * t.MATRIX_SIZE * 8)
    multiply_share(down_matrix, records, numbers, rows, projected, stride, thread, threads)
    barrier(sync, threads)
    for row in range(first, end):
        add_projected(x + row * stride, projected + row * stride, entry[t.POST_FFN_NORM], columns, epsilon, row_buffer)


def compile_layer(*, cached: bool) -> Any:
    """``layer(thread, context, number, x, records, numbers, first, end, own, narrow)``: one decoder block.

    ``x`` is the residual stream, ``records`` and ``numbers`` are room for the inputs of matrices; rows ``first…end``
    are this thread's to prepare. ``own`` is 1 where all three are this thread's alone (a single row), else 0. With
    ``narrow`` only the output rows come out, one after the other, as the first rows of ``x``.
    """

    def layer(
        thread: int,
        context: int,
        number: int,
        x: int,
        records: int,
        numbers: int,
        first: int,
        end: int,
        own: int,
        narrow: int,
    ) -> None:
        tables = integers(context)
        shape, buffers, step = integers(tables[t.SHAPE]), integers(tables[t.BUFFERS]), integers(tables[t.STEP])
        layer_at = tables[t.LAYER_TABLE] + number * t.LAYER_SIZE * 8
        entry = integers(layer_at)
        matrices = tables[t.MATRIX_TABLE] + number * t.LAYER_MATRICES * t.MATRIX_SIZE * 8
        rope = buffers[t.ROPE] + entry[t.ROPE_KIND] * shape[t.ROPE_KIND_BYTES]
        cache_offset = number * shape[t.KV_LAYER_BYTES]

        _project(thread, tables, entry, matrices, x, records, numbers, first, end, own)
        _remember(thread, context, tables, layer_at, cache_offset, rope, first, end, own)
        rows, segments, count = step[t.ROWS], tables[t.SEGMENT_TABLE], step[t.SEGMENTS]
        if narrow:
            rows = count = step[t.OUTPUTS]
            if rows == 0:
                return
            _narrow(thread, tables, x, rope)
            segments = tables[t.OUTPUT_SEGMENTS]
            first, end = share(rows, thread, tables[t.THREADS])
        _attend(thread, context, tables, layer_at, cache_offset, rope, segments, count)
        _finish(thread, tables, entry, matrices, x, records, numbers, rows, first, end, own)

    return kernel(layer, 10, cached=cached)
