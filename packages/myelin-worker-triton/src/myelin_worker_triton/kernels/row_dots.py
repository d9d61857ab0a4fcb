"""The heart of every decode kernel: dot products of weight rows with up to eight columns of activations.

For a group of 32 elements with codes ``q``, scale ``a`` and addend ``b`` (see ``layouts.py``), and activations
``x = d * p`` with ``p`` int8 (see ``quantise.py``)::

    sum(w * x) = a * d * (sum(q * p) - offset * sum(p)) + b * d * sum(p)

The inner sum is an exact integer. It starts at ``0x4B400000 - offset * sum(p)``, the bit pattern of the float32
``1.5 * 2^23``: with it, the finished sum *is* a float32, and one fused multiply-add takes ``d * 1.5 * 2^23`` away
again, exactly, because ``d`` has at most 21 bits of mantissa. The twin converts instead; the results are the same bits.

One tile is ``ROWS`` rows of ``GROUPS`` groups: with 32 groups and as many rows as warps, each thread has one group. A
thread keeps one float32 sum for each of its ``REPEAT * COLUMNS`` pairs of rows and columns; these are added across
threads at the very end. So what a column gives depends on nothing but its own activations, ``GROUPS`` and ``SPLITS``.
"""

# Triton's language is not typed Python, writes constants in capitals, and has an `if` of its own for compile time.
# mypy: ignore-errors
# ruff: noqa: N803, N806, RUF005

import triton
import triton.language as tl

from myelin_worker_triton.kernels.integer_dot import both_halves, dot4_signed, dot4_unsigned, held, interleaved, pick8
from myelin_worker_triton.kernels.unpack import at_groups, codes_of, half, load_tile, split2, split4

MAGIC: tl.constexpr = tl.constexpr(0x4B400000)
MAGIC_FLOAT: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def _rows(row0, last_row, r: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr):
    """The rows of tile ``r`` of a program, int64: all there with ``EXACT``, or the last one in place of what isn't."""
    if EXACT:
        row = (row0 + tl.arange(0, ROWS)).to(tl.int64) + r * ROWS
    else:
        row = tl.minimum(row0 + r * ROWS + tl.arange(0, ROWS), last_row).to(tl.int64)
    return row


