"""The inner loops of attention as intrinsics: scores of a tile of 16 positions, online softmax, weighted values.

Keys lie in tiles of 16 positions, element by element (``[head_dim][16]``), so 16 scores grow in one register; values
lie row by row. Several queries share each key or value that is read. Every query's arithmetic is its own and in a
fixed order, whatever the others in the block are.
"""

from __future__ import annotations

from typing import Any

from numba import types

from myelin_worker_cpu.isa_here import ISA
from myelin_worker_cpu.jit import intrinsic, intrinsic_of_constants
from myelin_worker_cpu.vector_ir import F32, I32, V16F32, Emitter, Value, constant

POSITIONS = 64
"""Positions of one step of the online softmax; steps begin at multiples of it."""


def _keys(emitter: Emitter, address: Value, element_bytes: int) -> Value:
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
    head_dim: Any,
    scores: Any,
    score_stride: Any,
) -> Any:
    """``scores[q, 0:16] = query[q] · keys`` for ``queries`` (a constant) queries; strides in bytes."""
    count, size = int(queries.literal_value), int(element_bytes.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        query, query_stride, keys, head_dim, scores, score_stride = arguments[2:]
        totals = [emitter.variable(constant(V16F32, 0.0)) for _ in range(count)]
        rows = [emitter.at(query, emitter.scaled(query_stride, index)) for index in range(count)]
        with emitter.loop(head_dim) as element:
            key = _keys(emitter, emitter.at(keys, emitter.scaled(element, 16 * size)), size)
            for total, row in zip(totals, rows, strict=True):
                number = emitter.splat(emitter.load(F32, emitter.at(row, emitter.scaled(element, 4)), align=4))
                emitter.set(total, emitter.fma(key, number, emitter.get(total)))
        for index, total in enumerate(totals):
            emitter.store(emitter.get(total), emitter.at(scores, emitter.scaled(score_stride, index)), align=4)
        return context.get_dummy_value()

    return types.void(queries, element_bytes, *[types.int64] * 6), generate


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
    positions: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """``out[q] = out[q] * factor[q] + weights[q, 0:positions] @ values[0:positions]`` for 16 columns; strides in bytes.

    ``factor`` is the third number of each query's ``state``.
    """
    count, size = int(queries.literal_value), int(element_bytes.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        weights, weight_stride, state, state_stride, values, value_stride, positions, out, out_stride = arguments[2:]
        totals = []
        rows = []
        for index in range(count):
            factor_at = emitter.at(emitter.at(state, 8), emitter.scaled(state_stride, index))
            factor = emitter.splat(emitter.load(F32, factor_at, align=4))
            gathered = emitter.load(V16F32, emitter.at(out, emitter.scaled(out_stride, index)), align=4)
            totals.append(emitter.variable(builder.fmul(gathered, factor)))
            rows.append(emitter.at(weights, emitter.scaled(weight_stride, index)))
        with emitter.loop(positions) as position:
            value = _keys(emitter, emitter.at(values, builder.mul(position, value_stride)), size)
            for total, row in zip(totals, rows, strict=True):
                number = emitter.splat(emitter.load(F32, emitter.at(row, emitter.scaled(position, 4)), align=4))
                emitter.set(total, emitter.fma(value, number, emitter.get(total)))
        for index, total in enumerate(totals):
            emitter.store(emitter.get(total), emitter.at(out, emitter.scaled(out_stride, index)), align=4)
        return context.get_dummy_value()

    return types.void(queries, element_bytes, *[types.int64] * 9), generate
