"""Each kernel in the interpreter against a float64 oracle: every type, odd shapes, every number of columns."""

# Triton has no types, and writes constants in capitals.
# mypy: disable-error-code="import-untyped, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from myelin.model.quant import BLOCKS, GgmlType
from myelin_testkit.blocks import random_blocks
from myelin_worker_triton import operators as op
from myelin_worker_triton.interpreting import speed_up
from myelin_worker_triton.kernels.integer_dot import (
    both_halves,
    dot4_signed,
    dot4_unsigned,
    interleaved,
    look_up8,
    pick8,
)
from myelin_worker_triton.kernels.quantise import quantise
from myelin_worker_triton.layouts import BOOKS, LAYOUTS, Book
from myelin_worker_triton.planes import Matrix, read_planes, repack
from myelin_worker_triton.stage import column_blocks, rope_tables
from myelin_worker_triton.tuning import INTERPRETER

Doubles = NDArray[np.float64]

TUNING = replace(INTERPRETER, rows=16, wide_rows=32, block=128, page=16, pages_a_split=2, vocabulary_block=64)
GPU_LIKE = replace(TUNING, rows=4, groups=32, repeat=((1, 4), (2, 4), (4, 2), (8, 2)), wide_rows=8, wide_repeat=4)
GPU_LIKE = replace(GPU_LIKE, book_repeat=8, wide_book_repeat=8)
"""The tiles of a GPU: a warp's 32 groups, several tiles of rows a pass."""


@pytest.fixture(autouse=True, scope="module")
def _fast() -> None:
    speed_up()


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(3)


def make(kind: str, rows: int, columns: int, generator: np.random.Generator) -> Matrix:
    raw = random_blocks(GgmlType[kind], rows, columns, generator, deviation=0.05)
    return repack(kind, rows, columns, [torch.from_numpy(raw)])


