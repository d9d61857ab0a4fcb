"""The inner loops of attention as intrinsics: scores of a tile of 16 positions, online softmax, weighted values.

Keys lie in tiles of 16 positions, element by element (``[head_dim][16]``), so 16 scores grow in one register; values
lie row by row. Several queries share each key or value that is read. Every query's arithmetic is its own and in a
fixed order, whatever the others in the block are.

Elements have 4 bytes (f32), 2 (f16) or 1: then they are q8_0, signed bytes with an f16 scale for every 32 elements of a
key or value, and become f32 as they are read; queries and weights are never rounded.
"""

from __future__ import annotations

from typing import Any

from numba import types

from myelin_worker_cpu.isa_here import ISA
from myelin_worker_cpu.jit import intrinsic, intrinsic_of_constants
from myelin_worker_cpu.vector_ir import F32, I32, I64, V16F32, V16I8, V16I32, Emitter, Value, constant

POSITIONS = 64
"""Positions of one step of the online softmax; steps begin at multiples of it."""


BLOCK = 32
"""Elements of a key or value that share a scale in q8_0."""


def _elements(emitter: Emitter, address: Value, element_bytes: int) -> Value:
    """16 numbers as f32; of q8_0 still without their scale."""
    if element_bytes == 1:
        builder = emitter.builder
        return builder.sitofp(builder.sext(emitter.load(V16I8, address, align=16), V16I32), V16F32)
    if element_bytes == 4:
        return emitter.load(V16F32, address, align=64)
    return emitter.load_half(address, align=32)


