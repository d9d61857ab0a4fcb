"""What the launches of :mod:`myelin_worker_triton.operators` work on: activations, heads, keys and values, places,
scratch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from myelin_worker_triton.tuning import Tuning

Tensor = torch.Tensor


def padded(columns: int) -> int:
    """Elements of a row of activations: whole groups."""
    return -(-columns // 32) * 32


def power_of_two(number: int, least: int = 1) -> int:
    """The next power of two that isn't below ``number`` or ``least``."""
    return max(least, 1 << max(0, number - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Activations:
    """Rows of activations for a projection of ``columns`` elements.

    Attributes:
        codes: ``int8[rows, stride]``; scales: ``float32[rows, stride / 32]``; sums: ``int32`` of that shape.
        plain: ``float32[rows, stride]``.
    """

    columns: int
    codes: Tensor
    scales: Tensor
    sums: Tensor
    plain: Tensor

    @classmethod
    def of(cls, rows: int, columns: int, device: torch.device | str) -> Activations:
        """Zeros."""
        stride = padded(columns)
        return cls(
            columns,
            torch.zeros((rows, stride), dtype=torch.int8, device=device),
            torch.zeros((rows, stride // 32), dtype=torch.float32, device=device),
            torch.zeros((rows, stride // 32), dtype=torch.int32, device=device),
            torch.zeros((rows, stride), dtype=torch.float32, device=device),
        )

    @property
    def stride(self) -> int:
        """Elements of a row."""
        return int(self.codes.shape[1])

    def rows(self, first: int, count: int) -> Activations:
        """A view of some rows."""
        end = first + count
        return Activations(
            self.columns, self.codes[first:end], self.scales[first:end], self.sums[first:end], self.plain[first:end]
        )


@dataclass(frozen=True, slots=True)
class Prologue:
    """What comes before a projection: see ``kernels/normalise.py``.

    Attributes:
        x: ``float32[columns, K]``, the residual stream.
        weight: The norm's.
        y, post_weight, x_out: With a normalised block output to be added first; otherwise None.
    """

    x: Tensor
    weight: Tensor
    epsilon: float
    y: Tensor | None = None
    post_weight: Tensor | None = None
    x_out: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Halves:
    """Rows of float16 activations: ``float16[rows, stride]`` and a factor ``float32[rows]`` each."""

    columns: int
    values: Tensor
    factors: Tensor

    @classmethod
    def of(cls, rows: int, columns: int, device: torch.device | str) -> Halves:
        """Zeros."""
        values = torch.zeros((rows, padded(columns)), dtype=torch.float16, device=device)
        return cls(columns, values, torch.zeros(rows, dtype=torch.float32, device=device))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The attention heads of a model."""

    n_heads: int
    kv_heads: int
    head: int
    value: int
    rope_dims: int
    halves: bool
    epsilon: float
    scale: float
    cap: float = 0.0

    @property
    def shared(self) -> int:
        """Query heads that share a key head."""
        return self.n_heads // self.kv_heads

    @property
    def row(self) -> int:
        """Elements of a row of queries, keys and values."""
        return (self.n_heads + self.kv_heads) * self.head + self.kv_heads * self.value

    @property
    def output(self) -> int:
        """Elements of a row of what attention gives."""
        return self.n_heads * self.value

    @property
    def whole_groups(self) -> bool:
        """Whether one kv head's output is whole groups, so that its program can quantise it."""
        return self.shared * self.value % 32 == 0


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the norms over a head's query and key, ``float32[head]``."""

    query: Tensor
    key: Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer: see ``kernels/heads.py``."""

    kind: str
    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows of a batch are: ``int32[rows]`` positions and slots, ``int32[slots, pages]`` page numbers."""

    positions: Tensor
    slots: Tensor
    pages: Tensor

    def rows(self, first: int, count: int) -> Places:
        """A view of some rows."""
        return Places(self.positions[first : first + count], self.slots[first : first + count], self.pages)


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines, ``float32[positions, rope_dims / 2]`` each."""

    cosines: Tensor
    sines: Tensor


@dataclass(frozen=True, slots=True)
class Runs:
    """Consecutive positions of one sequence, up to ``size`` each: first row and number of rows, ``int32[runs]``."""

    rows: Tensor
    counts: Tensor
    size: int


@dataclass(frozen=True, slots=True)
class Splits:
    """Scratch of split attention, for up to ``rows`` rows at once; see ``kernels/attention.py``."""

    values: Tensor
    sums: Tensor
    counters: Tensor
    rows: int
    splits: int

    @staticmethod
    def row_bytes(tuning: Tuning, heads: HeadShape, splits: int) -> int:
        """Bytes that one row takes."""
        shared, value = power_of_two(heads.shared, tuning.least_shared), power_of_two(heads.value, 32)
        return heads.kv_heads * splits * shared * (value + 2) * 4

    @classmethod
    def of(cls, tuning: Tuning, heads: HeadShape, rows: int, splits: int, device: torch.device | str) -> Splits:
        """Zeros."""
        shared, value = power_of_two(heads.shared, tuning.least_shared), power_of_two(heads.value, 32)
        unit = rows * heads.kv_heads * splits * shared
        return cls(
            torch.zeros(unit * value, dtype=torch.float32, device=device),
            torch.zeros(unit * 2, dtype=torch.float32, device=device),
            torch.zeros(rows * heads.kv_heads, dtype=torch.int32, device=device),
            rows,
            splits,
        )
