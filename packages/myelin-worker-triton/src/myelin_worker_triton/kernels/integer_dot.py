"""Four signed or unsigned bytes times four signed bytes, two sums in one word times a number, and a codebook of 16
values: the steps that need an instruction.

Each has a twin in plain Triton, exact to the bit, which is what an interpreter or a GPU of another kind runs
(``USE_ASM=False``).
"""

# Triton's language is not typed Python, writes constants in capitals, and has an `if` of its own for compile time.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def _byte(word, INDEX: tl.constexpr):
    """Byte ``INDEX`` of a word, sign-extended to int32."""
    return (word << (24 - 8 * INDEX)) >> 24


@triton.jit
def dot4_unsigned(codes, activations, total, USE_ASM: tl.constexpr):
    """``total + sum(codes[i] * activations[i])``: int32 words of four ``uint8`` and of four ``int8``; int32."""
    if USE_ASM:
        total = tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [codes, activations, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        for i in tl.static_range(4):
            total = total + ((codes >> (8 * i)) & 0xFF) * _byte(activations, i)
    return total


@triton.jit
def dot4_signed(codes, activations, total, USE_ASM: tl.constexpr):
    """The same with ``codes`` of four ``int8``."""
    if USE_ASM:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [codes, activations, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        for i in tl.static_range(4):
            total = total + _byte(codes, i) * _byte(activations, i)
    return total


@triton.jit
def both_halves(sums, FACTOR: tl.constexpr, total, USE_ASM: tl.constexpr):
    """``total + FACTOR * (lower + upper)`` of the two ``int16`` in each int32 word; ``FACTOR`` from -128 to 127."""
    if USE_ASM:
        total = tl.inline_asm_elementwise(
            "dp2a.lo.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [sums, (FACTOR & 0xFF) * 0x0101, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        total = total + FACTOR * (((sums << 16) >> 16) + (sums >> 16))
    return total


@triton.jit
def held(VALUE: tl.constexpr, USE_ASM: tl.constexpr):
    """A constant, int32, in a register of its own: one that is known for a constant is loaded anew at each use.

    No lane is below itself, so bit 31 of the mask of the lanes below is never set; which compilers don't know.
    """
    if USE_ASM:
        value = tl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.u32 t, %lanemask_lt; and.b32 t, t, 0x80000000; or.b32 $0, t, $1; }",
            "=r,r",
            [VALUE],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        value = VALUE
    return value


@triton.jit
def look_up8(codes, low, LOW: tl.constexpr, up, UP: tl.constexpr, USE_ASM: tl.constexpr):
    """128 more than a codebook's values for the nibbles of each int32 word, as unsigned bytes: for the nibbles of bits
    0-15 in one word, of bits 16-31 in another. The values of codes 0-7 aren't positive, those of 8-15 not negative.

    Args:
        low, LOW: Magnitudes (0-127) of the values of codes 0-3 and of 4-7, int32 words of four bytes.
        up, UP: The same of codes 8-11 and 12-15.
    """
    if USE_ASM:
        # prmt picks a byte by three bits of a nibble; the fourth bit, where it is set, makes it that byte's sign
        # instead, eight times: 0 here. So of the two halves' magnitudes one is 0, and 128 more than their difference
        # never borrows from the next byte.
        lower, upper = tl.inline_asm_elementwise(
            "{ .reg .b32 s, n, a, b; xor.b32 n, $2, 0x88888888; shr.u32 s, $2, 16;"
            " prmt.b32 a, $3, $4, $2; prmt.b32 b, $5, $6, n; sub.s32 b, b, a; add.s32 $0, b, 0x80808080;"
            " shr.u32 n, n, 16;"
            " prmt.b32 a, $3, $4, s; prmt.b32 b, $5, $6, n; sub.s32 b, b, a; add.s32 $1, b, 0x80808080; }",
            "=&r,=&r,r,r,r,r,r",
            [codes, low, LOW, up, UP],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        lower = codes * 0
        upper = codes * 0
        for i in tl.static_range(8):
            code = (codes >> (4 * i)) & 0xF
            word = tl.where(code < 8, tl.where(code < 4, low, LOW), tl.where(code < 12, up, UP))
            size = (word >> ((code & 3) * 8)) & 0xFF
            byte = tl.where(code < 8, 128 - size, 128 + size) << (8 * (i % 4))
            if i < 4:
                lower = lower | byte
            else:
                upper = upper | byte
    return lower, upper


@triton.jit
def pick8(codes, first, SECOND: tl.constexpr, USE_ASM: tl.constexpr):
    """A table's bytes for the nibbles below 8 of each int32 word, and 0 for the others: for those of bits 0-15 in one
    word, of bits 16-31 in another. ``first`` and ``SECOND`` are the table, eight bytes below 128."""
    if USE_ASM:
        lower, upper = tl.inline_asm_elementwise(
            "{ .reg .b32 s; shr.u32 s, $2, 16; prmt.b32 $0, $3, $4, $2; prmt.b32 $1, $3, $4, s; }",
            "=&r,=r,r,r,r",
            [codes, first, SECOND],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        lower = codes * 0
        upper = codes * 0
        for i in tl.static_range(8):
            code = (codes >> (4 * i)) & 0xF
            byte = (tl.where(code < 4, first, SECOND) >> ((code & 3) * 8)) & 0xFF
            byte = tl.where(code < 8, byte, 0) << (8 * (i % 4))
            if i < 4:
                lower = lower | byte
            else:
                upper = upper | byte
    return lower, upper


@triton.jit
def interleaved(x, y, USE_ASM: tl.constexpr):
    """Bytes ``x[0], y[0], x[1], y[1]`` of int32 words, and ``x[2], y[2], x[3], y[3]``: in the order of nibbles."""
    if USE_ASM:
        lower, upper = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;",
            "=&r,=r,r,r",
            [x, y],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        lower = (x & 0xFF) | ((y & 0xFF) << 8) | ((x & 0xFF00) << 8) | ((y & 0xFF00) << 16)
        upper = ((x >> 16) & 0xFF) | ((y >> 8) & 0xFF00) | ((x >> 8) & 0xFF0000) | (y & -0x1000000)
    return lower, upper
