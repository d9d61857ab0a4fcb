"""How activations lie in memory for the tile kernels: *blocks* of 1, 4, 8 or 16 rows, group by group.

A block holds, for each group of 32 columns, one entry for each of its rows, so a kernel reads it strictly forwards. For
quantised weights the entry is a *record* of one cache line:

======  =========================================================================================
bytes   content
======  =========================================================================================
0..31   32 signed bytes: the activations divided by their part's ``d``, rounded to nearest
32..39  f32 for each part, ``d``: its largest magnitude / 127
40..47  i32 for each part: minus the sum of its 16 bytes
48..55  f32 for each part: that times ``d``
56..59  f32: the sum of these two
======  =========================================================================================

A *part* is 16 columns, half a group: a scale for each of them rounds a quarter less, in mean square, than one for the
whole group would.

For floating-point weights the entry is the 32 numbers themselves. Groups are padded to an even number (to a multiple of
8 where weights have headers) with zeros.
"""

from __future__ import annotations

RECORD_BYTES = 64
PART_COLUMNS = 16
PARTS = 2
SCALES = 32
MINUS_SUMS = 40
SCALED_MINUS_SUMS = 48
SCALED_MINUS_SUM = 56
FLOAT_ENTRY_BYTES = 128

WIDTHS = (1, 4, 8, 16)
"""The rows that a block may have."""


def block_width(rows: int) -> int:
    """The block that suits a batch of ``rows``."""
    for width in WIDTHS:
        if rows <= width:
            return width
    return WIDTHS[-1]