def floats(generator: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(generator.normal(0, 1, shape).astype(np.float32))


def fill(x: torch.Tensor) -> op.Activations:
    """Activations with these rows, quantised by the kernel."""
    rows = op.Activations.of(x.shape[0], x.shape[1], "cpu")
    rows.plain[:, : x.shape[1]] = x
    op.launch_quantise(TUNING, rows, x.shape[0])
    return rows


def meaning(rows: op.Activations) -> Doubles:
    """What quantised rows mean."""
    codes = rows.codes.numpy().astype(np.float64).reshape(len(rows.codes), -1, 32)
    scaled: Doubles = codes * rows.scales.numpy().astype(np.float64)[:, :, None]
    return scaled.reshape(len(codes), -1)[:, : rows.columns]


def inputs(matrix: Matrix, rows: op.Activations) -> Doubles:
    """What a projection by ``matrix`` really multiplies."""
    return rows.plain[:, : rows.columns].numpy().astype(np.float64) if matrix.layout.plain else meaning(rows)


def near(found: torch.Tensor, expected: Doubles, tolerance: float = 1e-4) -> None:
    """Relative to the largest of what is expected."""
    assert found.shape == expected.shape
    assert np.abs(found.numpy() - expected).max() <= tolerance * max(float(np.abs(expected).max()), 1e-6)


def block_of(kind: str) -> int:
    return max(32, BLOCKS[GgmlType[kind]][0])


# The two steps that are one instruction on a GPU.


@triton.jit
def _dots(a: Any, x: Any, c: Any, unsigned: Any, signed: Any, N: tl.constexpr) -> None:
    at = tl.arange(0, N)
    tl.store(unsigned + at, dot4_unsigned(tl.load(a + at), tl.load(x + at), tl.load(c + at), False))
    tl.store(signed + at, dot4_signed(tl.load(a + at), tl.load(x + at), tl.load(c + at), False))


def test_dots_of_four_bytes(generator: np.random.Generator) -> None:
    a, x = (torch.from_numpy(generator.integers(0, 256, (64, 4), dtype=np.uint8)) for _ in range(2))
    c = torch.from_numpy(generator.integers(-1000, 1000, 64, dtype=np.int32))
    unsigned, signed = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    _dots[(1,)](a.view(torch.int32), x.view(torch.int32), c, unsigned, signed, N=64)
    wide, wide_x = a.numpy().astype(int), x.numpy().view(np.int8).astype(int)
    np.testing.assert_array_equal(unsigned, (wide * wide_x).sum(1) + c.numpy())
    np.testing.assert_array_equal(signed, (a.numpy().view(np.int8).astype(int) * wide_x).sum(1) + c.numpy())


@triton.jit
def _books(
    codes: Any,
    low: Any,
    up: Any,
    T0: tl.constexpr,
    T1: tl.constexpr,
    T2: tl.constexpr,
    T3: tl.constexpr,
    N: tl.constexpr,
) -> None:
    at = tl.arange(0, N)
    lower, upper = look_up8(tl.load(codes + at), T0, T1, T2, T3, False)
    tl.store(low + at, lower)
    tl.store(up + at, upper)


def nibbles(generator: np.random.Generator) -> tuple[NDArray[np.int64], torch.Tensor]:
    """Codes ``[32, 8]``, and the words that hold them."""
    codes = generator.integers(0, 16, (32, 8))
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return codes, torch.from_numpy(packed).view(torch.int32)[:, 0].contiguous()


def test_looking_up_nibbles(generator: np.random.Generator) -> None:
    codes, words = nibbles(generator)
    low, up = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    t = [int(word) for word in np.abs(np.array(BOOKS[Book.IQ4])).astype(np.uint8).view(np.int32)]
    _books[(1,)](words, low, up, T0=t[0], T1=t[1], T2=t[2], T3=t[3], N=32)
    expected = np.array(BOOKS[Book.IQ4])[codes] + 128
    np.testing.assert_array_equal(low.view(torch.uint8).reshape(32, 4), expected[:, :4])
    np.testing.assert_array_equal(up.view(torch.uint8).reshape(32, 4), expected[:, 4:])


@triton.jit
def _picks(codes: Any, low: Any, up: Any, x: Any, y: Any, T0: tl.constexpr, T1: tl.constexpr, N: tl.constexpr) -> None:
    at = tl.arange(0, N)
    lower, upper = pick8(tl.load(codes + at), T0, T1, False)
    tl.store(low + at, lower)
    tl.store(up + at, upper)
    first, second = interleaved(tl.load(x + at), tl.load(y + at), False)
    tl.store(x + at, first)
    tl.store(y + at, second)


MORE = np.array(BOOKS[Book.E2M1][:8]) + 12 - np.arange(8)
"""What a value of E2M1 below code 8 has more than ``code - 12``."""


def test_picking_for_the_nibbles_below_eight(generator: np.random.Generator) -> None:
    codes, words = nibbles(generator)
    low, up = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    x, y = (generator.integers(0, 256, (32, 4)).astype(np.uint8) for _ in range(2))
    first, second = (torch.from_numpy(v.copy()).view(torch.int32)[:, 0].contiguous() for v in (x, y))
    t = [int(word) for word in MORE.astype(np.uint8).view(np.int32)]
    _picks[(1,)](words, low, up, first, second, T0=t[0], T1=t[1], N=32)
    found = np.concatenate([word.view(torch.uint8).reshape(32, 4).numpy() for word in (low, up)], 1)
    np.testing.assert_array_equal(found + codes - 12, np.array(BOOKS[Book.E2M1])[codes])
    pairs = np.stack([x, y], 2).reshape(32, 8)
    np.testing.assert_array_equal(first.view(torch.uint8).reshape(32, 4), pairs[:, :4])
    np.testing.assert_array_equal(second.view(torch.uint8).reshape(32, 4), pairs[:, 4:])


def picked(first: int, second: int, selector: int) -> int:
    """PTX's ``prmt.b32`` in its default mode (PTX ISA, "Data Movement and Conversion Instructions: prmt")."""
    pool = first.to_bytes(4, "little") + second.to_bytes(4, "little")
    chosen = bytearray()
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = pool[nibble & 7]
        chosen.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(chosen, "little")


def test_the_instructions_that_look_up_nibbles(generator: np.random.Generator) -> None:
    """What the GPU runs in place of the twins above, instruction by instruction."""
    iq4, e2m1 = np.array(BOOKS[Book.IQ4]), np.array(BOOKS[Book.E2M1])
    low, more_low, up, more_up = (int(word) for word in np.abs(iq4).astype(np.uint8).view(np.uint32))
    more, more_of_it = (int(word) for word in MORE.astype(np.uint8).view(np.uint32))
    for codes in [*generator.integers(0, 16, (500, 4)), *([c] * 4 for c in range(16))]:
        selector = sum(int(code) << 4 * place for place, code in enumerate(codes))
        a, b = picked(low, more_low, selector), picked(up, more_up, selector ^ 0x8888)
        found = (0x80808080 + b - a) % 2**32
        assert list(found.to_bytes(4, "little")) == [iq4[code] + 128 for code in codes]
        bytes_more = picked(more, more_of_it, selector).to_bytes(4, "little")
        assert [int(c) - 12 + byte for c, byte in zip(codes, bytes_more, strict=True)] == [e2m1[c] for c in codes]
    x, y = 0x33221100, 0x77665544
    assert picked(x, y, 0x5140) == 0x55114400
    assert picked(x, y, 0x7362) == 0x77336622


@triton.jit
def _both(sums: Any, out: Any, FACTOR: tl.constexpr, N: tl.constexpr) -> None:
    at = tl.arange(0, N)
    tl.store(out + at, both_halves(tl.load(sums + at), FACTOR, tl.load(out + at), False))


@pytest.mark.parametrize("factor", [-128, -16, 1])
def test_sums_of_both_halves(factor: int, generator: np.random.Generator) -> None:
    halves = generator.integers(-2032, 2033, (32, 2)).astype(np.int16)
    out = torch.full((32,), 0x4B400000, dtype=torch.int32)
    _both[(1,)](torch.from_numpy(halves).view(torch.int32), out, FACTOR=factor, N=32)
    np.testing.assert_array_equal(out, 0x4B400000 + factor * halves.astype(int).sum(1))


# Quantised activations.


@triton.jit
def _quantise(x: Any, q: Any, d: Any, s: Any, GROUPS: tl.constexpr) -> None:
    codes, scales, sums = quantise(tl.load(x + tl.arange(0, GROUPS * 32)), GROUPS)
    tl.store(q + tl.arange(0, GROUPS * 32), codes)
    tl.store(d + tl.arange(0, GROUPS), scales)
    tl.store(s + tl.arange(0, GROUPS), sums)


@pytest.mark.parametrize("scale", [0.0, 1e-35, 1e-6, 1.0, 1e6])
def test_quantised_groups(scale: float, generator: np.random.Generator) -> None:
    x = floats(generator, 4, 32) * scale
    x[1] = -x[1].abs()
    x[2, 1:] = 0
    q, d, s = torch.zeros(128, dtype=torch.int8), torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    _quantise[(1,)](x, q, d, s, GROUPS=4)
    codes = q.numpy().reshape(4, 2, 16).astype(int)
    assert np.abs(codes).max() <= 127
    assert not (d.numpy().view(np.int32) & 7).any()
    np.testing.assert_array_equal(s & 0xFFFF, codes[:, 0].sum(1) & 0xFFFF)
    np.testing.assert_array_equal(s >> 16, codes[:, 1].sum(1))
    if scale >= 1e-6 or scale == 0:
        peak = np.abs(x.numpy()).max(1, keepdims=True)
        error = np.abs(codes.reshape(4, 32) * d.numpy()[:, None] - x.numpy())
        assert (error <= peak / 254 * 1.001 + 1e-30).all()


# Projections.


def check_project(
    tuning: Any, matrices: tuple[Matrix, ...], columns: int, generator: np.random.Generator, bias: bool = False
) -> None:
    """With a norm before, against the product of what the quantised activations mean."""
    k = matrices[0].columns
    x, weight = floats(generator, columns, k), floats(generator, k) * 0.1 + 1
    rows = sum(matrix.rows for matrix in matrices)
    out = torch.zeros((columns, rows))
    biases = floats(generator, rows) if bias else None
    activations = op.Activations.of(columns, k, "cpu")
    prologue = op.Prologue(x, weight, 1e-5)
    op.launch_project(tuning, activations, matrices, out, columns=columns, prologue=prologue, bias=biases)
    wide = x.numpy().astype(np.float64)
    normal = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight.numpy()
    peaks = np.abs(np.pad(normal, ((0, 0), (0, -k % 32))).reshape(columns, -1, 32)).max(2)
    for matrix in matrices:
        error = np.abs(inputs(matrix, activations) - normal)
        bound = np.repeat(peaks, 32, 1)[:, :k] / 254 * 1.01 if not matrix.layout.plain else 1e-5
        assert (error <= bound).all()
    parts = [inputs(matrix, activations) @ read_planes(matrix).T for matrix in matrices]
    expected = np.concatenate(parts, 1) + (biases.numpy() if biases is not None else 0)
    near(out, expected)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("columns", [1, 2])
def test_every_type(kind: str, columns: int, generator: np.random.Generator) -> None:
    k = block_of(kind) * 3 if block_of(kind) < 256 else 256
    check_project(TUNING, (make(kind, 21, k, generator),), columns, generator)


GPU_KINDS = ("F32", "BF16", "Q4_0", "Q4_K", "Q5_1", "Q6_K", "Q8_0", "Q2_K", "Q3_K", "IQ4_NL", "MXFP4")


@pytest.mark.parametrize(("kind", "rows"), [*((kind, 19) for kind in GPU_KINDS), ("BF16", 16), ("Q6_K", 32)])
def test_every_layout_with_the_tiles_of_a_gpu(kind: str, rows: int, generator: np.random.Generator) -> None:
    """Of rows that are whole tiles, and of some that aren't."""
    check_project(GPU_LIKE, (make(kind, rows, 1280, generator),), 1, generator)


@pytest.mark.parametrize("rows", [1, 15, 16, 17])
@pytest.mark.parametrize("k", [32, 288])
def test_odd_shapes(rows: int, k: int, generator: np.random.Generator) -> None:
    check_project(TUNING, (make("Q4_1", rows, k, generator),), 1, generator)


@pytest.mark.parametrize("columns", [4, 8])
def test_more_columns(columns: int, generator: np.random.Generator) -> None:
    check_project(TUNING, (make("Q4_0", 18, 64, generator),), columns, generator)


@pytest.mark.parametrize("k", [2, 30, 34, 100])
def test_unquantized_columns_that_are_no_groups(k: int, generator: np.random.Generator) -> None:
    check_project(TUNING, (make("F16", 5, k, generator),), 2, generator)


def test_three_matrices_of_different_types_and_a_bias(generator: np.random.Generator) -> None:
    matrices = tuple(make(kind, rows, 256, generator) for kind, rows in (("Q4_K", 33), ("F16", 7), ("Q6_K", 16)))
    check_project(TUNING, matrices, 2, generator, bias=True)


def test_adding_to_the_residual_and_a_soft_cap(generator: np.random.Generator) -> None:
    matrix = make("Q8_0", 20, 64, generator)
    rows = fill(floats(generator, 2, 64))
    before = floats(generator, 2, 20)
    out = before.clone()
    op.launch_project(TUNING, rows, (matrix,), out, columns=2, add=True)
    product = meaning(rows) @ read_planes(matrix).T
    near(out, before.numpy() + product)
    op.launch_project(TUNING, rows, (matrix,), out, columns=2, softcap=0.5)
    near(out, 0.5 * np.tanh(product / 0.5))


def test_a_column_does_not_feel_the_others(generator: np.random.Generator) -> None:
    for tuning, kind, k in ((TUNING, "Q4_K", 256), (GPU_LIKE, "Q5_0", 64)):
        matrix, x, weight = make(kind, 20, k, generator), floats(generator, 8, k), floats(generator, k)
        alone = torch.zeros((8, 20))
        for row in range(8):
            one = op.Activations.of(1, k, "cpu")
            prologue = op.Prologue(x[row : row + 1], weight, 1e-5)
            op.launch_project(tuning, one, (matrix,), alone[row : row + 1], columns=1, prologue=prologue)
        for columns in (2, 4, 8):
            out = torch.zeros((columns, 20))
            prologue = op.Prologue(x[:columns], weight, 1e-5)
            op.launch_project(
                tuning, op.Activations.of(columns, k, "cpu"), (matrix,), out, columns=columns, prologue=prologue
            )
            np.testing.assert_array_equal(out, alone[:columns])


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K"), ("Q8_0", "F16")])
def test_gate_and_up(kinds: tuple[str, str], gelu: bool, generator: np.random.Generator) -> None:
    """With a normalised block added first, as Gemma has it."""
    k, rows, columns = 256, 96, 2
    gate, up = (make(kind, rows, k, generator) for kind in kinds)
    x, y, out = floats(generator, columns, k), floats(generator, columns, k), torch.zeros((columns, k))
    weight, post = floats(generator, k), floats(generator, k)
    activations, result = op.Activations.of(columns, k, "cpu"), op.Activations.of(columns, rows, "cpu")
    prologue = op.Prologue(x, weight, 1e-5, y, post, out)
    op.launch_gate_up(TUNING, activations, gate, up, result, prologue, columns=columns, gelu=gelu, quantise=True)
    wide = y.numpy().astype(np.float64)
    stream = x.numpy() + wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * post.numpy()
    near(out, stream, 1e-6)
    g = inputs(gate, activations) @ read_planes(gate).T
    u = inputs(up, activations) @ read_planes(up).T
    act = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) if gelu else g / (1 + np.exp(-g))
    near(result.plain, act * u)
    assert np.abs(meaning(result) - act * u).max() <= np.abs(act * u).max() / 250


