"""Rows on their way into a matrix and out of it: norms, the blocks that products take, and the residual stream."""

from __future__ import annotations

import math

import numpy as np

from myelin_worker_cpu import records as r
from myelin_worker_cpu import tables as t
from myelin_worker_cpu.jit import inlined
from myelin_worker_cpu.row_ops import add_to, copy_group, quantise_group, scale_by, sum_squares


@inlined
def normalise(source: int, weight: int, size: int, epsilon: float, target: int) -> None:
    """RMS norm of a row of ``size`` numbers, padded with zeros to whole vectors."""
    vectors = (size + 15) // 16
    mean = sum_squares(source, vectors) / np.float32(size)
    scale_by(source, weight, np.float32(1.0) / math.sqrt(mean + epsilon), target, vectors)


@inlined
def arrange(row: int, columns: int, index: int, width: int, needs: int, records: int, numbers: int) -> None:
    """Put a row (address ``row``, padded with zeros) as number ``index`` into the blocks of a matrix's input."""
    groups = (columns + 31) // 32
    slots = (columns + 63) // 64 * 2
    first = index // width * slots * width + index % width
    if needs & t.NEEDS_RECORDS:
        for group in range(groups):
            quantise_group(row + group * 128, records + (first + group * width) * r.RECORD_BYTES)
    if needs & t.NEEDS_FLOATS:
        for group in range(groups):
            copy_group(row + group * 128, numbers + (first + group * width) * r.FLOAT_ENTRY_BYTES)


@inlined
def add_projected(x: int, projected: int, post_norm: int, size: int, epsilon: float, scratch: int) -> None:
    """Add a block's output to the residual stream, through its post norm where there is one.

    ``projected`` is not changed: with a single row every thread reads it.
    """
    if post_norm:
        normalise(projected, post_norm, size, epsilon, scratch)
        add_to(x, scratch, (size + 15) // 16)
    else:
        add_to(x, projected, (size + 15) // 16)
