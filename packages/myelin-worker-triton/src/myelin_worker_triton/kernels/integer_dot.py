"""Four signed or unsigned bytes times four signed bytes, and a table of 16 bytes: the two steps that need an
instruction.

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
def look_up8(codes, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, USE_ASM: tl.constexpr):
    """The table's bytes for the nibbles of each int32 word: those of bits 0–15 in one word, of bits 16–31 in another.

    Args:
        T0, T1, T2, T3: The table's 16 bytes, as int32 words.
    """
    if USE_ASM:
        # prmt picks each byte by three bits of a nibble; the fourth then chooses between the table's halves.
        lower, upper = tl.inline_asm_elementwise(
            "{ .reg .b32 s, h, a, b; and.b32 s, $2, 0x77777777; shr.u32 h, $2, 1;"
            " lop3.b32 h, h, 0x44444444, 0x32103210, 0xEA;"
            " prmt.b32 a, $3, $4, s; prmt.b32 b, $5, $6, s; prmt.b32 $0, a, b, h;"
            " shr.u32 s, s, 16; shr.u32 h, h, 16;"
            " prmt.b32 a, $3, $4, s; prmt.b32 b, $5, $6, s; prmt.b32 $1, a, b, h; }",
            "=&r,=&r,r,r,r,r,r",
            [codes, T0, T1, T2, T3],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        lower = codes * 0
        upper = codes * 0
        for i in tl.static_range(8):
            code = (codes >> (4 * i)) & 0xF
            word = tl.where(code < 8, tl.where(code < 4, T0, T1), tl.where(code < 12, T2, T3))
            byte = ((word >> ((code & 3) * 8)) & 0xFF) << (8 * (i % 4))
            if i < 4:
                lower = lower | byte
            else:
                upper = upper | byte
    return lower, upper
