"""How each GGML type is held for the kernels: *tiles* of 16 rows, cut into *slabs* of 64 columns.

GGML keeps a row's blocks one after another, so that a dot product ends in a sum across a vector register. Here one
register lane is one row: 16 rows are interleaved, four columns at a time, and 16 dot products grow side by side without
any horizontal sum. A matrix is a sequence of tiles, a tile a sequence of slabs, and everything that a slab needs lies
together, so that a matrix-vector product reads memory strictly forwards.

The codes of a slab (16 rows by 64 columns, as two *groups* of 32) are kept in one or two *planes*:

========  =====================================================================================================
plane     bytes of a group of 32 columns
========  =====================================================================================================
byte      512: vector ``q`` (0..7) of 64 bytes has columns ``4q..4q+3`` of row ``r`` in its bytes ``4r..4r+3``
nibble    256: vector ``q`` (0..3): columns ``4q..`` in the low halves, columns ``16+4q..`` in the high halves
pair      128: vector ``h`` (0..1): columns ``4q..`` with ``q = 4h+s`` in bits ``2s..2s+1``
bit       64: 64-bit word ``q`` (0..7): the bits of the 64 codes of vector ``q``
========  =====================================================================================================

A second plane holds the bits above the first's. A weight is ``scale * (code - offset) - minimum``, where scale and
minimum are per row and group of 32 (or 16) columns. The K types have 4-bit, 6-bit or 8-bit scales, to be multiplied by
the 16-bit scales of a *header*, one for every four slabs (256 columns). Scales of 6 bits are packed in the header, all
others lie in their slab. Nothing is rounded: a tile holds exactly what the file holds.

Packed scales are three vectors of 64 bytes. Of the 64 numbers of slab ``s`` (for each of its groups 16 scales, then 16
minimums) the first three slabs have theirs in the low six bits of vector ``s``, and the fourth has two bits of each at
the top of every vector, the lowest two in the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from myelin.engine_api import GgmlType

TILE_ROWS = 16
GROUP_COLUMNS = 32
SLAB_GROUPS = 2
SLAB_COLUMNS = GROUP_COLUMNS * SLAB_GROUPS
HEADER_SLABS = 4


class Plane(IntEnum):
    """A plane of codes; the value is the number of bits of each."""

    NONE = 0
    BIT = 1
    PAIR = 2
    NIBBLE = 4
    BYTE = 8


class Scales(IntEnum):
    """How scales and minimums are kept; in brackets their bytes in a slab for each group of 32 columns."""

    FLOAT = 0
    """None: the elements are floating-point numbers."""
    HALF = 1
    """A 16-bit float (32)."""
    HALF_MIN = 2
    """A 16-bit float scale and minimum (64). The minimum is kept with the sign that makes it one to subtract."""
    SUPER_MIN = 3
    """Six bits each for scale and minimum, times the header's two 16-bit floats, packed there (0): Q4_K, Q5_K."""
    SUPER_16 = 4
    """A signed byte for each 16 columns, times the header's 16-bit float (32): Q6_K, Q3_K."""
    SUPER_16_MIN = 5
    """Nibbles of scale (low) and minimum (high) for each 16 columns, times the header's two floats (32): Q2_K."""


SCALE_BYTES = {
    Scales.FLOAT: 0,
    Scales.HALF: 32,
    Scales.HALF_MIN: 64,
    Scales.SUPER_MIN: 0,
    Scales.SUPER_16: 32,
    Scales.SUPER_16_MIN: 32,
}

FLOAT_HEADER_BYTES = 64
"""Two vectors of 16-bit floats, with which a header begins."""
PACKED_VECTORS = 3
"""Vectors of packed scales that follow them."""
HEADER_BYTES = {
    Scales.FLOAT: 0,
    Scales.HALF: 0,
    Scales.HALF_MIN: 0,
    Scales.SUPER_MIN: FLOAT_HEADER_BYTES + 64 * PACKED_VECTORS,
    Scales.SUPER_16: FLOAT_HEADER_BYTES,
    Scales.SUPER_16_MIN: FLOAT_HEADER_BYTES,
}


