"""Split-K: a projection of few rows is cut along its columns too, so that every multiprocessor has something to do.

Each split leaves its sums in scratch; the program that is last for a tile adds them, in their order (see
``kernels/project.py``). Into how many a projection is cut depends on its matrices and on the device, never on the
number of columns of activations: so a column gives the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from myelin_worker_triton.layouts import GROUP, Plain
from myelin_worker_triton.planes import Matrix
from myelin_worker_triton.tuning import Tuning

MOST_COLUMNS = 8
"""Columns of one launch of a projection."""

MOST_SPLITS = 8
"""Of one projection."""


@dataclass(frozen=True, slots=True)
class Partials:
    """Scratch of split projections, which launches one after the other share.

    Attributes:
        values: ``float32``, by split, column and row.
        counters: ``int32``, one for each tile of rows, zero between launches.
    """

    values: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def of(cls, tuning: Tuning, device: torch.device | str) -> Partials:
        """Zeros, enough for whatever :func:`splits_for` splits on such a device."""
        values = torch.zeros(MOST_COLUMNS * _most_rows(tuning), dtype=torch.float32, device=device)
        counters = torch.zeros(_most_rows(tuning) // tuning.rows + 3, dtype=torch.int32, device=device)
        return cls(values, counters)

    @staticmethod
    def nbytes(tuning: Tuning) -> int:
        """Bytes that :meth:`of` takes."""
        rows = _most_rows(tuning)
        return 4 * (MOST_COLUMNS * rows + rows // tuning.rows + 3)


def _tile(tuning: Tuning) -> int:
    """Rows of a program with one column: what all numbers of columns are split by."""
    return tuning.repeat_for(1) * tuning.rows


def _most_rows(tuning: Tuning) -> int:
    """Splits times rows of the largest projection that is split."""
    return tuning.multiprocessors * tuning.programs * _tile(tuning)


def passes(matrix: Matrix, groups: int) -> int:
    """Whole rounds of the loop over a row, ``groups`` groups of 32 (of four words) each."""
    if matrix.layout.plain:
        words = matrix.columns if matrix.layout.plain is Plain.F32 else matrix.columns // 2
        return words // (4 * groups)
    return matrix.columns // GROUP // groups


def splits_for(tuning: Tuning, matrices: Sequence[Matrix], stride: int, *, prologue: bool) -> int:
    """Into how many parts a projection is cut along its columns: a power of two, 1 for not at all.

    As many as there is room for on the device, each with one round of the loop at least. Every program does a prologue
    by itself, so with one only multiprocessors that would have nothing to do are worth filling.

    Args:
        stride: Elements of a row of what is computed, which scratch is addressed by.
        prologue: A norm comes before.
    """
    tile = _tile(tuning)
    tiles = sum(-(-matrix.rows // tile) for matrix in matrices)
    room = tuning.multiprocessors * (1 if prologue else tuning.programs)
    most = min(MOST_SPLITS, _most_rows(tuning) // stride, *(passes(matrix, tuning.groups) for matrix in matrices))
    splits = 1
    while splits * 2 <= most and tiles * splits * 2 <= room:
        splits *= 2
    return splits
