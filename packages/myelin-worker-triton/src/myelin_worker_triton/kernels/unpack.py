"""Reading rows of a matrix in planes: tiles of groups as words of codes, with 128-bit loads (see ``layouts.py``), and
such tiles as single elements for tensor cores.
"""

# Triton's language is not typed Python, writes constants in capitals, and has an `if` of its own for compile time.
# mypy: ignore-errors
# ruff: noqa: N803, N806, RUF005

import triton
import triton.language as tl

from myelin_worker_triton.kernels.integer_dot import look_up8, pick8


@triton.jit
def split4(words, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """``[ROWS, 4 * GROUPS]`` as four ``[ROWS, GROUPS]``: mere renaming, since a thread has all four."""
    even, odd = tl.split(tl.reshape(words, [ROWS, GROUPS, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def split2(words, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    return tl.split(tl.reshape(words, [ROWS, GROUPS, 2]))


@triton.jit
def half(word, HIGH: tl.constexpr):
    """The lower or upper float16 of an int32 word, as float32."""
    if HIGH:
        bits = word >> 16
    else:
        bits = word
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_tile(pointers, zeros, place, count, MASKED: tl.constexpr):
    """Load a tile; with ``MASKED`` only where ``place`` (of each column) is below ``count``, and zero elsewhere."""
    if MASKED:
        found = tl.load(pointers, mask=(zeros[:, None] + place[None, :]) < count, other=0)
    else:
        found = tl.load(pointers)
    return found


@triton.jit
def at_groups(plane, row, group, WIDTH: tl.constexpr, STRIDE: tl.constexpr, GROUPS: tl.constexpr):
    """Where rows' next ``GROUPS`` groups of ``WIDTH`` elements are in a plane: pointers ``[ROWS, WIDTH * GROUPS]``.

    All in 64 bits, so that a constant in ``row`` becomes part of the load instruction.
    """
    elements = tl.arange(0, WIDTH * GROUPS).to(tl.int64) + group * WIDTH
    return plane + (row[:, None] * STRIDE + elements[None, :])


@triton.jit
def codes_of(
    low,
    high,
    row,
    zeros,
    group,
    count,
    LOW_STRIDE: tl.constexpr,
    HIGH_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    book_low,
    BOOK_LOW: tl.constexpr,
    book_up,
    BOOK_UP: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """The codes of a tile as eight words of four bytes, in the order of the activations.

    With plain nibbles (4 bits, no high plane, not IQ4's codebook) words 4–7 are 16 times the codes: that saves a shift
    each.
    """
    LOW: tl.constexpr = FORMAT & 15
    HIGH: tl.constexpr = (FORMAT >> 4) & 3
    BOOK: tl.constexpr = (FORMAT >> 8) & 3
    groups = tl.arange(0, GROUPS)
    if LOW == 2:
        words = tl.arange(0, GROUPS * 2)
        at = at_groups(low, row, group, 2, LOW_STRIDE, GROUPS)
        a, b = split2(load_tile(at, zeros, words // 2 + group, count, MASKED), ROWS, GROUPS)
        v0 = a & 0x03030303
        v1 = (a >> 2) & 0x03030303
        v2 = (a >> 4) & 0x03030303
        v3 = (a >> 6) & 0x03030303
        v4 = b & 0x03030303
        v5 = (b >> 2) & 0x03030303
        v6 = (b >> 4) & 0x03030303
        v7 = (b >> 6) & 0x03030303
    else:
        place = tl.arange(0, GROUPS * 4) // 4 + group
        at = at_groups(low, row, group, 4, LOW_STRIDE, GROUPS)
        w0, w1, w2, w3 = split4(load_tile(at, zeros, place, count, MASKED), ROWS, GROUPS)
        if LOW == 8:
            v0, v1, v2, v3 = w0, w1, w2, w3
            v4, v5, v6, v7 = split4(load_tile(at + LOW_STRIDE // 2, zeros, place, count, MASKED), ROWS, GROUPS)
        elif BOOK == 1:
            v0, v4 = look_up8(w0, book_low, BOOK_LOW, book_up, BOOK_UP, USE_ASM)
            v1, v5 = look_up8(w1, book_low, BOOK_LOW, book_up, BOOK_UP, USE_ASM)
            v2, v6 = look_up8(w2, book_low, BOOK_LOW, book_up, BOOK_UP, USE_ASM)
            v3, v7 = look_up8(w3, book_low, BOOK_LOW, book_up, BOOK_UP, USE_ASM)
        else:
            v0 = w0 & 0x0F0F0F0F
            v1 = w1 & 0x0F0F0F0F
            v2 = w2 & 0x0F0F0F0F
            v3 = w3 & 0x0F0F0F0F
            if HIGH == 0:
                v4 = w0 & -0x0F0F0F10
                v5 = w1 & -0x0F0F0F10
                v6 = w2 & -0x0F0F0F10
                v7 = w3 & -0x0F0F0F10
            else:
                v4 = (w0 >> 4) & 0x0F0F0F0F
                v5 = (w1 >> 4) & 0x0F0F0F0F
                v6 = (w2 >> 4) & 0x0F0F0F0F
                v7 = (w3 >> 4) & 0x0F0F0F0F
    if HIGH == 1:
        h = load_tile(at_groups(high, row, group, 1, HIGH_STRIDE, GROUPS), zeros, groups + group, count, MASKED)
        if LOW == 2:
            v0 = v0 | ((h << 2) & 0x04040404)
            v1 = v1 | ((h << 1) & 0x04040404)
            v2 = v2 | (h & 0x04040404)
            v3 = v3 | ((h >> 1) & 0x04040404)
            v4 = v4 | ((h >> 2) & 0x04040404)
            v5 = v5 | ((h >> 3) & 0x04040404)
            v6 = v6 | ((h >> 4) & 0x04040404)
            v7 = v7 | ((h >> 5) & 0x04040404)
        else:
            v0 = v0 | ((h << 4) & 0x10101010)
            v1 = v1 | ((h << 3) & 0x10101010)
            v2 = v2 | ((h << 2) & 0x10101010)
            v3 = v3 | ((h << 1) & 0x10101010)
            v4 = v4 | (h & 0x10101010)
            v5 = v5 | ((h >> 1) & 0x10101010)
            v6 = v6 | ((h >> 2) & 0x10101010)
            v7 = v7 | ((h >> 3) & 0x10101010)
    if HIGH == 2:
        words2 = tl.arange(0, GROUPS * 2)
        at_high = at_groups(high, row, group, 2, HIGH_STRIDE, GROUPS)
        h0, h1 = split2(load_tile(at_high, zeros, words2 // 2 + group, count, MASKED), ROWS, GROUPS)
        v0 = v0 | ((h0 << 4) & 0x30303030)
        v1 = v1 | ((h0 << 2) & 0x30303030)
        v2 = v2 | (h0 & 0x30303030)
        v3 = v3 | ((h0 >> 2) & 0x30303030)
        v4 = v4 | ((h1 << 4) & 0x30303030)
        v5 = v5 | ((h1 << 2) & 0x30303030)
        v6 = v6 | (h1 & 0x30303030)
        v7 = v7 | ((h1 >> 2) & 0x30303030)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _joined(tiles, COUNT: tl.constexpr):
    """Pairs of tiles that are half of all apart, each pair joined."""
    pairs = ()
    for i in tl.static_range(COUNT // 2):
        pairs = pairs + (tl.join(tiles[i], tiles[i + COUNT // 2]),)
    return pairs


@triton.jit
def elements_of(
    low,
    high,
    scales,
    smaller,
    row,
    group,
    count,
    LOW_STRIDE: tl.constexpr,
    HIGH_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    MASKED: tl.constexpr,
    T0: tl.constexpr,
    T1: tl.constexpr,
    T2: tl.constexpr,
    T3: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """The elements of a quantized matrix's rows ``row`` (int64) and groups ``group + [0, GROUPS)``, as float16
    ``[ROWS, 32 * GROUPS]``, times ``smaller``; those of groups from ``count`` on are zero with ``MASKED``.

    A thread unpacks whole groups, one of the 32 elements after the other; joining them is mere renaming.
    """
    LOW: tl.constexpr = FORMAT & 15
    HIGH: tl.constexpr = (FORMAT >> 4) & 3
    SCALES: tl.constexpr = (FORMAT >> 6) & 3
    BOOK: tl.constexpr = (FORMAT >> 8) & 3
    OFFSET: tl.constexpr = 128 if BOOK == 1 else 12 if BOOK == 2 else (FORMAT >> 10) & 63
    SHIFTED: tl.constexpr = LOW == 4 and HIGH == 0 and BOOK != 1
    FIRST: tl.constexpr = ~T0 + 0x01010101 if BOOK == 1 else ((T0 & 0xFFFFFFFF) ^ 0x80808080) - 0x77767574
    SECOND: tl.constexpr = ~T1 + 0x01010101 if BOOK == 1 else ((T1 & 0xFFFFFFFF) ^ 0x80808080) - 0x7B7A7978
    groups = tl.arange(0, GROUPS)
    zeros = tl.zeros([ROWS], tl.int32)
    words = codes_of(
        low, high, row, zeros, group, count, LOW_STRIDE, HIGH_STRIDE, FORMAT, GROUPS, ROWS, MASKED, FIRST, SECOND, T2,
        T3, USE_ASM,
    )  # fmt: skip
    more = ()
    if BOOK == 2:
        for j in tl.static_range(4):
            more = more + pick8(words[j] | words[j + 4], FIRST, SECOND, USE_ASM)
    if SCALES == 3:
        pairs = tl.arange(0, GROUPS * 2)
        at_pair = at_groups(scales, row, group, 2, SCALE_STRIDE, GROUPS)
        lower, upper = split2(load_tile(at_pair, zeros, pairs // 2 + group, count, MASKED), ROWS, GROUPS)
        factors = half(lower, False) * smaller, half(upper, False) * smaller
        addends = half(lower, True) * smaller, half(upper, True) * smaller
    else:
        word = load_tile(at_groups(scales, row, group, 1, SCALE_STRIDE, GROUPS), zeros, groups + group, count, MASKED)
        if SCALES == 0:
            factor = word.to(tl.float16, bitcast=True).to(tl.float32) * smaller
            factors = factor, factor
            addends = factor, factor
        else:
            second = half(word, True) * smaller
            factors = half(word, False) * smaller, half(word, SCALES == 2) * smaller
            addends = second, second
    tiles = ()
    for e in tl.static_range(32):
        code = words[e // 4] >> (8 * (e % 4))
        if LOW == 8:
            code = (code << 24) >> 24
        elif SHIFTED and e >= 16:
            code = (code >> 4) & 0xF
        else:
            code = code & 0xFF
        if BOOK == 2:
            # A table's bytes come in the order of nibbles, two elements 16 apart beside each other.
            code = code + ((more[e % 16 // 4 * 2 + e % 4 // 2] >> (e % 2 * 16 + e // 16 * 8)) & 0xFF)
        value = (code - OFFSET).to(tl.float32) * factors[e // 16]
        if SCALES == 1 or SCALES == 3:
            value = value + addends[e // 16]
        tiles = tiles + (value.to(tl.float16),)
    tiles = _joined(_joined(_joined(_joined(_joined(tiles, 32), 16), 8), 4), 2)
    return tl.reshape(tiles[0], [ROWS, GROUPS * 32])
