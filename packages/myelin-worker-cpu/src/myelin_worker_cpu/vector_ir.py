"""Words for writing LLVM IR on vectors of 16 lanes, the same for every instruction set but for a few operations.

An :class:`Emitter` wraps the builder that numba hands to an intrinsic. Addresses are 64-bit integers. Every function
that emits arithmetic fixes its order of operations, so a result depends on the values alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from myelin_worker_cpu.isa import Isa, converts_half, fuses_multiply_add, multiplies_signed_bytes

LANES = 16

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F16 = ir.HalfType()
F32 = ir.FloatType()
V16I8 = ir.VectorType(I8, 16)
V64I8 = ir.VectorType(I8, 64)
V16I16 = ir.VectorType(I16, 16)
V16I32 = ir.VectorType(I32, 16)
V16F16 = ir.VectorType(F16, 16)
V16F32 = ir.VectorType(F32, 16)

Value = Any  # llvmlite has no types of its own to speak of
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves a float32's integer part, rounded to nearest even, in the low bits
_ROUND_BITS = 0x4B400000


def constant(kind: ir.Type, value: object) -> Value:
    """A constant; for a vector type the value in every lane."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
    return ir.Constant(kind, value)


class Emitter:
    """Emits operations through ``builder`` for ``isa``."""

    def __init__(self, builder: Any, isa: Isa) -> None:
        self.builder = builder
        self.isa = isa
        self._fused = fuses_multiply_add(isa)
        self._half = converts_half(isa)
        self.signed_bytes = multiplies_signed_bytes(isa)

    # --- control -----------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        """``for i in range(count)`` with a 64-bit ``i``."""
        index = self.local(I64)
        self.builder.store(constant(I64, 0), index)
        head = self.builder.append_basic_block("loop.head")
        body = self.builder.append_basic_block("loop.body")
        end = self.builder.append_basic_block("loop.end")
        self.builder.branch(head)
        self.builder.position_at_end(head)
        current = self.builder.load(index)
        self.builder.cbranch(self.builder.icmp_signed("<", current, count), body, end)
        self.builder.position_at_end(body)
        yield current
        self.builder.store(self.builder.add(current, constant(I64, 1)), index)
        self.builder.branch(head)
        self.builder.position_at_end(end)

    def local(self, kind: ir.Type) -> Value:
        """A local variable (it becomes a register)."""
        with self.builder.goto_entry_block():
            return self.builder.alloca(kind)

    def room(self, size: int) -> Value:
        """The address of ``size`` bytes of the function's own, aligned to 64."""
        place = self.local(ir.VectorType(I8, size))
        place.align = 64
        return self.builder.ptrtoint(place, I64)

    def variable(self, value: Value) -> Value:
        """A local variable that begins as ``value``."""
        place = self.local(value.type)
        self.builder.store(value, place)
        return place

    def get(self, place: Value) -> Value:
        """The variable's value."""
        return self.builder.load(place)

    def set(self, place: Value, value: Value) -> None:
        """Change the variable."""
        self.builder.store(value, place)

    # --- memory ------------------------------------------------------------------------------------------------------

    def at(self, address: Value, offset: Value | int = 0) -> Value:
        """``address + offset`` in bytes."""
        if isinstance(offset, int):
            if offset == 0:
                return address
            offset = constant(I64, offset)
        return self.builder.add(address, offset)

    def scaled(self, index: Value, size: int) -> Value:
        """``index * size``."""
        return self.builder.mul(index, constant(I64, size))

    def load(self, kind: ir.Type, address: Value, align: int = 1) -> Value:
        """Read a value of ``kind``."""
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        """Write a value."""
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=align)

    # --- vectors -----------------------------------------------------------------------------------------------------

    def splat(self, scalar: Value, lanes: int = LANES) -> Value:
        """The scalar in every lane."""
        kind = ir.VectorType(scalar.type, lanes)
        single = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, lanes), None)
        return self.builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), zeros)

    def shuffle(self, left: Value, right: Value, lanes: list[int]) -> Value:
        """Pick lanes of two vectors put one after the other."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, lane) for lane in lanes])
        return self.builder.shuffle_vector(left, right, mask)

    def call(self, name: str, result: ir.Type, *arguments: Value) -> Value:
        """Call an LLVM intrinsic by its full name."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = self.builder.module.globals.get(name)
        if function is None:
            function = ir.Function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)

    def fma(self, left: Value, right: Value, addend: Value) -> Value:
        """``left * right + addend``, fused where that is one instruction."""
        if self._fused:
            return self.call("llvm.fma.v16f32", V16F32, left, right, addend)
        return self.builder.fadd(self.builder.fmul(left, right), addend)

    def maximum(self, left: Value, right: Value) -> Value:
        """The larger, lane by lane (no NaN care)."""
        return self.builder.select(self.builder.fcmp_ordered(">", left, right), left, right)

    def maximum_scalar(self, left: Value, right: Value) -> Value:
        """The larger of two numbers."""
        return self.builder.select(self.builder.fcmp_ordered(">", left, right), left, right)

    def absolute(self, vector: Value) -> Value:
        """Without the signs."""
        return self.call("llvm.fabs.v16f32", V16F32, vector)

    def fold(self, vector: Value, combine: Any) -> Value:
        """Combine the 16 lanes pairwise, in a fixed tree, to a scalar."""
        # halves of shrinking vectors: LLVM 22 gets a shuffle of the whole vector wrong beside a truncation of it
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            lower = self.shuffle(vector, vector, list(range(lanes)))
            upper = self.shuffle(vector, vector, list(range(lanes, 2 * lanes)))
            vector = combine(lower, upper)
        return self.builder.extract_element(vector, constant(I32, 0))

    # --- 16-bit floats -----------------------------------------------------------------------------------------------

    def load_half(self, address: Value, align: int = 2) -> Value:
        """16 f16 numbers as f32."""
        if self._half:
            return self.builder.fpext(self.load(V16F16, address, align), V16F32)
        bits = self.builder.zext(self.load(V16I16, address, align), V16I32)
        return _half_bits_to_float(self.builder, bits, V16I32, V16F32)

    def load_bfloat(self, address: Value, align: int = 2) -> Value:
        """16 bf16 numbers as f32."""
        bits = self.builder.zext(self.load(V16I16, address, align), V16I32)
        return self.builder.bitcast(self.builder.shl(bits, constant(V16I32, 16)), V16F32)

    def load_half_scalar(self, address: Value) -> Value:
        """One f16 number as f32."""
        if self._half:
            return self.builder.fpext(self.load(F16, address, 2), F32)
        bits = self.builder.zext(self.load(I16, address, 2), I32)
        return _half_bits_to_float(self.builder, bits, I32, F32)

    def store_half_scalar(self, value: Value, address: Value) -> None:
        """Write an f32 as f16, rounded to nearest even."""
        if self._half:
            self.store(self.builder.fptrunc(value, F16), address, 2)
        else:
            self.store(self.builder.trunc(_float_to_half_bits(self.builder, value), I16), address, 2)

    # --- integers ----------------------------------------------------------------------------------------------------

    def dot4(self, total: Value, codes: Value, four: Value, wide: bool) -> Value:
        """Add to each of 16 sums the products of its four codes with four signed bytes.

        Args:
            total: ``<16 x i32>``.
            codes: ``<64 x i8>``, unsigned; those that are ``wide`` signed where :attr:`signed_bytes` is set.
            four: ``i32``: the four bytes that every lane takes.
            wide: Codes need all eight bits.
        """
        builder = self.builder
        other = self.splat(four)
        if self.isa is Isa.AVX512VNNI:
            words = builder.bitcast(codes, V16I32)
            return self.call("llvm.x86.avx512.vpdpbusd.512", V16I32, total, words, other)
        if self.isa is Isa.AVXVNNI:
            words = builder.bitcast(codes, V16I32)
            v8i32 = ir.VectorType(I32, 8)
            sums = []
            for first in (0, 8):
                lanes = list(range(first, first + 8))
                parts = [self.shuffle(vector, vector, lanes) for vector in (total, words, other)]
                sums.append(self.call("llvm.x86.avx512.vpdpbusd.256", v8i32, *parts))
            return self.shuffle(sums[0], sums[1], list(range(16)))
        signed = builder.bitcast(other, V64I8)
        if self.isa is Isa.NEON:
            v4i32 = ir.VectorType(I32, 4)
            quarters = []
            for part in range(4):
                bytes_ = [self.shuffle(v, v, list(range(16 * part, 16 * part + 16))) for v in (codes, signed)]
                sums4 = self.shuffle(total, total, list(range(4 * part, 4 * part + 4)))
                quarters.append(self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", v4i32, sums4, *bytes_))
            lower, upper = (self.shuffle(quarters[at], quarters[at + 1], list(range(8))) for at in (0, 2))
            return self.shuffle(lower, upper, list(range(16)))
        if self.isa is Isa.AVX2 and not wide:
            v32i8, v16i16, v8i32 = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8)
            halves = []
            for first in (0, 32):
                lanes = list(range(first, first + 32))
                pairs = self.call(
                    "llvm.x86.avx2.pmadd.ub.sw",
                    v16i16,
                    self.shuffle(codes, codes, lanes),
                    self.shuffle(signed, signed, lanes),
                )
                assert pairs.type == v16i16
                assert v32i8.count == 2 * v16i16.count
                halves.append(self.call("llvm.x86.avx2.pmadd.wd", v8i32, pairs, constant(v16i16, 1)))
            return builder.add(total, self.shuffle(halves[0], halves[1], list(range(16))))
        v64i16, v32i32 = ir.VectorType(I16, 64), ir.VectorType(I32, 32)
        # 255 * 128 still fits an i16
        products = builder.mul(builder.zext(codes, v64i16), builder.sext(signed, v64i16))
        even = builder.sext(self.shuffle(products, products, list(range(0, 64, 2))), v32i32)
        odd = builder.sext(self.shuffle(products, products, list(range(1, 64, 2))), v32i32)
        pairs32 = builder.add(even, odd)
        fours = builder.add(
            self.shuffle(pairs32, pairs32, list(range(0, 32, 2))), self.shuffle(pairs32, pairs32, list(range(1, 32, 2)))
        )
        return builder.add(total, fours)

    def round_to_int(self, vector: Value) -> Value:
        """``<16 x float>`` of magnitudes below 2**22 to ``<16 x i32>``, to nearest, ties to even."""
        shifted = self.builder.fadd(vector, constant(V16F32, _ROUND))
        return self.builder.sub(self.builder.bitcast(shifted, V16I32), constant(V16I32, _ROUND_BITS))

    # --- functions ---------------------------------------------------------------------------------------------------

    def exp(self, vector: Value) -> Value:
        """``e**x`` within 2 units in the last place; exactly 0 below -87.3 (``-inf`` too), saturated above 88.3.

        Cody-Waite reduction by ln 2 and a degree-5 minimax polynomial (Cephes, ``expf``).
        """
        builder = self.builder
        tiny = builder.fcmp_ordered("<", vector, constant(V16F32, -87.3))
        x = builder.select(tiny, constant(V16F32, 0.0), vector)
        x = builder.select(builder.fcmp_ordered(">", x, constant(V16F32, 88.3)), constant(V16F32, 88.3), x)
        shifted = self.fma(x, constant(V16F32, _f32(1.44269504088896341)), constant(V16F32, _ROUND))
        power = builder.sub(builder.bitcast(shifted, V16I32), constant(V16I32, _ROUND_BITS))
        whole = builder.fsub(shifted, constant(V16F32, _ROUND))
        rest = self.fma(whole, constant(V16F32, -0.693359375), x)
        rest = self.fma(whole, constant(V16F32, _f32(2.12194440e-4)), rest)
        total = constant(V16F32, _f32(1.9875691500e-4))
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            total = self.fma(total, rest, constant(V16F32, _f32(coefficient)))
        total = self.fma(total, builder.fmul(rest, rest), builder.fadd(rest, constant(V16F32, 1.0)))
        bits = builder.shl(builder.add(power, constant(V16I32, 127)), constant(V16I32, 23))
        # ln2 * 127.4 < 88.3 keeps the power within 127
        scaled = builder.fmul(total, builder.bitcast(bits, V16F32))
        return builder.select(tiny, constant(V16F32, 0.0), scaled)