@triton.jit
def _activations(
    xq,
    xd,
    xi,
    zeros,
    group,
    count,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Of one column's next ``GROUPS`` groups: eight words, scale, sums of both halves in a word. Every row gets its own
    copy."""
    words = tl.arange(0, GROUPS * 4)
    groups = tl.arange(0, GROUPS)
    at = zeros[:, None] + (((words // 4) * 8 + words % 4).to(tl.int64) + group * 8)[None, :]
    place = words // 4 + group
    x0, x1, x2, x3 = split4(load_tile(xq + at, zeros, place, count, MASKED), ROWS, GROUPS)
    x4, x5, x6, x7 = split4(load_tile(xq + at + 4, zeros, place, count, MASKED), ROWS, GROUPS)
    at_group = zeros[:, None] + (groups.to(tl.int64) + group)[None, :]
    scale = load_tile(xd + at_group, zeros, groups + group, count, MASKED)
    sums = load_tile(xi + at_group, zeros, groups + group, count, MASKED)
    return x0, x1, x2, x3, x4, x5, x6, x7, scale, sums


@triton.jit
def _chain(a0, a1, a2, a3, x0, x1, x2, x3, total, SIGNED: tl.constexpr, USE_ASM: tl.constexpr):
    """``total`` plus the products of four words; the twin takes all four at once, which is faster in an interpreter."""
    if not USE_ASM:
        a = tl.join(tl.join(a0, a1), tl.join(a2, a3))
        x = tl.join(tl.join(x0, x1), tl.join(x2, x3))
        if SIGNED:
            products = dot4_signed(a, x, a * 0, USE_ASM)
        else:
            products = dot4_unsigned(a, x, a * 0, USE_ASM)
        total = total + tl.sum(tl.sum(products, axis=3), axis=2)
    elif SIGNED:
        total = dot4_signed(a0, x0, total, USE_ASM)
        total = dot4_signed(a1, x1, total, USE_ASM)
        total = dot4_signed(a2, x2, total, USE_ASM)
        total = dot4_signed(a3, x3, total, USE_ASM)
    else:
        total = dot4_unsigned(a0, x0, total, USE_ASM)
        total = dot4_unsigned(a1, x1, total, USE_ASM)
        total = dot4_unsigned(a2, x2, total, USE_ASM)
        total = dot4_unsigned(a3, x3, total, USE_ASM)
    return total


@triton.jit
def _scaled(total, scale, minus, USE_ASM: tl.constexpr):
    """``scale * (total - MAGIC)`` of an integer sum that began at ``MAGIC``; ``minus`` is ``-1.5 * 2^23 * scale``."""
    if USE_ASM:
        product = tl.fma(total.to(tl.float32, bitcast=True), scale, minus)
    else:
        product = (total - MAGIC).to(tl.float32) * scale
    return product


@triton.jit
def _accumulate(
    sums,
    low,
    high,
    scales,
    xq,
    xd,
    xi,
    row0,
    last_row,
    group,
    count,
    LOW_STRIDE: tl.constexpr,
    HIGH_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    XQ_STRIDE: tl.constexpr,
    XD_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    REPEAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    EXACT: tl.constexpr,
    MASKED: tl.constexpr,
    book_low,
    BOOK_LOW: tl.constexpr,
    book_up,
    BOOK_UP: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Add one tile's products to the sums."""
    SCALES: tl.constexpr = (FORMAT >> 6) & 3
    BOOK: tl.constexpr = (FORMAT >> 8) & 3
    OFFSET: tl.constexpr = 128 if BOOK == 1 else 12 if BOOK == 2 else (FORMAT >> 10) & 63
    SIGNED: tl.constexpr = (FORMAT & 15) == 8
    SHIFTED: tl.constexpr = (FORMAT & 15) == 4 and ((FORMAT >> 4) & 3) == 0 and BOOK != 1
    groups = tl.arange(0, GROUPS)
    zeros = tl.arange(0, ROWS) * 0
    STEP: tl.constexpr = 18 if BOOK == 2 else 10
    columns = ()
    for c in tl.static_range(COLUMNS):
        column = _activations(
            xq + c * XQ_STRIDE, xd + c * XD_STRIDE, xi + c * XD_STRIDE, zeros, group, count, ROWS, GROUPS, MASKED
        )
        columns = columns + column
        if BOOK == 2:
            for j in tl.static_range(4):
                columns = columns + interleaved(column[j], column[j + 4], USE_ASM)
    result = ()
    for r in tl.static_range(REPEAT):
        row = _rows(row0, last_row, r, ROWS, EXACT)
        v0, v1, v2, v3, v4, v5, v6, v7 = codes_of(
            low,
            high,
            row,
            zeros,
            group,
            count,
            LOW_STRIDE,
            HIGH_STRIDE,
            FORMAT,
            GROUPS,
            ROWS,
            MASKED,
            book_low,
            BOOK_LOW,
            book_up,
            BOOK_UP,
            USE_ASM,
        )
        if BOOK == 2:
            p0, p1 = pick8(v0 | v4, book_low, BOOK_LOW, USE_ASM)
            p2, p3 = pick8(v1 | v5, book_low, BOOK_LOW, USE_ASM)
            p4, p5 = pick8(v2 | v6, book_low, BOOK_LOW, USE_ASM)
            p6, p7 = pick8(v3 | v7, book_low, BOOK_LOW, USE_ASM)
        if SCALES == 3:
            pairs = tl.arange(0, GROUPS * 2)
            at_pair = at_groups(scales, row, group, 2, SCALE_STRIDE, GROUPS)
            word0, word1 = split2(load_tile(at_pair, zeros, pairs // 2 + group, count, MASKED), ROWS, GROUPS)
            a0 = half(word0, False)
            b0 = half(word0, True)
            a1 = half(word1, False)
            b1 = half(word1, True)
        else:
            at_scale = at_groups(scales, row, group, 1, SCALE_STRIDE, GROUPS)
            word = load_tile(at_scale, zeros, groups + group, count, MASKED)
            if SCALES == 0:
                a0 = word.to(tl.float16, bitcast=True).to(tl.float32)
            else:
                a0 = half(word, False)
                b0 = half(word, True)
        for c in tl.static_range(COLUMNS):
            x0, x1, x2, x3 = columns[STEP * c], columns[STEP * c + 1], columns[STEP * c + 2], columns[STEP * c + 3]
            x4, x5, x6, x7 = columns[STEP * c + 4], columns[STEP * c + 5], columns[STEP * c + 6], columns[STEP * c + 7]
            d, both = columns[STEP * c + 8], columns[STEP * c + 9]
            minus = d * (-MAGIC_FLOAT)
            total = sums[r * COLUMNS + c]
            if SCALES < 2:
                begin = both * 0 + MAGIC
                if OFFSET != 0:
                    begin = both_halves(both, -OFFSET, begin, USE_ASM)
                if BOOK == 2:
                    y0, y1, y2 = columns[STEP * c + 10], columns[STEP * c + 11], columns[STEP * c + 12]
                    y3, y4, y5 = columns[STEP * c + 13], columns[STEP * c + 14], columns[STEP * c + 15]
                    y6, y7 = columns[STEP * c + 16], columns[STEP * c + 17]
                    begin = _chain(p0, p1, p2, p3, y0, y1, y2, y3, begin, SIGNED, USE_ASM)
                    begin = _chain(p4, p5, p6, p7, y4, y5, y6, y7, begin, SIGNED, USE_ASM)
                if SHIFTED:
                    upper = _chain(v4, v5, v6, v7, x4, x5, x6, x7, both * 0, SIGNED, USE_ASM)
                    begin = (upper >> 4) + begin
                else:
                    begin = _chain(v4, v5, v6, v7, x4, x5, x6, x7, begin, SIGNED, USE_ASM)
                dot = _chain(v0, v1, v2, v3, x0, x1, x2, x3, begin, SIGNED, USE_ASM)
                total = total + _scaled(dot, d, minus, USE_ASM) * a0
                if SCALES == 1:
                    total = total + (both_halves(both, 1, both * 0, USE_ASM).to(tl.float32) * d) * b0
            else:
                s0 = (both << 16) >> 16
                s1 = both >> 16
                dot0 = _chain(v0, v1, v2, v3, x0, x1, x2, x3, MAGIC - OFFSET * s0, SIGNED, USE_ASM)
                dot1 = _chain(v4, v5, v6, v7, x4, x5, x6, x7, MAGIC - OFFSET * s1, SIGNED, USE_ASM)
                if SCALES == 2:
                    total = total + _scaled(dot0, d, minus, USE_ASM) * a0
                    total = total + _scaled(dot1, d, minus, USE_ASM) * b0
                else:
                    total = total + _scaled(dot0, d, minus, USE_ASM) * a0
                    total = total + _scaled(dot1, d, minus, USE_ASM) * a1
                    total = total + (s0.to(tl.float32) * d) * b0
                    total = total + (s1.to(tl.float32) * d) * b1
            result = result + (total,)
    return result


@triton.jit
def _plain_accumulate(
    sums,
    low,
    xf,
    row0,
    last_row,
    word,
    count,
    LOW_STRIDE: tl.constexpr,
    XF_STRIDE: tl.constexpr,
    UPPER: tl.constexpr,
    PLAIN: tl.constexpr,
    REPEAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    EXACT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The same for unquantized weights: ``count`` words of a row, one or two elements each."""
    words = tl.arange(0, GROUPS * 4)
    zeros = tl.arange(0, ROWS) * 0
    at = zeros[:, None] + (words.to(tl.int64) + word)[None, :]
    place = words + word
    columns = ()
    for c in tl.static_range(COLUMNS):
        lower = load_tile(xf + c * XF_STRIDE + at, zeros, place, count, MASKED)
        if PLAIN == 3:
            columns = columns + (lower, lower)
        else:
            columns = columns + (lower, load_tile(xf + c * XF_STRIDE + UPPER + at, zeros, place, count, MASKED))
    result = ()
    for r in tl.static_range(REPEAT):
        row = _rows(row0, last_row, r, ROWS, EXACT)
        at_row = low + (row[:, None] * LOW_STRIDE + (words.to(tl.int64) + word)[None, :])
        bits = load_tile(at_row, zeros, place, count, MASKED)
        if PLAIN == 1:
            first = half(bits, False)
            second = half(bits, True)
        elif PLAIN == 2:
            first = (bits << 16).to(tl.float32, bitcast=True)
            second = (bits & -65536).to(tl.float32, bitcast=True)
        else:
            first = bits.to(tl.float32, bitcast=True)
            second = first
        for c in tl.static_range(COLUMNS):
            total = sums[r * COLUMNS + c] + first * columns[2 * c]
            if PLAIN != 3:
                total = total + second * columns[2 * c + 1]
            result = result + (total,)
    return result


@triton.jit
def _part(split, COUNT: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr):
    """Where a part begins, how long its loop goes on, and how far what is left is read: ``COUNT`` by the last part, 0
    by others."""
    FULL: tl.constexpr = COUNT // STEP
    EACH: tl.constexpr = (FULL + SPLITS - 1) // SPLITS * STEP
    if SPLITS == 1:
        first, length, last = 0, EACH, COUNT
    else:
        first = split * EACH
        length = EACH
        if FULL % SPLITS != 0:
            length = tl.minimum(EACH, FULL * STEP - first)
        last = tl.where(split == SPLITS - 1, COUNT, 0)
    return first, length, last


@triton.jit
def row_dots(
    low,
    high,
    scales,
    gain,
    xq,
    xd,
    xi,
    xf,
    row0,
    last_row,
    split,
    K: tl.constexpr,
    LOW_STRIDE: tl.constexpr,
    HIGH_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr,
    REPEAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    EXACT: tl.constexpr,
    SPLITS: tl.constexpr,
    UNROLL: tl.constexpr,
    T0: tl.constexpr,
    T1: tl.constexpr,
    T2: tl.constexpr,
    T3: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """Products of rows ``row0 + r * ROWS + [0, ROWS)``, ``r`` below ``REPEAT``, with every column.

    Args:
        low, high, scales: The matrix's planes, ``int32`` (``scales`` ``int16`` with a single scale); rows of
            ``*_STRIDE`` elements. ``high`` isn't read where the format has no high plane.
        gain: float32, what the scales were divided by.
        xq: ``int32[COLUMNS, X_STRIDE / 4]``, four ``int8`` each; xd: ``float32[COLUMNS, X_STRIDE / 32]``; xi: ``int32``
            of the same shape; xf: ``float32[COLUMNS, X_STRIDE]``, for unquantized weights, which read nothing else.
        row0, last_row: Rows beyond ``last_row`` give what that one gives.
        split: Which of ``SPLITS`` parts of the rows, each a whole number of rounds of the loop; what is left is the
            last one's.
        EXACT: No tile goes beyond ``last_row``.
        UNROLL: Tiles of a quantized matrix in one round of the loop.
        T0, T1, T2, T3: The codebook's 16 bytes.

    Returns:
        A tuple of ``REPEAT * COLUMNS`` vectors ``float32[ROWS]``, column by column for each ``r``.
    """
    PLAIN: tl.constexpr = (FORMAT >> 16) & 3
    sums = ()
    if PLAIN:
        COUNT: tl.constexpr = K if PLAIN == 3 else K // 2
        for _ in tl.static_range(REPEAT * COLUMNS):
            sums = sums + (tl.zeros([ROWS, GROUPS * 4], tl.float32),)
        first, length, last = _part(split, COUNT, GROUPS * 4, SPLITS)
        for word in range(0, length, GROUPS * 4):
            sums = _plain_accumulate(
                sums,
                low,
                xf,
                row0,
                last_row,
                first + word,
                COUNT,
                LOW_STRIDE,
                X_STRIDE,
                COUNT,
                PLAIN,
                REPEAT,
                COLUMNS,
                ROWS,
                GROUPS,
                EXACT,
                False,
            )
        if COUNT % (GROUPS * 4) != 0:
            sums = _plain_accumulate(
                sums,
                low,
                xf,
                row0,
                last_row,
                COUNT // (GROUPS * 4) * (GROUPS * 4),
                last,
                LOW_STRIDE,
                X_STRIDE,
                COUNT,
                PLAIN,
                REPEAT,
                COLUMNS,
                ROWS,
                GROUPS,
                EXACT,
                True,
            )
    else:
        N_GROUPS: tl.constexpr = K // 32
        BOOK: tl.constexpr = (FORMAT >> 8) & 3
        # Of IQ4 the magnitudes: the bytes of its negative half are ~byte + 1. Of E2M1 what values below 8 have more
        # than c - 12: (value + 128) - (116 + c), byte by byte.
        BOOK_LOW: tl.constexpr = ~T1 + 0x01010101 if BOOK == 1 else ((T1 & 0xFFFFFFFF) ^ 0x80808080) - 0x7B7A7978
        BOOK_UP: tl.constexpr = T3
        book_low = 0
        book_up = 0
        if BOOK == 1:
            book_low = held(~T0 + 0x01010101, USE_ASM)
            book_up = held(T2, USE_ASM)
        elif BOOK == 2:
            book_low = held(((T0 & 0xFFFFFFFF) ^ 0x80808080) - 0x77767574, USE_ASM)
        for _ in tl.static_range(REPEAT * COLUMNS):
            sums = sums + (tl.zeros([ROWS, GROUPS], tl.float32),)
        first, length, last = _part(split, N_GROUPS, GROUPS, SPLITS)
        for group in tl.range(0, length, GROUPS, loop_unroll_factor=UNROLL):
            sums = _accumulate(
                sums,
                low,
                high,
                scales,
                xq,
                xd,
                xi,
                row0,
                last_row,
                first + group,
                N_GROUPS,
                LOW_STRIDE,
                HIGH_STRIDE,
                SCALE_STRIDE,
                X_STRIDE // 4,
                X_STRIDE // 32,
                FORMAT,
                REPEAT,
                COLUMNS,
                ROWS,
                GROUPS,
                EXACT,
                False,
                book_low,
                BOOK_LOW,
                book_up,
                BOOK_UP,
                USE_ASM,
            )
        if N_GROUPS % GROUPS != 0:
            sums = _accumulate(
                sums,
                low,
                high,
                scales,
                xq,
                xd,
                xi,
                row0,
                last_row,
                N_GROUPS // GROUPS * GROUPS,
                last,
                LOW_STRIDE,
                HIGH_STRIDE,
                SCALE_STRIDE,
                X_STRIDE // 4,
                X_STRIDE // 32,
                FORMAT,
                REPEAT,
                COLUMNS,
                ROWS,
                GROUPS,
                EXACT,
                True,
                book_low,
                BOOK_LOW,
                book_up,
                BOOK_UP,
                USE_ASM,
            )
    result = ()
    for i in tl.static_range(REPEAT * COLUMNS):
        result = result + (tl.sum(sums[i], axis=1) * gain,)
    return result
