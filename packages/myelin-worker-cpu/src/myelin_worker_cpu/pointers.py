"""Reading and writing memory by address from compiled code, and calling a compiled kernel by its address."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from myelin_worker_cpu.isa_here import ISA
from myelin_worker_cpu.jit import intrinsic
from myelin_worker_cpu.vector_ir import F32, I8, I32, I64, Emitter


@intrinsic
def load_f32(_context: Any, address: Any) -> Any:
    """The f32 at ``address``."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return Emitter(builder, ISA).load(F32, arguments[0], align=4)

    return types.float32(types.int64), generate


@intrinsic
def store_f32(_context: Any, value: Any, address: Any) -> Any:
    """Write an f32."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        Emitter(builder, ISA).store(arguments[0], arguments[1], align=4)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), generate


@intrinsic
def store_half(_context: Any, value: Any, address: Any) -> Any:
    """Write an f32 as f16, to nearest even."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        Emitter(builder, ISA).store_half_scalar(arguments[0], arguments[1])
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), generate


@intrinsic
def load_half(_context: Any, address: Any) -> Any:
    """The f16 at ``address``, as f32."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return Emitter(builder, ISA).load_half_scalar(arguments[0])

    return types.float32(types.int64), generate


@intrinsic
def load_u8(_context: Any, address: Any) -> Any:
    """The unsigned byte at ``address``, as an i64."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.zext(Emitter(builder, ISA).load(I8, arguments[0]), I64)

    return types.int64(types.int64), generate


@intrinsic
def load_u16_as_bfloat(_context: Any, address: Any) -> Any:
    """The bf16 at ``address``, as f32."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = builder.zext(Emitter(builder, ISA).load(ir.IntType(16), arguments[0], align=2), I32)
        return builder.bitcast(builder.shl(bits, ir.Constant(I32, 16)), F32)

    return types.float32(types.int64), generate


_unpack: Any = cgutils.unpack_tuple


def _table(element: Any) -> Any:
    pointer: Any = types.CPointer
    return pointer(element)(types.int64)


@intrinsic
def integers(_context: Any, address: Any) -> Any:
    """The table of int64 at ``address``: ``integers(address)[i]``."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], I64.as_pointer())

    return _table(types.int64), generate


@intrinsic
def short_integers(_context: Any, address: Any) -> Any:
    """The table of int32 at ``address``."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], I32.as_pointer())

    return _table(types.int32), generate


@intrinsic
def floats(_context: Any, address: Any) -> Any:
    """The table of float32 at ``address``."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], F32.as_pointer())

    return _table(types.float32), generate


@intrinsic
def doubles(_context: Any, address: Any) -> Any:
    """The table of float64 at ``address``."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.DoubleType().as_pointer())

    return _table(types.float64), generate


@intrinsic
def call(_context: Any, function: Any, arguments: Any) -> Any:
    """Call the kernel at address ``function`` (see :func:`myelin_worker_cpu.jit.kernel`) with a tuple of integers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = signature.args[1]
        given = [
            context.cast(builder, value, kind, types.int64)
            for kind, value in zip(kinds, _unpack(builder, values[1]), strict=True)
        ]
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(given))
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate
