"""How each tensor type lies in a GPU's memory: the table that repacking, kernels, oracles and documentation share.

A quantized matrix is kept as *planes*, each a contiguous ``int32`` (or ``int16``) array with one row for each row of
the matrix, cut into groups of 32 elements ``e[0..31]``:

======================  ==============  ===============================================================================
plane                   words a group   content
======================  ==============  ===============================================================================
low, 4 bits             4               byte ``i`` of the 16: code of ``e[i]`` below, code of ``e[i + 16]`` above
low, 4 bits, IQ4        4               word ``j``: codes of ``e[4j..4j+3]`` in nibbles 0–3, of ``e[16+4j..]`` in 4–7
low, 8 bits             4 + 4           bytes of ``e[0..15]``; those of ``e[16..31]`` lie half a row further on
low, 2 bits             2               word ``s``, byte ``b``, bits ``2j``: code of ``e[16s + 4j + b]``
high, 1 bit             1               byte ``b``, bit ``j``: top bit of ``e[4j + b]``
high, 2 bits            2               word ``s``, byte ``b``, bits ``2j``: top bits of ``e[16s + 4j + b]``
scales                  see Scales      float16 numbers, divided by the matrix's ``gain`` (a power of two)
======================  ==============  ===============================================================================

so that a GPU thread reads a group with one 128-bit load, and a word's four bytes meet four consecutive activations in
one integer dot product. Unquantized matrices of 16 bits hold element ``i`` and element ``i + columns / 2`` in word
``i``. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

GROUP = 32
"""Elements of a group; activations are quantized by the same groups."""


class Scales(IntEnum):
    """What a group has beside its codes."""

    ONE = 0
    """``int16``: the scale."""
    MINIMUM = 1
    """``int32``: the scale below, what is added above."""
    HALVES = 2
    """``int32``: the scales of both halves of 16."""
    HALVES_MINIMUM = 3
    """Two ``int32``: scale and addend of each half of 16."""


class Plain(IntEnum):
    """Unquantized types."""

    NO = 0
    F16 = 1
    BF16 = 2
    F32 = 3


class Book(IntEnum):
    """Codebooks of 16 signed values.

    ``E2M1`` (MXFP4) isn't stored in ggml's order, but so that a code ``c`` from 8 on means ``c - 12``, and one below 8
    not less: then ``value + 12`` is ``c``, as of a plain type, and for ``c`` below 8 a byte of a table of eight more.
    """

    NONE = 0
    IQ4 = 1
    E2M1 = 2


BOOKS: dict[Book, tuple[int, ...]] = {
    Book.IQ4: (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    Book.E2M1: (-12, -8, -6, 4, 6, 8, 12, 0, -4, -3, -2, -1, 0, 1, 2, 3),
}
"""``kvalues_iq4nl`` of ggml, and the values of its ``kvalues_mxfp4`` (twice the real ones, its scales half) in the
order of our codes."""

E2M1_CODES = (12, 13, 14, 15, 3, 4, 5, 6, 12, 11, 10, 9, 8, 2, 1, 0)
"""Our code for each of ggml's."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A type as the kernels see it; ``element = scale * (code - offset) [+ addend]`` or ``scale * book[code]``.

    Attributes:
        low, high: Bits of a code in the low and the high plane.
        scales: What a group has beside its codes.
        offset: Subtracted from a code.
        book: The codebook, if there is one.
        plain: The unquantized type, if it is one.
    """

    low: int = 0
    high: int = 0
    scales: Scales = Scales.ONE
    offset: int = 0
    book: Book = Book.NONE
    plain: Plain = Plain.NO

    @property
    def code(self) -> int:
        """All of it in one number, which is what the kernels are specialised by (see ``kernels/row_dots.py``)."""
        return self.low | self.high << 4 | self.scales << 6 | self.book << 8 | self.offset << 10 | self.plain << 16

    @property
    def low_words(self) -> int:
        """32-bit words of a group in the low plane (in one half of it for 8 bits)."""
        return min(4, self.low)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a group's scales."""
        return (2, 4, 4, 8)[self.scales]

    @property
    def bytes_per_weight(self) -> float:
        """What the kernels read for one weight, padding left out."""
        if self.plain:
            return 4.0 if self.plain is Plain.F32 else 2.0
        return (GROUP * (self.low + self.high) / 8 + self.scale_bytes) / GROUP


LAYOUTS: dict[str, Layout] = {
    "F32": Layout(plain=Plain.F32),
    "F16": Layout(plain=Plain.F16),
    "BF16": Layout(plain=Plain.BF16),
    "Q4_0": Layout(4, offset=8),
    "Q4_1": Layout(4, scales=Scales.MINIMUM),
    "Q5_0": Layout(4, 1, offset=16),
    "Q5_1": Layout(4, 1, Scales.MINIMUM),
    "Q8_0": Layout(8),
    "Q2_K": Layout(2, 0, Scales.HALVES_MINIMUM),
    "Q3_K": Layout(2, 1, Scales.HALVES, offset=4),
    "Q4_K": Layout(4, scales=Scales.MINIMUM),
    "Q5_K": Layout(4, 1, Scales.MINIMUM),
    "Q6_K": Layout(4, 2, Scales.HALVES, offset=32),
    "IQ4_NL": Layout(4, book=Book.IQ4),
    "IQ4_XS": Layout(4, book=Book.IQ4),
    "MXFP4": Layout(4, book=Book.E2M1),
}
"""By GGML's name of the type."""


def padded_stride(words: int) -> int:
    """Words of a plane's row: whole 128-bit loads, and never a multiple of 512 bytes, so that the same column of
    neighbouring rows doesn't always fall into the same memory channel."""
    stride = -(-words // 4) * 4
    return stride + 32 if stride % 128 == 0 else stride