def _f32(value: float) -> float:
    """The nearest float32, which LLVM's textual form demands of a float constant."""
    import struct

    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _half_bits_to_float(builder: Any, bits: Value, integer: ir.Type, floating: ir.Type) -> Value:
    """f16 bits in 32-bit lanes to f32: shift the fields into place, then scale by 2**112; subnormals come out right."""
    magnitude = builder.shl(builder.and_(bits, constant(integer, 0x7FFF)), constant(integer, 13))
    scaled = builder.fmul(builder.bitcast(magnitude, floating), constant(floating, 2.0**112))
    sign = builder.shl(builder.and_(bits, constant(integer, 0x8000)), constant(integer, 16))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, integer), sign), floating)


def _float_to_half_bits(builder: Any, value: Value) -> Value:
    """An f32 to the bits of the nearest f16 (ties to even), overflow to infinity."""
    bits = builder.bitcast(value, I32)
    sign = builder.and_(builder.lshr(bits, constant(I32, 16)), constant(I32, 0x8000))
    magnitude = builder.and_(bits, constant(I32, 0x7FFFFFFF))
    # normal numbers: rebias the exponent, add half a unit (less one where the result would be odd), drop 13 bits
    odd = builder.and_(builder.lshr(magnitude, constant(I32, 13)), constant(I32, 1))
    rebiased = builder.add(builder.sub(magnitude, constant(I32, 112 << 23)), constant(I32, 0xFFF))
    normal = builder.lshr(builder.add(rebiased, odd), constant(I32, 13))
    # subnormal ones: adding 0.5 aligns the last place of the sum with the last place of an f16 subnormal
    aligned = builder.fadd(builder.bitcast(magnitude, F32), constant(F32, 0.5))
    small = builder.sub(builder.bitcast(aligned, I32), constant(I32, 0x3F000000))
    half = builder.select(builder.icmp_unsigned("<", magnitude, constant(I32, 113 << 23)), small, normal)
    large = builder.icmp_unsigned(">=", magnitude, constant(I32, 0x477FF000))
    infinite = builder.icmp_unsigned("<=", magnitude, constant(I32, 0x7F800000))
    beyond = builder.select(infinite, constant(I32, 0x7C00), constant(I32, 0x7E00))
    return builder.or_(builder.select(large, beyond, half), sign)