@pytest.mark.parametrize("rows", [64, 96])
def test_gate_and_up_of_a_codebook_with_more_rows_for_one_column(rows: int, generator: np.random.Generator) -> None:
    """Its tiles are larger than those of two columns, and whole ones with 64 rows alone; the bits are the same."""
    k, tuning = 160, replace(GPU_LIKE, groups=2)
    gate, up = make("IQ4_NL", rows, k, generator), make("IQ4_NL", rows, k, generator)
    x, weight = floats(generator, 2, k), floats(generator, k)
    results = []
    for count in (1, 2):
        activations, result = op.Activations.of(count, k, "cpu"), op.Activations.of(count, rows, "cpu")
        prologue = op.Prologue(x[:count], weight, 1e-5)
        op.launch_gate_up(tuning, activations, gate, up, result, prologue, columns=count, gelu=False, quantise=True)
        results.append(result)
    g = inputs(gate, activations) @ read_planes(gate).T
    near(results[1].plain, g / (1 + np.exp(-g)) * (inputs(up, activations) @ read_planes(up).T))
    for alone, both in zip(
        (results[0].plain, results[0].codes, results[0].scales, results[0].sums),
        (results[1].plain, results[1].codes, results[1].scales, results[1].sums),
        strict=True,
    ):
        np.testing.assert_array_equal(alone[0], both[0])


