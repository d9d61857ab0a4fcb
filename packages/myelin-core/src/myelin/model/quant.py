"""GGML's tensor types: how many bytes a block of each takes, and how many elements are in it.

The table is checked against the ``gguf`` package's own in the tests. Names are GGML's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray


class GgmlType(IntEnum):
    """The tensor types that a GGUF file may name (``enum ggml_type``)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


RETIRED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Numbers that GGML once gave to types and then took out."""


# type: (elements in a block, bytes of a block)
BLOCKS: dict[GgmlType, tuple[int, int]] = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    GgmlType.Q8_1: (32, 40),
    GgmlType.Q2_K: (256, 84),
    GgmlType.Q3_K: (256, 110),
    GgmlType.Q4_K: (256, 144),
    GgmlType.Q5_K: (256, 176),
    GgmlType.Q6_K: (256, 210),
    GgmlType.Q8_K: (256, 292),
    GgmlType.IQ2_XXS: (256, 66),
    GgmlType.IQ2_XS: (256, 74),
    GgmlType.IQ3_XXS: (256, 98),
    GgmlType.IQ1_S: (256, 50),
    GgmlType.IQ4_NL: (32, 18),
    GgmlType.IQ3_S: (256, 110),
    GgmlType.IQ2_S: (256, 82),
    GgmlType.IQ4_XS: (256, 136),
    GgmlType.I8: (1, 1),
    GgmlType.I16: (1, 2),
    GgmlType.I32: (1, 4),
    GgmlType.I64: (1, 8),
    GgmlType.F64: (1, 8),
    GgmlType.IQ1_M: (256, 56),
    GgmlType.BF16: (1, 2),
    GgmlType.TQ1_0: (256, 54),
    GgmlType.TQ2_0: (256, 66),
    GgmlType.MXFP4: (32, 17),
    GgmlType.NVFP4: (64, 36),
    GgmlType.Q1_0: (128, 18),
}


FLOATS: frozenset[GgmlType] = frozenset({GgmlType.F32, GgmlType.F16, GgmlType.BF16})
"""The unquantized types: what norms and biases may be."""


class FormatKind(StrEnum):
    """How an element follows from its code."""

    PLAIN = "plain"
    """The element itself is stored."""
    AFFINE = "affine"
    """``scale * (code - offset) - minimum``, scale and minimum of the group."""
    CODEBOOK = "codebook"
    """``scale * values[code]``: each code selects from a fixed list of values."""
    LATTICE = "lattice"
    """Groups of elements select a whole vector from a fixed grid."""


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """A type as a kernel sees it.

    Attributes:
        kind: How an element follows from its code.
        bits: Of a code (for lattices: of storage, rounded to the nearest).
        group: Consecutive elements that share a scale.
        has_min: The group has a minimum (or base) of its own besides its scale.
        offset: What is subtracted from an affine code.
    """

    kind: FormatKind
    bits: int
    group: int
    has_min: bool = False
    offset: int = 0


FORMATS: dict[GgmlType, GroupFormat] = {
    GgmlType.F32: GroupFormat(FormatKind.PLAIN, 32, 1),
    GgmlType.F16: GroupFormat(FormatKind.PLAIN, 16, 1),
    GgmlType.BF16: GroupFormat(FormatKind.PLAIN, 16, 1),
    GgmlType.Q4_0: GroupFormat(FormatKind.AFFINE, 4, 32, offset=8),
    GgmlType.Q4_1: GroupFormat(FormatKind.AFFINE, 4, 32, has_min=True),
    GgmlType.Q5_0: GroupFormat(FormatKind.AFFINE, 5, 32, offset=16),
    GgmlType.Q5_1: GroupFormat(FormatKind.AFFINE, 5, 32, has_min=True),
    GgmlType.Q8_0: GroupFormat(FormatKind.AFFINE, 8, 32),
    GgmlType.Q2_K: GroupFormat(FormatKind.AFFINE, 2, 16, has_min=True),
    GgmlType.Q3_K: GroupFormat(FormatKind.AFFINE, 3, 16, offset=4),
    GgmlType.Q4_K: GroupFormat(FormatKind.AFFINE, 4, 32, has_min=True),
    GgmlType.Q5_K: GroupFormat(FormatKind.AFFINE, 5, 32, has_min=True),
    GgmlType.Q6_K: GroupFormat(FormatKind.AFFINE, 6, 16, offset=32),
    GgmlType.TQ1_0: GroupFormat(FormatKind.AFFINE, 2, 256, offset=1),
    GgmlType.TQ2_0: GroupFormat(FormatKind.AFFINE, 2, 256, offset=1),
    GgmlType.IQ4_NL: GroupFormat(FormatKind.CODEBOOK, 4, 32),
    GgmlType.IQ4_XS: GroupFormat(FormatKind.CODEBOOK, 4, 32),
    GgmlType.MXFP4: GroupFormat(FormatKind.CODEBOOK, 4, 32),
    GgmlType.IQ1_S: GroupFormat(FormatKind.LATTICE, 2, 32),
    GgmlType.IQ1_M: GroupFormat(FormatKind.LATTICE, 2, 16),
    GgmlType.IQ2_XXS: GroupFormat(FormatKind.LATTICE, 2, 32),
    GgmlType.IQ2_XS: GroupFormat(FormatKind.LATTICE, 2, 16),
    GgmlType.IQ2_S: GroupFormat(FormatKind.LATTICE, 2, 16),
    GgmlType.IQ3_XXS: GroupFormat(FormatKind.LATTICE, 3, 32),
    GgmlType.IQ3_S: GroupFormat(FormatKind.LATTICE, 3, 32),
}
"""The types that weights of a model may have, each as a group format."""

READABLE: frozenset[GgmlType] = frozenset(FORMATS)
"""The types for which there is an oracle (:func:`dequantize`), so that at least the reference engine computes them."""


def row_bytes(ggml_type: GgmlType, columns: int) -> int:
    """Bytes of a row of ``columns`` elements.

    Raises:
        ValueError: ``columns`` is not a whole number of blocks.
    """
    elements, size = BLOCKS[ggml_type]
    if columns % elements:
        raise ValueError(f"{columns} elements are not a whole number of {ggml_type.name} blocks of {elements}")
    return columns // elements * size


def dequantize(ggml_type: GgmlType, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The oracle: what stored rows mean, by the ``gguf`` package's own NumPy code.

    Args:
        ggml_type: One of :data:`READABLE`.
        rows: ``uint8[n, row_bytes]``, C-contiguous.

    Returns:
        ``float32[n, columns]``, new memory.

    Raises:
        ValueError: The type is not readable, or ``row_bytes`` is not a whole number of its blocks.
    """
    if ggml_type not in READABLE:
        raise ValueError(f"{ggml_type.name} has no dequantizer")
    block_elements, block_bytes = BLOCKS[ggml_type]
    count, size = rows.shape
    if size % block_bytes:
        raise ValueError(f"{size} bytes are not a whole number of {ggml_type.name} blocks of {block_bytes}")
    if ggml_type in _PLAIN_DTYPES:
        return rows.view(_PLAIN_DTYPES[ggml_type]).astype(np.float32)
    if ggml_type is GgmlType.BF16:
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    from gguf import GGMLQuantizationType, quants  # imported late: the package costs a tenth of a second

    columns = size // block_bytes * block_elements
    values = quants.dequantize(rows, GGMLQuantizationType(int(ggml_type)))
    return np.ascontiguousarray(values, dtype=np.float32).reshape(count, columns)


_PLAIN_DTYPES: dict[GgmlType, str] = {GgmlType.F32: "<f4", GgmlType.F16: "<f2"}
