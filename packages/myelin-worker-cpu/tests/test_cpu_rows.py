"""What is done to rows, against NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from myelin_worker_cpu import attention_ops, records, row_ops
from myelin_worker_cpu.jit import kernel
from myelin_worker_cpu.memory import aligned
from myelin_worker_cpu.pointers import load_f32, load_half, store_f32, store_half

_KEPT = []


def compiled(function: Callable[..., None], arguments: int) -> Callable[..., None]:
    made = kernel(function, arguments, cached=False)
    _KEPT.append(made)
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(made.address)


def rows(values: np.ndarray) -> np.ndarray:
    memory = aligned(values.size * 4).view(np.float32)
    memory[:] = values.reshape(-1)
    return memory


@pytest.fixture(scope="module")
def quantise() -> Callable[..., None]:
    def run(x: int, record: int) -> None:
        row_ops.quantise_group(x, record)

    return compiled(run, 2)


@settings(max_examples=200, deadline=None)
@given(
    values=arrays(
        np.float32, 32, elements=st.floats(-1e4, 1e4, width=32).map(lambda value: 0.0 if abs(value) < 1e-20 else value)
    )
)
def test_a_record_is_each_half_of_the_group_rounded_to_nearest(quantise, values: np.ndarray) -> None:
    record = aligned(64)
    x = rows(values)
    quantise(x.ctypes.data, record.ctypes.data)
    numbers, integers = record.view(np.float32), record.view(np.int32)
    scaled_sums = []
    for part in range(2):
        own = values[16 * part : 16 * (part + 1)]
        codes = record[16 * part : 16 * (part + 1)].view(np.int8).astype(np.int64)
        scale = numbers[records.SCALES // 4 + part]
        assert scale == np.abs(own).max() / np.float32(127)
        assert np.abs(codes).max() in (0, 127)
        assert (np.abs(codes * np.float64(scale) - own) <= scale * 0.5001 + 1e-12).all()
        assert integers[records.MINUS_SUMS // 4 + part] == -codes.sum()
        scaled_sums.append(np.float32(-codes.sum()) * scale)
        assert numbers[records.SCALED_MINUS_SUMS // 4 + part] == scaled_sums[part]
    assert numbers[records.SCALED_MINUS_SUM // 4] == scaled_sums[0] + scaled_sums[1]


def test_sums_norms_and_residuals() -> None:
    def run(x: int, weight: int, target: int, sums: int) -> None:
        store_f32(row_ops.sum_squares(x, 5), sums)
        store_f32(row_ops.largest(x, 5), sums + 4)
        store_f32(row_ops.sum_exponentials(x, load_f32(sums + 4), 5), sums + 8)
        row_ops.scale_by(x, weight, np.float32(0.25), target, 5)
        row_ops.add_to(target, x, 5)
        row_ops.multiply(target, np.float32(3.0), 5)

    generator = np.random.default_rng(3)
    x, weight = rows(generator.normal(size=80) * 4), rows(generator.normal(size=80))
    target, sums = rows(np.zeros(80)), rows(np.zeros(16))
    compiled(run, 4)(x.ctypes.data, weight.ctypes.data, target.ctypes.data, sums.ctypes.data)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(sums[:3], [(wide**2).sum(), wide.max(), np.exp(wide - wide.max()).sum()], rtol=1e-6)
    np.testing.assert_allclose(target, 3 * (wide * 0.25 * weight + wide), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [row_ops.SILU, row_ops.GELU_TANH])
def test_gates(kind: int) -> None:
    def run(kind: int, gates: int, up: int, vectors: int) -> None:
        row_ops.gate(kind, gates, up, vectors)

    x = np.concatenate([np.linspace(-20, 20, 4001), [-1e4, -100, -88, 0, 88, 100, 1e4], np.zeros(8)]).astype(np.float32)
    gates, up = rows(x), rows(np.full(len(x), 2.0))
    compiled(run, 4)(kind, gates.ctypes.data, up.ctypes.data, len(x) // 16)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        if kind == row_ops.SILU:
            expected = wide / (1 + np.exp(-wide))
        else:
            expected = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    np.testing.assert_allclose(gates, 2 * expected, rtol=2e-6, atol=1e-6)


def test_exponentials_and_soft_caps() -> None:
    def exponentials(x: int, out: int, count: int) -> None:
        for index in range(count):
            store_f32(row_ops.sum_exponentials(x + index * 64, np.float32(0.0), 1), out + index * 4)

    def cap(x: int, vectors: int) -> None:
        row_ops.soft_cap(x, np.float32(30.0), vectors)

    values = np.concatenate([np.linspace(-90, 88, 2000), [-np.inf, -1e30]]).astype(np.float32)
    x = np.full((len(values), 16), -np.inf, dtype=np.float32)
    x[:, 5] = values
    given_rows, out = rows(x), rows(np.zeros(len(values)))
    compiled(exponentials, 3)(given_rows.ctypes.data, out.ctypes.data, len(values))
    expected = np.where(values < -87.3, 0.0, np.exp(values.astype(np.float64)))
    np.testing.assert_allclose(out, expected, rtol=3e-7)

    logits = rows(np.linspace(-200, 200, 160))
    before = logits.astype(np.float64)
    compiled(cap, 2)(logits.ctypes.data, 10)
    np.testing.assert_allclose(logits, 30 * np.tanh(before / 30), rtol=1e-5, atol=5e-6)


def test_half_precision_is_numpys() -> None:
    """Every f16 as f32, and f32 numbers around every f16 rounded to the nearest, ties to even."""

    def widen(halves: int, out: int, count: int) -> None:
        for index in range(count):
            store_f32(load_half(halves + index * 2), out + index * 4)

    def narrow(numbers: int, out: int, count: int) -> None:
        for index in range(count):
            store_half(load_f32(numbers + index * 4), out + index * 2)

    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].copy()
    out = np.zeros(len(halves), dtype=np.float32)
    compiled(widen, 3)(halves.ctypes.data, out.ctypes.data, len(halves))
    np.testing.assert_array_equal(out, halves.astype(np.float32))

    ordered = np.sort(out)
    middles = (ordered[1:] + ordered[:-1]) / 2
    numbers = np.concatenate([ordered, middles, np.nextafter(middles, np.float32(np.inf)), [1e6, -1e6, 65519, 65520]])
    numbers = np.ascontiguousarray(numbers, dtype=np.float32)
    rounded = np.zeros(len(numbers), dtype=np.float16)
    compiled(narrow, 3)(numbers.ctypes.data, rounded.ctypes.data, len(numbers))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rounded, numbers.astype(np.float16))


@settings(max_examples=100, deadline=None)
@given(values=arrays(np.float32, 32, elements=st.floats(-1e4, 1e4, width=32)))
@example(values=np.full(32, 2.1795637e-35, np.float32))
@example(values=np.full(32, 1e-5, np.float32))
def test_a_q8_0_block_is_what_the_format_says(quantise_block, values: np.ndarray) -> None:
    stride = 3
    target, scale = aligned(32 * stride), aligned(64)
    quantise_block(rows(values).ctypes.data, target.ctypes.data, stride, scale.ctypes.data)
    step = np.abs(values).max() / np.float32(127)
    assert scale.view(np.float16)[0] == np.float16(step)
    if np.float16(step) > 0:  # otherwise the block is zero, whatever its codes are
        codes = target[::stride].view(np.int8).astype(np.float64)
        assert (np.abs(codes - values / step.astype(np.float64)) <= 0.5001).all()


@pytest.fixture(scope="module")
def quantise_block() -> Callable[..., None]:
    def run(source: int, target: int, stride: int, scale: int) -> None:
        attention_ops.quantise_block(source, target, stride, scale)

    return compiled(run, 4)