@pytest.mark.parametrize(
    ("count", "expected"), [(0, []), (1, [(0, 1)]), (3, [(0, 4)]), (8, [(0, 8)]), (13, [(0, 8), (8, 8)])]
)
def test_rows_are_cut_into_launches(count: int, expected: list[tuple[int, int]]) -> None:
    assert column_blocks(count) == expected


# Attention.

HEADS = op.HeadShape(n_heads=4, kv_heads=2, head=64, value=32, rope_dims=32, halves=True, epsilon=1e-5, scale=0.125)


def rotated(v: Doubles, position: int, heads: op.HeadShape, weight: Doubles | None) -> Doubles:
    """The oracle of one head."""
    if weight is not None:
        v = v / np.sqrt((v**2).mean() + heads.epsilon) * weight
    half = heads.rope_dims // 2
    cosines, sines = rope_tables(position + 1, heads.rope_dims, 10000.0, 1.0, None)
    c, s = cosines[position].astype(np.float64), sines[position].astype(np.float64)
    first = np.arange(half) if heads.halves else np.arange(half) * 2
    second = first + half if heads.halves else first + 1
    result = v.copy()
    result[first], result[second] = v[first] * c - v[second] * s, v[first] * s + v[second] * c
    return result


def stored(v: Doubles, kind: str) -> Doubles:
    """The oracle of keeping a vector."""
    if kind == "f32":
        return v
    if kind == "f16":
        return v.astype(np.float16).astype(np.float64)
    groups = v.reshape(-1, 32)
    scale = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float16).astype(np.float64)
    codes = np.clip(np.rint(groups / np.where(scale > 0, scale, 1)), -127, 127)
    kept: Doubles = (codes * scale).reshape(-1)
    return kept


