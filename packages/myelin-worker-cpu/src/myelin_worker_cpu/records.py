"""How activations lie in memory for the tile kernels: *blocks* of 1, 4 or 16 rows, group by group.

A block holds, for each group of 32 columns, one entry for each of its rows, so a kernel reads it strictly forwards. For
quantised weights the entry is a *record* of one cache line:

======  =========================================================================================
bytes   content
======  =========================================================================================
0..31   32 signed bytes: the activations divided by ``d``, rounded to nearest
32..35  f32 ``d``: the largest magnitude / 127
36..39  f32: minus the sum of the 32 bytes
40..43  i32: the same
44..51  i32 twice: minus the sum of the first and of the last 16 bytes
======  =========================================================================================

For floating-point weights it is the 32 numbers themselves. Groups are padded to an even number (to a multiple of 8
where weights have headers) with zeros.
"""

from __future__ import annotations

RECORD_BYTES = 64
SCALE = 32
MINUS_SUM_FLOAT = 36
MINUS_SUM = 40
MINUS_SUM_16 = 44
FLOAT_ENTRY_BYTES = 128

WIDTHS = (1, 4, 16)
"""The rows that a block may have."""


def block_width(rows: int) -> int:
    """The block that suits a batch of ``rows``."""
    for width in WIDTHS:
        if rows <= width:
            return width
    return WIDTHS[-1]