@intrinsic_of_constants
def score_tile(
    _context: Any,
    queries: Any,
    element_bytes: Any,
    query: Any,
    query_stride: Any,
    keys: Any,
    scales: Any,
    head_dim: Any,
    scores: Any,
    score_stride: Any,
) -> Any:
    """``scores[q, 0:16] = query[q] · keys`` for ``queries`` (a constant) queries; strides in bytes.

    ``scales`` is the address of ``f16[head_dim / 32][16]``, for q8_0 alone.
    """
    count, size = int(queries.literal_value), int(element_bytes.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        query, query_stride, keys, scales, head_dim, scores, score_stride = arguments[2:]
        totals = [emitter.variable(constant(V16F32, 0.0)) for _ in range(count)]
        rows = [emitter.at(query, emitter.scaled(query_stride, index)) for index in range(count)]

        def add_products(sums: list[Value], element: Value) -> None:
            key = _elements(emitter, emitter.at(keys, emitter.scaled(element, 16 * size)), size)
            for total, row in zip(sums, rows, strict=True):
                number = emitter.splat(emitter.load(F32, emitter.at(row, emitter.scaled(element, 4)), align=4))
                emitter.set(total, emitter.fma(key, number, emitter.get(total)))

        if size == 1:
            parts = [emitter.variable(constant(V16F32, 0.0)) for _ in range(count)]
            with emitter.loop(builder.sdiv(head_dim, constant(I64, BLOCK))) as block:
                for part in parts:
                    emitter.set(part, constant(V16F32, 0.0))
                with emitter.loop(constant(I64, BLOCK)) as within:
                    add_products(parts, builder.add(emitter.scaled(block, BLOCK), within))
                scale = emitter.load_half(emitter.at(scales, emitter.scaled(block, 32)), align=32)
                for total, part in zip(totals, parts, strict=True):
                    emitter.set(total, emitter.fma(emitter.get(part), scale, emitter.get(total)))
        else:
            with emitter.loop(head_dim) as element:
                add_products(totals, element)
        for index, total in enumerate(totals):
            emitter.store(emitter.get(total), emitter.at(scores, emitter.scaled(score_stride, index)), align=4)
        return context.get_dummy_value()

    return types.void(queries, element_bytes, *[types.int64] * 7), generate


@intrinsic
def soften(_context: Any, scores: Any, state: Any) -> Any:
    """One step of the online softmax for one query.

    ``scores`` is the address of 64 scores, replaced by their weights; ``state`` that of three f32: the running
    maximum, the running sum, and (written) the factor by which what was gathered before must be multiplied.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        scores, state = arguments
        parts = [emitter.load(V16F32, emitter.at(scores, 64 * part), align=4) for part in range(POSITIONS // 16)]
        best = emitter.maximum(emitter.maximum(parts[0], parts[1]), emitter.maximum(parts[2], parts[3]))
        before = emitter.load(F32, state, align=4)
        peak = emitter.maximum_scalar(before, emitter.fold(best, emitter.maximum))
        peaks = emitter.splat(peak)
        factor = builder.extract_element(emitter.exp(emitter.splat(builder.fsub(before, peak))), constant(I32, 0))
        weights = [emitter.exp(builder.fsub(part, peaks)) for part in parts]
        for part, weight in enumerate(weights):
            emitter.store(weight, emitter.at(scores, 64 * part), align=4)
        total = builder.fadd(builder.fadd(weights[0], weights[1]), builder.fadd(weights[2], weights[3]))
        gathered = emitter.load(F32, emitter.at(state, 4), align=4)
        summed = builder.fadd(builder.fmul(gathered, factor), emitter.fold(total, builder.fadd))
        emitter.store(peak, state, align=4)
        emitter.store(summed, emitter.at(state, 4), align=4)
        emitter.store(factor, emitter.at(state, 8), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic_of_constants
def gather_values(
    _context: Any,
    queries: Any,
    element_bytes: Any,
    weights: Any,
    weight_stride: Any,
    state: Any,
    state_stride: Any,
    values: Any,
    value_stride: Any,
    scales: Any,
    positions: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """``out[q] = out[q] * factor[q] + weights[q, 0:positions] @ values[0:positions]`` for 16 columns; strides in bytes.

    ``factor`` is the third number of each query's ``state``; ``scales`` the address of ``f16[positions]`` (q8_0 alone).
    """
    count, size = int(queries.literal_value), int(element_bytes.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        weights, weight_stride, state, state_stride = arguments[2:6]
        values, value_stride, scales, positions, out, out_stride = arguments[6:]
        totals = []
        rows = []
        for index in range(count):
            factor_at = emitter.at(emitter.at(state, 8), emitter.scaled(state_stride, index))
            factor = emitter.splat(emitter.load(F32, factor_at, align=4))
            gathered = emitter.load(V16F32, emitter.at(out, emitter.scaled(out_stride, index)), align=4)
            totals.append(emitter.variable(builder.fmul(gathered, factor)))
            rows.append(emitter.at(weights, emitter.scaled(weight_stride, index)))
        with emitter.loop(positions) as position:
            value = _elements(emitter, emitter.at(values, builder.mul(position, value_stride)), size)
            if size == 1:
                scale = emitter.load_half_scalar(emitter.at(scales, emitter.scaled(position, 2)))
                value = builder.fmul(value, emitter.splat(scale))
            for total, row in zip(totals, rows, strict=True):
                number = emitter.splat(emitter.load(F32, emitter.at(row, emitter.scaled(position, 4)), align=4))
                emitter.set(total, emitter.fma(value, number, emitter.get(total)))
        for index, total in enumerate(totals):
            emitter.store(emitter.get(total), emitter.at(out, emitter.scaled(out_stride, index)), align=4)
        return context.get_dummy_value()

    return types.void(queries, element_bytes, *[types.int64] * 10), generate


@intrinsic
def quantise_block(_context: Any, source: Any, target: Any, stride: Any, scale: Any) -> Any:
    """32 f32 at ``source`` to q8_0: bytes ``stride`` apart from ``target`` on, and their f16 at ``scale``.

    As ``quantize_row_q8_0`` in llama.cpp has it: the scale is the largest magnitude / 127, and numbers are divided by
    it before it is rounded to f16.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        source, target, stride, scale = arguments
        halves = [emitter.load(V16F32, emitter.at(source, 64 * part), align=4) for part in range(2)]
        largest = emitter.maximum(*(emitter.absolute(half) for half in halves))
        step = builder.fdiv(emitter.fold(largest, emitter.maximum), constant(F32, 127.0))
        zero = builder.fcmp_ordered("==", step, constant(F32, 0.0))
        inverse = builder.select(zero, constant(F32, 0.0), builder.fdiv(constant(F32, 1.0), step))
        emitter.store_half_scalar(step, scale)
        for part, half in enumerate(halves):
            codes = builder.trunc(emitter.round_to_int(builder.fmul(half, emitter.splat(inverse))), V16I8)
            for lane in range(16):
                place = emitter.at(target, emitter.scaled(stride, 16 * part + lane))
                emitter.store(builder.extract_element(codes, constant(I32, lane)), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