@dataclass(frozen=True, slots=True)
class TileFormat:
    """The tiles of one GGML type.

    Attributes:
        ggml_type: Which.
        low, high: The planes of codes; both ``NONE`` for a type of floating-point numbers.
        offset: Subtracted from every code.
        scales: See :class:`Scales`.
        element_bytes: Of a floating-point number, otherwise 0.
    """

    ggml_type: GgmlType
    low: Plane = Plane.NONE
    high: Plane = Plane.NONE
    offset: int = 0
    scales: Scales = Scales.FLOAT
    element_bytes: int = 0

    @property
    def is_float(self) -> bool:
        """The elements are floating-point numbers, to be multiplied with unquantised activations."""
        return self.element_bytes > 0

    @property
    def low_bytes(self) -> int:
        """Bytes of a group's low plane, or of its floating-point elements."""
        if self.is_float:
            return TILE_ROWS * GROUP_COLUMNS * self.element_bytes
        return TILE_ROWS * GROUP_COLUMNS * self.low // 8

    @property
    def high_bytes(self) -> int:
        """Bytes of a group's high plane."""
        return TILE_ROWS * GROUP_COLUMNS * self.high // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of a group's scales and minimums."""
        return SCALE_BYTES[self.scales]

    @property
    def high_start(self) -> int:
        """Where the high planes begin in a slab."""
        return SLAB_GROUPS * self.low_bytes

    @property
    def scale_start(self) -> int:
        """Where the scales begin in a slab."""
        return self.high_start + SLAB_GROUPS * self.high_bytes

    @property
    def slab_bytes(self) -> int:
        """Bytes of a slab, always a multiple of 64."""
        return self.scale_start + SLAB_GROUPS * self.scale_bytes

    @property
    def header_bytes(self) -> int:
        """Bytes before every :data:`HEADER_SLABS` slabs: two vectors of 16-bit floats and packed scales, or nothing."""
        return HEADER_BYTES[self.scales]

    def slabs(self, columns: int) -> int:
        """Slabs of a row of ``columns`` elements; a last one that isn't full is padded with zero weights."""
        slabs = -(-columns // SLAB_COLUMNS)
        return -(-slabs // HEADER_SLABS) * HEADER_SLABS if self.header_bytes else slabs

    def tile_bytes(self, columns: int) -> int:
        """Bytes of a tile of ``columns`` columns."""
        slabs = self.slabs(columns)
        return slabs * self.slab_bytes + slabs // HEADER_SLABS * self.header_bytes

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix."""
        return tiles(rows) * self.tile_bytes(columns)


def tiles(rows: int) -> int:
    """Tiles of a matrix of ``rows`` rows; a last one that isn't full is padded with zero weights."""
    return -(-rows // TILE_ROWS)


_FORMATS = (
    TileFormat(GgmlType.F32, element_bytes=4),
    TileFormat(GgmlType.F16, element_bytes=2),
    TileFormat(GgmlType.BF16, element_bytes=2),
    TileFormat(GgmlType.Q4_0, Plane.NIBBLE, offset=8, scales=Scales.HALF),
    TileFormat(GgmlType.Q4_1, Plane.NIBBLE, scales=Scales.HALF_MIN),
    TileFormat(GgmlType.Q5_0, Plane.NIBBLE, Plane.BIT, offset=16, scales=Scales.HALF),
    TileFormat(GgmlType.Q5_1, Plane.NIBBLE, Plane.BIT, scales=Scales.HALF_MIN),
    TileFormat(GgmlType.Q8_0, Plane.BYTE, offset=128, scales=Scales.HALF),
    TileFormat(GgmlType.Q2_K, Plane.PAIR, scales=Scales.SUPER_16_MIN),
    TileFormat(GgmlType.Q3_K, Plane.PAIR, Plane.BIT, offset=4, scales=Scales.SUPER_16),
    TileFormat(GgmlType.Q4_K, Plane.NIBBLE, scales=Scales.SUPER_MIN),
    TileFormat(GgmlType.Q5_K, Plane.NIBBLE, Plane.BIT, scales=Scales.SUPER_MIN),
    TileFormat(GgmlType.Q6_K, Plane.NIBBLE, Plane.PAIR, offset=32, scales=Scales.SUPER_16),
)

FORMATS: dict[GgmlType, TileFormat] = {entry.ggml_type: entry for entry in _FORMATS}
"""The tile format of every type that the engine computes."""

SUPPORTED_TYPES: frozenset[GgmlType] = frozenset(FORMATS)
