"""What is done to rows between matrices, as intrinsics over vectors of 16 lanes: norms, residuals, gates, quantising.

Rows are given by address and by their number of vectors; they are padded with zeros to whole vectors. Sums run over two
accumulators of 16 lanes and are folded in a fixed tree, so a row's result depends on that row alone.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from myelin_worker_cpu import records
from myelin_worker_cpu.isa_here import ISA
from myelin_worker_cpu.jit import intrinsic
from myelin_worker_cpu.vector_ir import F32, I32, I64, V16F32, Emitter, Value, constant

SILU = 0
GELU_TANH = 1
_V16I8 = ir.VectorType(ir.IntType(8), 16)


def _vector(emitter: Emitter, address: Value, index: Value) -> Value:
    return emitter.load(V16F32, emitter.at(address, emitter.scaled(index, 64)), align=4)


@intrinsic
def sum_squares(_context: Any, x: Any, vectors: Any) -> Any:
    """The sum of the squares of ``16 * vectors`` numbers, as f32."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        total = emitter.variable(constant(V16F32, 0.0))
        with emitter.loop(arguments[1]) as index:
            value = _vector(emitter, arguments[0], index)
            emitter.set(total, emitter.fma(value, value, emitter.get(total)))
        return emitter.fold(emitter.get(total), builder.fadd)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def scale_by(_context: Any, x: Any, weight: Any, factor: Any, out: Any, vectors: Any) -> Any:
    """``out = x * factor * weight`` (``out`` may be ``x``)."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        source, weights, scalar, target, count = arguments
        factors = emitter.splat(scalar)
        with emitter.loop(count) as index:
            scaled = builder.fmul(_vector(emitter, source, index), factors)
            value = builder.fmul(scaled, _vector(emitter, weights, index))
            emitter.store(value, emitter.at(target, emitter.scaled(index, 64)), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64, types.int64), generate


@intrinsic
def multiply(_context: Any, x: Any, factor: Any, vectors: Any) -> Any:
    """``x *= factor``."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        factors = emitter.splat(arguments[1])
        with emitter.loop(arguments[2]) as index:
            value = builder.fmul(_vector(emitter, arguments[0], index), factors)
            emitter.store(value, emitter.at(arguments[0], emitter.scaled(index, 64)), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), generate


@intrinsic
def add_to(_context: Any, target: Any, addend: Any, vectors: Any) -> Any:
    """``target += addend``."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        with emitter.loop(arguments[2]) as index:
            value = builder.fadd(_vector(emitter, arguments[0], index), _vector(emitter, arguments[1], index))
            emitter.store(value, emitter.at(arguments[0], emitter.scaled(index, 64)), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _sigmoid(emitter: Emitter, value: Value) -> Value:
    one = constant(V16F32, 1.0)
    return emitter.builder.fdiv(one, emitter.builder.fadd(one, emitter.exp(emitter.builder.fneg(value))))


def _gelu_argument(emitter: Emitter, value: Value) -> Value:
    """``2 * sqrt(2/pi) * (x + 0.044715 x**3)``: GELU's tanh form is ``x * sigmoid`` of this."""
    builder = emitter.builder
    cubic = emitter.fma(builder.fmul(value, value), constant(V16F32, 0.04471499845385551), constant(V16F32, 1.0))
    return builder.fmul(builder.fmul(value, constant(V16F32, 1.5957691669464111)), cubic)


