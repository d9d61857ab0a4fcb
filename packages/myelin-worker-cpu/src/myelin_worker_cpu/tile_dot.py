"""The one kernel that matters: a tile of 16 rows times a block of activations, for every format.

The matrix-vector product (a block of one) and the matrix-matrix product (blocks of 4, 8 and 16) come from the same
emitter with the same order of operations for each row and activation, so a token's result is the same, bit for bit,
alone or in a batch. Dot products of a part of a group, 16 columns, are exact integers; all else is added in float32,
first to last.

For quantised formats, what a part adds to row ``r`` and activation ``t`` is ``d * (scale * dot - minimum * sum)``,
where ``dot`` is the integer product less ``offset * sum``; see :mod:`myelin_worker_cpu.records` for ``d`` and
``sum``. Where both parts of a group have the same scale and minimum these are multiplied once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from myelin_worker_cpu import records
from myelin_worker_cpu.formats import (
    FLOAT_HEADER_BYTES,
    FORMATS,
    GROUP_COLUMNS,
    HEADER_SLABS,
    PACKED_VECTORS,
    SLAB_GROUPS,
    TILE_ROWS,
    Plane,
    Scales,
    TileFormat,
)
from myelin_worker_cpu.isa import register_rows
from myelin_worker_cpu.isa_here import ISA
from myelin_worker_cpu.jit import intrinsic_of_constants
from myelin_worker_cpu.vector_ir import (
    F32,
    I32,
    I64,
    V16F32,
    V16I8,
    V16I32,
    V64I8,
    Emitter,
    Value,
    constant,
)

VECTORS = GROUP_COLUMNS // 4
"""Vectors of 64 codes in a group."""


@intrinsic_of_constants
def tile_dot(
    _context: Any, ggml_type: Any, width: Any, weights: Any, x: Any, out: Any, out_stride: Any, slabs: Any
) -> Any:
    """``out[t, 0:16] = tile @ x[t]`` for the ``width`` rows of a block.

    ``ggml_type`` and ``width`` are constants; ``weights``, ``x``, ``out`` addresses (weights and out 64-byte aligned);
    ``out_stride`` the bytes from one ``t`` to the next; ``slabs`` how many the tile has.
    """
    tile_format = FORMATS[ggml_type.literal_value]
    block = int(width.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit_tile(Emitter(builder, ISA), tile_format, block, *arguments[2:])
        return context.get_dummy_value()

    return types.void(ggml_type, width, *[types.int64] * 5), generate


def emit_tile(
    emitter: Emitter,
    tile_format: TileFormat,
    width: int,
    weights: Value,
    x: Value,
    out: Value,
    out_stride: Value,
    slabs: Value,
) -> None:
    """Emit the product of one tile with one block, as many rows of it at a time as registers allow."""
    fitting = register_rows(emitter.isa)
    at_once = fitting // 2 if tile_format.is_float else fitting
    for first in range(0, width, at_once):
        tokens = range(first, min(first + at_once, width))
        if tile_format.is_float:
            totals = _emit_float_tokens(emitter, tile_format, width, tokens, weights, x, slabs)
        else:
            totals = _emit_quantised_tokens(emitter, tile_format, width, tokens, weights, x, slabs)
        for token, total in zip(tokens, totals, strict=True):
            emitter.store(total, emitter.at(out, emitter.scaled(out_stride, token)), align=64)


def _emit_quantised_tokens(
    emitter: Emitter, tile_format: TileFormat, width: int, tokens: range, weights: Value, x: Value, slabs: Value
) -> list[Value]:
    totals = [emitter.variable(constant(V16F32, 0.0)) for _ in tokens]
    group_bytes = width * records.RECORD_BYTES

    def slab(address: Value, index: Value, scales: Value, header: Sequence[Value]) -> None:
        with emitter.loop(constant(I64, SLAB_GROUPS)) as half:
            group = emitter.builder.add(emitter.scaled(index, SLAB_GROUPS), half)
            record = emitter.at(x, emitter.scaled(group, group_bytes))
            _emit_group(emitter, tile_format, tokens, totals, address, scales, half, header, record)

    if tile_format.header_bytes:
        packed = tile_format.scales is Scales.SUPER_MIN
        room = emitter.room(HEADER_SLABS * 64) if packed else None
        stride = HEADER_SLABS * tile_format.slab_bytes + tile_format.header_bytes
        with emitter.loop(emitter.builder.sdiv(slabs, constant(I64, HEADER_SLABS))) as block:
            start = emitter.at(weights, emitter.scaled(block, stride))
            header = [emitter.load_half(start, align=64), emitter.load_half(emitter.at(start, 32), align=32)]
            if packed:
                _emit_unpacked(emitter, emitter.at(start, FLOAT_HEADER_BYTES), room)
            first = emitter.at(start, tile_format.header_bytes)
            with emitter.loop(constant(I64, HEADER_SLABS)) as inner:
                address = emitter.at(first, emitter.scaled(inner, tile_format.slab_bytes))
                if packed:
                    scales = emitter.at(room, emitter.scaled(inner, 64))
                else:
                    scales = emitter.at(address, tile_format.scale_start)
                slab(address, emitter.builder.add(emitter.scaled(block, HEADER_SLABS), inner), scales, header)
    else:
        with emitter.loop(slabs) as index:
            address = emitter.at(weights, emitter.scaled(index, tile_format.slab_bytes))
            slab(address, index, emitter.at(address, tile_format.scale_start), ())
    return [emitter.get(total) for total in totals]


def _emit_unpacked(emitter: Emitter, packed: Value, room: Value) -> None:
    """The packed scales of four slabs (see :mod:`formats`), a byte each, to the 256 bytes at ``room``."""
    builder = emitter.builder
    low = constant(V64I8, 0x3F)
    last = None
    for index in range(PACKED_VECTORS):
        word = emitter.load(V16I32, emitter.at(packed, 64 * index), align=64)
        emitter.store(builder.and_(builder.bitcast(word, V64I8), low), emitter.at(room, 64 * index), align=64)
        # two bits of each byte, moved to bits 2 * index; what comes in from the neighbour is masked off
        moved = builder.bitcast(builder.lshr(word, constant(V16I32, 6 - 2 * index)), V64I8)
        two = builder.and_(moved, constant(V64I8, 0x03 << 2 * index))
        last = two if last is None else builder.or_(last, two)
    emitter.store(last, emitter.at(room, 64 * PACKED_VECTORS), align=64)


def _emit_group(
    emitter: Emitter,
    tile_format: TileFormat,
    tokens: range,
    totals: list[Value],
    slab: Value,
    slab_scales: Value,
    half: Value,
    header: Sequence[Value],
    record: Value,
) -> None:
    """Add a group's contribution for each token to its total; ``slab_scales`` is where its slab's scales are."""
    builder = emitter.builder
    codes = _emit_codes(emitter, tile_format, slab, half)
    scales, minimums = _emit_scales(emitter, tile_format, slab_scales, half, header)
    each = VECTORS // records.PARTS
    wide = tile_format.low is Plane.BYTE
    shift = tile_format.offset.bit_length() - 1
    for token, total in zip(tokens, totals, strict=True):
        entry = emitter.at(record, token * records.RECORD_BYTES)
        sums = emitter.get(total)
        for part, minimum in enumerate(minimums):
            place = records.SCALED_MINUS_SUM if len(minimums) == 1 else records.SCALED_MINUS_SUMS + 4 * part
            sums = emitter.fma(minimum, _emit_number(emitter, entry, place), sums)
        products = []
        for part in range(records.PARTS):
            dot = constant(V16I32, 0)
            if tile_format.offset and not (wide and emitter.signed_bytes):
                minus_sum = emitter.load(I32, emitter.at(entry, records.MINUS_SUMS + 4 * part), align=4)
                dot = builder.shl(emitter.splat(minus_sum), constant(V16I32, shift))
            for vector in range(part * each, (part + 1) * each):
                four = emitter.load(I32, emitter.at(entry, 4 * vector), align=4)
                dot = emitter.dot4(dot, codes[vector], four, wide)
            products.append(builder.sitofp(dot, V16F32))
        own = [_emit_number(emitter, entry, records.SCALES + 4 * part) for part in range(records.PARTS)]
        if len(scales) == 1:
            both = emitter.fma(products[1], own[1], builder.fmul(products[0], own[0]))
            sums = emitter.fma(scales[0], both, sums)
        else:
            for scale, product, factor in zip(scales, products, own, strict=True):
                sums = emitter.fma(builder.fmul(scale, product), factor, sums)
        emitter.set(total, sums)


def _emit_number(emitter: Emitter, entry: Value, place: int) -> Value:
    """An f32 of a record, in every lane."""
    return emitter.splat(emitter.load(F32, emitter.at(entry, place), align=4))


def _emit_codes(emitter: Emitter, tile_format: TileFormat, slab: Value, half: Value) -> list[Value]:
    """The group's eight vectors of 64 unsigned codes."""
    builder = emitter.builder
    low = emitter.at(slab, emitter.scaled(half, tile_format.low_bytes))
    codes: list[Value] = []
    if tile_format.low is Plane.BYTE:
        codes = [emitter.load(V64I8, emitter.at(low, 64 * index), align=64) for index in range(VECTORS)]
        if emitter.signed_bytes:  # the offset of 128 is then taken off here, and not from the sum
            codes = [builder.xor(code, constant(V64I8, 0x80)) for code in codes]
    elif tile_format.low is Plane.NIBBLE:
        packed = [emitter.load(V16I32, emitter.at(low, 64 * index), align=64) for index in range(VECTORS // 2)]
        mask = constant(V64I8, 0x0F)
        codes = [builder.and_(builder.bitcast(word, V64I8), mask) for word in packed]
        codes += [
            builder.and_(builder.bitcast(builder.lshr(word, constant(V16I32, 4)), V64I8), mask) for word in packed
        ]
    elif tile_format.low is Plane.PAIR:
        codes = _emit_pairs(emitter, low, 0)
    high = emitter.at(
        emitter.at(slab, tile_format.high_start),
        emitter.scaled(half, tile_format.high_bytes) if tile_format.high else 0,
    )
    if tile_format.high is Plane.BIT:
        for index in range(VECTORS):
            bits = builder.bitcast(
                emitter.load(I64, emitter.at(high, 8 * index), align=8), ir.VectorType(ir.IntType(1), 64)
            )
            ones = builder.select(bits, constant(V64I8, 1 << tile_format.low), constant(V64I8, 0))
            codes[index] = builder.or_(codes[index], ones)
    elif tile_format.high is Plane.PAIR:
        for index, pairs in enumerate(_emit_pairs(emitter, high, tile_format.low)):
            codes[index] = builder.or_(codes[index], pairs)
    return codes


def _emit_pairs(emitter: Emitter, address: Value, bits_below: int) -> list[Value]:
    """A pair plane's codes, shifted up by ``bits_below``."""
    builder = emitter.builder
    mask = constant(V64I8, 3 << bits_below)
    codes = []
    for index in range(VECTORS):
        if index % 4 == 0:
            word = emitter.load(V16I32, emitter.at(address, 64 * (index // 4)), align=64)
        shift = bits_below - 2 * (index % 4)
        if shift >= 0:
            moved = builder.shl(word, constant(V16I32, shift))
        else:
            moved = builder.lshr(word, constant(V16I32, -shift))
        codes.append(builder.and_(builder.bitcast(moved, V64I8), mask))
    return codes


def _emit_scales(
    emitter: Emitter, tile_format: TileFormat, slab_scales: Value, half: Value, header: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """Scales and minimums of the group's parts: one of 32 columns or two of 16."""
    builder = emitter.builder
    # those that were packed are unpacked to a byte each: 16 scales, then 16 minimums
    address = emitter.at(slab_scales, emitter.scaled(half, tile_format.scale_bytes or 2 * TILE_ROWS))
    if tile_format.scales is Scales.HALF:
        return [emitter.load_half(address, align=32)], []
    if tile_format.scales is Scales.HALF_MIN:
        return [emitter.load_half(address, align=32)], [emitter.load_half(emitter.at(address, 32), align=32)]
    first = emitter.load(V16I8, address, align=16)
    second = emitter.load(V16I8, emitter.at(address, 16), align=16)
    if tile_format.scales is Scales.SUPER_MIN:
        return (
            [builder.fmul(header[0], builder.uitofp(first, V16F32))],
            [builder.fmul(header[1], builder.uitofp(second, V16F32))],
        )
    if tile_format.scales is Scales.SUPER_16:
        return [builder.fmul(header[0], builder.sitofp(part, V16F32)) for part in (first, second)], []
    scales, minimums = [], []
    for part in (first, second):
        low = builder.and_(part, constant(V16I8, 0x0F))
        high = builder.lshr(part, constant(V16I8, 4))
        scales.append(builder.fmul(header[0], builder.uitofp(low, V16F32)))
        minimums.append(builder.fmul(header[1], builder.uitofp(high, V16F32)))
    return scales, minimums


def _emit_float_tokens(
    emitter: Emitter, tile_format: TileFormat, width: int, tokens: range, weights: Value, x: Value, slabs: Value
) -> list[Value]:
    """Two running sums for each token, of even and of odd columns, added at the end."""
    sums = [[emitter.variable(constant(V16F32, 0.0)) for _ in range(2)] for _ in tokens]
    row_bytes = 16 * tile_format.element_bytes
    with emitter.loop(emitter.scaled(slabs, 2)) as group:
        tile = emitter.at(weights, emitter.scaled(group, tile_format.low_bytes))
        entry = emitter.at(x, emitter.scaled(group, width * records.FLOAT_ENTRY_BYTES))
        with emitter.loop(constant(I64, GROUP_COLUMNS // 2)) as pair:
            column = emitter.at(tile, emitter.scaled(pair, 2 * row_bytes))
            number = emitter.at(entry, emitter.scaled(pair, 8))
            for parity in range(2):
                weight = _emit_floats(emitter, tile_format, emitter.at(column, parity * row_bytes))
                for token, both in zip(tokens, sums, strict=True):
                    offset = token * records.FLOAT_ENTRY_BYTES + 4 * parity
                    other = emitter.splat(emitter.load(F32, emitter.at(number, offset), align=4))
                    emitter.set(both[parity], emitter.fma(weight, other, emitter.get(both[parity])))
    return [emitter.builder.fadd(emitter.get(even), emitter.get(odd)) for even, odd in sums]


def _emit_floats(emitter: Emitter, tile_format: TileFormat, address: Value) -> Value:
    if tile_format.element_bytes == 4:
        return emitter.load(V16F32, address, align=64)
    if tile_format.ggml_type.name == "BF16":
        return emitter.load_bfloat(address, align=32)
    return emitter.load_half(address, align=32)