class Sequences:
    """Two sequences in shuffled pages, their rows drawn at random, with the oracle's keys and values."""

    def __init__(self, heads: op.HeadShape, kind: str, norm: bool, length: int, generator: np.random.Generator) -> None:
        self.heads, self.kind = heads, kind
        self.tuning = TUNING
        pages = -(-length // TUNING.page)
        shape = (2 * pages, heads.kv_heads, TUNING.page)
        dtype = {"f16": torch.float16, "f32": torch.float32, "q8_0": torch.int8}[kind]
        self.cache = op.LayerCache(
            kind,
            torch.zeros((*shape, heads.head), dtype=dtype),
            torch.zeros((*shape, heads.value), dtype=dtype),
            torch.zeros((*shape, heads.head // 32), dtype=torch.float16),
            torch.zeros((*shape, heads.value // 32), dtype=torch.float16),
        )
        order = generator.permutation(2 * pages).astype(np.int32).reshape(2, pages)
        self.table = torch.from_numpy(order)
        cosines, sines = rope_tables(length, heads.rope_dims, 10000.0, 1.0, None)
        self.angles = op.Angles(torch.from_numpy(cosines), torch.from_numpy(sines))
        self.norms = op.HeadNorms(floats(generator, heads.head), floats(generator, heads.head)) if norm else None
        self.qkv = floats(generator, 2, length, heads.row)

    def rows(self, which: list[tuple[int, int]]) -> tuple[torch.Tensor, op.Places]:
        """Rows ``(sequence, position)`` and their places."""
        qkv = torch.stack([self.qkv[slot, position] for slot, position in which])
        positions = torch.tensor([position for _, position in which], dtype=torch.int32)
        return qkv, op.Places(positions, torch.tensor([slot for slot, _ in which], dtype=torch.int32), self.table)

    def fill(self, slot: int, end: int) -> None:
        """Store the positions before ``end``."""
        qkv, places = self.rows([(slot, position) for position in range(end)])
        op.launch_store_rows(self.tuning, self.heads, qkv, places, self.cache, self.angles, self.norms)

    def expected(self, slot: int, position: int, window: int) -> Doubles:
        """What attention of a row gives."""
        heads = self.heads
        raw = self.qkv[slot].numpy().astype(np.float64)
        weights = (self.norms.query.numpy(), self.norms.key.numpy()) if self.norms else (None, None)
        oldest = max(0, position + 1 - window) if window else 0
        result = []
        for head in range(heads.n_heads):
            kv = head // heads.shared
            query = rotated(raw[position, head * heads.head : (head + 1) * heads.head], position, heads, weights[0])
            at = (heads.n_heads + kv) * heads.head
            at_value = (heads.n_heads + heads.kv_heads) * heads.head + kv * heads.value
            keys = [
                stored(rotated(raw[p, at : at + heads.head], p, heads, weights[1]), self.kind)
                for p in range(oldest, position + 1)
            ]
            values = [stored(raw[p, at_value : at_value + heads.value], self.kind) for p in range(oldest, position + 1)]
            scores = np.array(keys) @ query * heads.scale
            if heads.cap:
                scores = heads.cap * np.tanh(scores / heads.cap)
            soft = np.exp(scores - scores.max())
            result.append(soft / soft.sum() @ np.array(values))
        return np.concatenate(result)


def attend(s: Sequences, which: list[tuple[int, int]], window: int, store: bool) -> op.Activations:
    qkv, places = s.rows(which)
    result = op.Activations.of(len(which), s.heads.output, "cpu")
    scratch = op.Splits.of(s.tuning, s.heads, len(which), 8, "cpu")
    op.launch_attend(
        s.tuning,
        s.heads,
        qkv,
        places,
        s.cache,
        s.angles,
        s.norms,
        scratch,
        result,
        window=window,
        splits=4,
        store=store,
    )
    assert not scratch.counters.any()
    return result


@pytest.mark.parametrize(
    ("kind", "norm", "halves", "window", "cap"),
    [
        ("f16", False, False, 0, 0.0),
        ("f16", True, True, 20, 0.0),
        ("f32", False, True, 0, 3.0),
        ("q8_0", True, False, 0, 0.0),
        ("f32", True, True, 1, 0.0),
    ],
)
def test_attention_of_single_rows(
    kind: str, norm: bool, halves: bool, window: int, cap: float, generator: np.random.Generator
) -> None:
    heads = replace(HEADS, halves=halves, cap=cap)
    s = Sequences(heads, kind, norm, 80, generator)
    s.fill(0, 70)
    s.fill(1, 3)
    result = attend(s, [(0, 70), (1, 3)], window, store=True)
    expected = np.stack([s.expected(0, 70, window), s.expected(1, 3, window)])
    near(result.plain, expected, 1e-5 if kind == "f32" else 3e-3)
    assert np.abs(meaning(result) - expected).max() <= np.abs(expected).max() / 60
    again = attend(s, [(1, 3)], window, store=False)
    np.testing.assert_array_equal(again.plain[0], result.plain[1])


def test_heads_that_are_not_whole_groups_are_quantised_apart(generator: np.random.Generator) -> None:
    heads = replace(HEADS, n_heads=3, kv_heads=3, head=48, value=48, rope_dims=48)
    assert not heads.whole_groups
    s = Sequences(heads, "f16", False, 8, generator)
    s.fill(0, 5)
    result = attend(s, [(0, 5)], 0, store=True)
    expected = s.expected(0, 5, 0)[None]
    near(result.plain[:, : heads.output], expected, 3e-3)
    assert np.abs(meaning(result) - expected).max() <= np.abs(expected).max() / 60


@pytest.mark.parametrize(("kind", "window"), [("f16", 0), ("f32", 9), ("q8_0", 0)])
def test_attention_of_runs(kind: str, window: int, generator: np.random.Generator) -> None:
    s = Sequences(HEADS, kind, True, 40, generator)
    s.fill(0, 12)
    which = [*[(0, position) for position in range(12, 35)], (1, 0), (1, 1)]
    qkv, places = s.rows(which)
    runs = op.Runs(torch.tensor([0, 16, 23], dtype=torch.int32), torch.tensor([16, 7, 2], dtype=torch.int32), 16)
    out = torch.zeros((len(which), HEADS.output))
    op.launch_attend_runs(s.tuning, HEADS, qkv, places, runs, s.cache, s.angles, s.norms, out, window=window)
    near(out, np.stack([s.expected(*row, window) for row in which]), 1e-5 if kind == "f32" else 3e-3)


# Tiled products.


@pytest.mark.parametrize("kind", LAYOUTS)
def test_tiled_products(kind: str, generator: np.random.Generator) -> None:
    tuning = replace(TUNING, prefill_tile=(16, 32, 64, 4))
    k, outputs, count = block_of(kind), 37, 19
    matrix = make(kind, outputs, k, generator)
    x, weight, bias = floats(generator, count, k), floats(generator, k), floats(generator, outputs)
    halves = op.Halves.of(count, k, "cpu")
    op.launch_half_rows(tuning, x, halves, count, norm=weight, epsilon=1e-5)
    wide = x.numpy().astype(np.float64)
    normal = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight.numpy()
    near(halves.values.to(torch.float32) * halves.factors[:, None], np.pad(normal, ((0, 0), (0, -k % 32))), 1e-3)
    wider = torch.zeros((count, outputs + 5))
    op.launch_tiled(tuning, halves, matrix, wider[:, 5:], count, bias=bias)
    near(wider[:, 5:], normal @ read_planes(matrix).T + bias.numpy(), 1e-3)
    assert not wider[:, :5].any()


def test_gated_rows(generator: np.random.Generator) -> None:
    gate, up = floats(generator, 3, 96), floats(generator, 3, 96)
    halves = op.Halves.of(3, 96, "cpu")
    op.launch_half_rows(TUNING, gate, halves, 3, up=up)
    g = gate.numpy().astype(np.float64)
    near(halves.values.to(torch.float32) * halves.factors[:, None], g / (1 + np.exp(-g)) * up.numpy(), 1e-3)


# The rest.


@pytest.mark.parametrize("kind", LAYOUTS)
def test_embedding(kind: str, generator: np.random.Generator) -> None:
    matrix = make(kind, 11, 256, generator)
    tokens = torch.tensor([10, 0, 3, 3], dtype=torch.int32)
    out = torch.zeros((4, 256))
    op.launch_embed(TUNING, tokens, matrix, 1.5, out)
    near(out, 1.5 * read_planes(matrix)[tokens.numpy()], 1e-6)


def test_choosing_takes_the_lowest_of_the_best(generator: np.random.Generator) -> None:
    logits = floats(generator, 3, 301)
    logits[1, [250, 17, 99]] = 9.0
    logits[2] = -5.0
    tokens, logprobs = op.launch_choose(TUNING, logits)
    wide = logits.numpy().astype(np.float64)
    expected = wide.max(1) - np.log(np.exp(wide).sum(1))
    np.testing.assert_array_equal(tokens, [wide[0].argmax(), 17, 0])
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_adding_a_normalised_block_is_the_same_alone_and_in_a_prologue(generator: np.random.Generator) -> None:
    """Or a cut between stages would change bits."""
    x, y, weight = floats(generator, 2, 96), floats(generator, 2, 96), floats(generator, 96)
    alone, inside = torch.zeros((2, 96)), torch.zeros((2, 96))
    op.launch_add_normalised(TUNING, x, y, weight, alone, 1e-6)
    prologue = op.Prologue(x, weight, 1e-6, y, weight, inside)
    matrix = make("Q8_0", 4, 96, generator)
    op.launch_project(
        TUNING, op.Activations.of(2, 96, "cpu"), (matrix,), torch.zeros((2, 4)), columns=2, prologue=prologue
    )
    np.testing.assert_array_equal(alone, inside)
    wide = y.numpy().astype(np.float64)
    near(alone, x.numpy() + wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * weight.numpy(), 1e-6)