@intrinsic
def gate(_context: Any, kind: Any, gates: Any, up: Any, vectors: Any) -> Any:
    """``gates = act(gates) * up`` with ``kind`` SILU or GELU_TANH."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        is_gelu = emitter.splat(builder.icmp_signed("==", arguments[0], constant(I64, GELU_TANH)))
        with emitter.loop(arguments[3]) as index:
            value = _vector(emitter, arguments[1], index)
            inner = builder.select(is_gelu, _gelu_argument(emitter, value), value)
            active = builder.fmul(value, _sigmoid(emitter, inner))
            result = builder.fmul(active, _vector(emitter, arguments[2], index))
            emitter.store(result, emitter.at(arguments[1], emitter.scaled(index, 64)), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def soft_cap(_context: Any, x: Any, cap: Any, vectors: Any) -> Any:
    """``x = cap * tanh(x / cap)``."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        caps = emitter.splat(arguments[1])
        with emitter.loop(arguments[2]) as index:
            value = builder.fdiv(_vector(emitter, arguments[0], index), caps)
            half = _sigmoid(emitter, builder.fmul(value, constant(V16F32, 2.0)))
            tanh = builder.fsub(builder.fmul(half, constant(V16F32, 2.0)), constant(V16F32, 1.0))
            emitter.store(builder.fmul(tanh, caps), emitter.at(arguments[0], emitter.scaled(index, 64)), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), generate


@intrinsic
def largest(_context: Any, x: Any, vectors: Any) -> Any:
    """The largest of ``16 * vectors`` numbers."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        best = emitter.variable(constant(V16F32, float("-inf")))
        with emitter.loop(arguments[1]) as index:
            emitter.set(best, emitter.maximum(emitter.get(best), _vector(emitter, arguments[0], index)))
        return emitter.fold(emitter.get(best), emitter.maximum)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def sum_exponentials(_context: Any, x: Any, peak: Any, vectors: Any) -> Any:
    """The sum of ``exp(x - peak)``, as f32."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        peaks = emitter.splat(arguments[1])
        total = emitter.variable(constant(V16F32, 0.0))
        with emitter.loop(arguments[2]) as index:
            term = emitter.exp(builder.fsub(_vector(emitter, arguments[0], index), peaks))
            emitter.set(total, builder.fadd(emitter.get(total), term))
        return emitter.fold(emitter.get(total), builder.fadd)

    return types.float32(types.int64, types.float32, types.int64), generate


@intrinsic
def quantise_group(_context: Any, x: Any, record: Any) -> Any:
    """Quantise 32 numbers at ``x`` into the record at ``record`` (see :mod:`myelin_worker_cpu.records`)."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        x, record = arguments
        halves = [emitter.load(V16F32, emitter.at(x, 64 * part), align=4) for part in range(2)]
        scaled_sums = []
        for part, half in enumerate(halves):
            peak = emitter.fold(emitter.absolute(half), emitter.maximum)
            scale = builder.fdiv(peak, constant(F32, 127.0))
            zero = builder.fcmp_ordered("==", peak, constant(F32, 0.0))
            inverse = builder.select(zero, constant(F32, 0.0), builder.fdiv(constant(F32, 127.0), peak))
            emitter.store(scale, emitter.at(record, records.SCALES + 4 * part), align=4)
            codes = emitter.round_to_int(builder.fmul(half, emitter.splat(inverse)))
            emitter.store(builder.trunc(codes, _V16I8), emitter.at(record, 16 * part), align=16)
            minus = builder.sub(constant(I32, 0), emitter.fold(codes, builder.add))
            emitter.store(minus, emitter.at(record, records.MINUS_SUMS + 4 * part), align=4)
            scaled_sum = builder.fmul(builder.sitofp(minus, F32), scale)
            emitter.store(scaled_sum, emitter.at(record, records.SCALED_MINUS_SUMS + 4 * part), align=4)
            scaled_sums.append(scaled_sum)
        emitter.store(builder.fadd(*scaled_sums), emitter.at(record, records.SCALED_MINUS_SUM), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def copy_group(_context: Any, x: Any, entry: Any) -> Any:
    """Copy 32 numbers."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder, ISA)
        for part in range(2):
            value = emitter.load(V16F32, emitter.at(arguments[0], 64 * part), align=4)
            emitter.store(value, emitter.at(arguments[1], 64 * part), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


__all__ = [
    "GELU_TANH",
    "SILU",
    "add_to",
    "copy_group",
    "gate",
    "largest",
    "multiply",
    "quantise_group",
    "scale_by",
    "soft_cap",
    "sum_exponentials",
    "sum_squares",
]
