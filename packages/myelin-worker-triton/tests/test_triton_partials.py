"""Projections that are split along their columns: the product, the same bits in every batch, and the rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myelin.model.quant import GgmlType
from myelin_testkit.blocks import random_blocks
from myelin_worker_triton import operators as op
from myelin_worker_triton.interpreting import speed_up
from myelin_worker_triton.partials import Partials, passes, splits_for
from myelin_worker_triton.planes import Matrix, read_planes, repack
from myelin_worker_triton.tuning import INTERPRETER, NVIDIA

TUNING = replace(INTERPRETER, rows=16, groups=2, block=128, multiprocessors=8, repeat=((1, 2), (2, 2), (4, 1), (8, 1)))


@pytest.fixture(autouse=True, scope="module")
def _fast() -> None:
    speed_up()


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(7)


def make(kind: str, rows: int, columns: int, generator: np.random.Generator) -> Matrix:
    raw = random_blocks(GgmlType[kind], rows, columns, generator, deviation=0.05)
    return repack(kind, rows, columns, [torch.from_numpy(raw)])


def floats(generator: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(generator.normal(0, 1, shape).astype(np.float32))


def fill(x: torch.Tensor) -> op.Activations:
    rows = op.Activations.of(x.shape[0], x.shape[1], "cpu")
    rows.plain[:, : x.shape[1]] = x
    op.launch_quantise(TUNING, rows, x.shape[0])
    return rows


def product(matrix: Matrix, rows: op.Activations) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Of what the kernel reads, in float64."""
    codes = rows.codes.numpy().astype(np.float64).reshape(len(rows.codes), -1, 32)
    meant = (codes * rows.scales.numpy()[:, :, None]).reshape(len(codes), -1)
    x = rows.plain.numpy() if matrix.layout.plain else meant
    found: np.ndarray[tuple[int, int], np.dtype[np.float64]] = (
        x[:, : matrix.columns].astype(np.float64) @ read_planes(matrix).T
    )
    return found


def near(found: torch.Tensor, expected: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> None:
    assert np.abs(found.numpy() - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("kind", "rows", "k"),
    [
        ("Q4_K", 33, 512),
        ("Q6_K", 16, 768),
        ("Q8_0", 1, 288),
        ("Q4_0", 50, 416),
        ("IQ4_NL", 17, 320),
        ("MXFP4", 32, 352),
        ("F16", 19, 146),
        ("F32", 5, 77),
    ],
)
def test_a_split_product_is_the_product(kind: str, rows: int, k: int, generator: np.random.Generator) -> None:
    matrix, x = make(kind, rows, k, generator), fill(floats(generator, 2, k))
    partials = Partials.of(TUNING, "cpu")
    before = floats(generator, 2, rows)
    out = before.clone()
    assert splits_for(TUNING, (matrix,), rows, prologue=False) > 1
    op.launch_project(TUNING, x, (matrix,), out, columns=2, add=True, partials=partials)
    near(out, before.numpy() + product(matrix, x))
    assert not partials.counters.any()


def test_the_parts_are_added_in_their_order(generator: np.random.Generator) -> None:
    """Whichever program is last."""
    matrix, x = make("Q4_1", 21, 512, generator), fill(floats(generator, 1, 512))
    partials, out = Partials.of(TUNING, "cpu"), torch.zeros((1, 21))
    splits = splits_for(TUNING, (matrix,), 21, prologue=False)
    op.launch_project(TUNING, x, (matrix,), out, columns=1, partials=partials)
    parts = partials.values[: splits * 21].reshape(splits, 21)
    assert splits == 8
    total = parts[0]
    for part in parts[1:]:
        assert part.any()
        total = total + part
    np.testing.assert_array_equal(out[0], total)


def test_a_column_does_not_feel_the_others(generator: np.random.Generator) -> None:
    """Three matrices of different types, with a norm before and a bias."""
    matrices = tuple(make(kind, rows, 256, generator) for kind, rows in (("Q4_K", 33), ("F16", 7), ("IQ4_XS", 16)))
    rows = sum(matrix.rows for matrix in matrices)
    x, weight, bias = floats(generator, 8, 256), floats(generator, 256), floats(generator, rows)
    partials = Partials.of(TUNING, "cpu")
    assert splits_for(TUNING, matrices, rows, prologue=True) == 2

    def run(first: int, columns: int) -> torch.Tensor:
        out = torch.zeros((columns, rows))
        op.launch_project(
            TUNING,
            op.Activations.of(columns, 256, "cpu"),
            matrices,
            out,
            columns=columns,
            prologue=op.Prologue(x[first : first + columns], weight, 1e-5),
            bias=bias,
            partials=partials,
        )
        return out

    alone = torch.cat([run(row, 1) for row in (0, 3)])
    for columns in (4, 8):
        np.testing.assert_array_equal(run(0, columns)[[0, 3]], alone)


def test_a_soft_cap_comes_after_the_sum(generator: np.random.Generator) -> None:
    matrix, x = make("Q5_0", 20, 256, generator), fill(floats(generator, 1, 256))
    out = torch.zeros((1, 20))
    op.launch_project(TUNING, x, (matrix,), out, columns=1, softcap=0.5, partials=Partials.of(TUNING, "cpu"))
    near(out, 0.5 * np.tanh(product(matrix, x) / 0.5))


def empty(kind: str, rows: int, columns: int) -> Matrix:
    none = torch.empty(0, device="meta")
    return Matrix(kind, rows, columns, none, none, none, 1.0)


@pytest.mark.parametrize(
    ("rows", "columns", "prologue", "splits"),
    [
        (4096, 4096, False, 2),  # an 8B model's attention output: 256 tiles, room for 528
        (2048, 8192, False, 4),  # a 1B model's down projection
        (3072, 2048, True, 1),  # its queries, keys and values: 192 tiles keep 132 multiprocessors busy
        (1024, 4096, True, 2),  # keys and values alone
        (256, 2048, False, 2),  # no more parts than rounds of the loop
        (256, 512, False, 1),
        (128256, 4096, False, 1),
    ],
)
def test_few_rows_are_split(rows: int, columns: int, prologue: bool, splits: int) -> None:
    assert splits_for(NVIDIA, (empty("Q4_K", rows, columns),), rows, prologue=prologue) == splits


@given(
    st.lists(st.tuples(st.sampled_from(["Q4_K", "F16", "F32"]), st.integers(1, 9000)), min_size=1, max_size=3),
    st.integers(1, 64).map(lambda blocks: blocks * 256),
    st.booleans(),
)
def test_what_is_split_fits_into_the_scratch(parts: list[tuple[str, int]], columns: int, prologue: bool) -> None:
    matrices = [empty(kind, rows, columns) for kind, rows in parts]
    rows = sum(matrix.rows for matrix in matrices)
    splits = splits_for(NVIDIA, matrices, rows, prologue=prologue)
    scratch = Partials.of(NVIDIA, "meta")
    assert splits in (1, 2, 4, 8)
    assert scratch.values.numel() * 4 + scratch.counters.numel() * 4 == Partials.nbytes(NVIDIA)
    if splits > 1:
        assert splits <= min(passes(matrix, NVIDIA.groups) for matrix in matrices)
        for count, repeat in (*NVIDIA.repeat, (1, NVIDIA.book_repeat)):
            assert splits * count * rows <= scratch.values.numel()
            tiles = sum(-(-matrix.rows // (repeat * NVIDIA.rows)) for matrix in matrices)
            assert tiles <= scratch.counters.numel()
