"""Products of tiles and blocks against NumPy, for every type, and bit for bit between block widths.

Run again for the other instruction sets that the machine has, each in a process of its own (they are chosen at import).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from myelin.engine_api import BLOCKS, GgmlType
from myelin_testkit.blocks import random_blocks
from myelin_worker_cpu import kernels, records
from myelin_worker_cpu.formats import FORMATS, tiles
from myelin_worker_cpu.isa import VARIABLE, Isa, available
from myelin_worker_cpu.isa_here import ISA
from myelin_worker_cpu.memory import aligned
from myelin_worker_cpu.repack import repack

CHILD = "MYELIN_TEST_ISA_CHILD"
TYPES = sorted(FORMATS)
if CHILD in os.environ:  # one of each kind of plane and of scales
    TYPES = [kind for kind in TYPES if kind.name in {"F16", "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K"}]
SHAPES = [(1, 1), (37, 3), (16, 2)]  # rows, blocks of columns


def columns_of(ggml_type: GgmlType, blocks: int) -> int:
    return blocks * (BLOCKS[ggml_type][0] if BLOCKS[ggml_type][0] > 1 else 24)


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``int8[n, P, 16]`` and scales ``f32[n, P]``: what activations are rounded to, 16 at a time."""
    groups = x.reshape(len(x), -1, 16)
    scales = (np.abs(groups).max(axis=2) / np.float32(127)).astype(np.float32)
    codes = np.rint(groups / np.where(scales == 0, 1, scales)[..., None]).astype(np.int8)
    return codes, scales


def blocks_of(x: np.ndarray, width: int, slabs: int, *, is_float: bool) -> np.ndarray:
    """One block of ``width`` activations in the form that kernels take, as bytes."""
    groups = slabs * 2
    padded = np.zeros((width, groups * 32), dtype=np.float32)
    padded[:, : x.shape[1]] = x
    if is_float:
        memory = aligned(width * groups * records.FLOAT_ENTRY_BYTES)
        memory.view(np.float32).reshape(groups, width, 32)[:] = padded.reshape(width, groups, 32).transpose(1, 0, 2)
        return memory
    codes, scales = quantised(padded)
    memory = aligned(width * groups * records.RECORD_BYTES)
    rows = memory.reshape(groups, width, 64)
    rows[..., :32] = codes.reshape(width, groups, 32).transpose(1, 0, 2).view(np.uint8)
    numbers, integers = rows.view(np.float32), rows.view(np.int32)
    scale, sums = (part.reshape(width, groups, 2).swapaxes(0, 1) for part in (scales, -codes.sum(axis=2, dtype=int)))
    for place, value in ((records.SCALES, scale), (records.SCALED_MINUS_SUMS, sums * scale)):
        numbers[..., place // 4 : place // 4 + 2] = value
    numbers[..., records.SCALED_MINUS_SUM // 4] = (sums * scale).sum(axis=2)
    integers[..., records.MINUS_SUMS // 4 : records.MINUS_SUMS // 4 + 2] = sums
    return memory


@pytest.fixture(scope="module")
def multiply() -> Callable[[GgmlType, np.ndarray, np.ndarray, int], np.ndarray]:
    """``multiply(type, raw rows, x, width)``: ``x @ W.T`` through the compiled kernel for blocks of ``width``."""
    compiled = kernels.prepare(TYPES, 2, lambda *_: None)

    def run(ggml_type: GgmlType, raw: np.ndarray, x: np.ndarray, width: int) -> np.ndarray:
        fmt = FORMATS[ggml_type]
        columns = x.shape[1]
        rows, slabs = len(raw), fmt.slabs(columns)
        packed = repack(ggml_type, raw, columns)
        count = -(-len(x) // width)
        padded = np.zeros((count * width, columns), dtype=np.float32)
        padded[: len(x)] = x
        parts = [
            blocks_of(padded[first : first + width], width, slabs, is_float=fmt.is_float)
            for first in range(0, len(padded), width)
        ]
        given = aligned(sum(map(len, parts)))
        given[:] = np.concatenate(parts)
        stride = tiles(rows) * 16
        out = aligned(count * width * stride * 4).view(np.float32).reshape(count * width, stride)
        out[:] = np.nan
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)(compiled.matmul[ggml_type, width])
        for first in range(tiles(rows)):  # tile by tile: each writes its own columns only
            function(
                packed.ctypes.data,
                fmt.tile_bytes(columns),
                first,
                first + 1,
                slabs,
                given.ctypes.data,
                count,
                out.ctypes.data,
                stride * 4,
            )
        assert not np.isnan(out).any()
        assert not out[:, rows:].any()
        return out[: len(x), :rows].copy()

    return run


def dequantized(raw: np.ndarray, ggml_type: GgmlType) -> np.ndarray:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if ggml_type is GgmlType.F32:
        return raw.view(np.float32)
    return dequantize(raw, GGMLQuantizationType(int(ggml_type)))


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_a_product_is_numpys_and_the_same_in_any_block(multiply, ggml_type: GgmlType, rows: int, blocks: int) -> None:
    generator = np.random.default_rng(rows)
    columns = columns_of(ggml_type, blocks)
    raw = random_blocks(ggml_type, rows, columns, generator, deviation=0.5)
    x = generator.normal(size=(19, columns)).astype(np.float32)
    x[3] = 0
    x[4, 0] = 1000.0  # an outlier: all others of its part round to nothing
    found = {width: multiply(ggml_type, raw, x, width) for width in records.WIDTHS}
    for width in records.WIDTHS[1:]:
        np.testing.assert_array_equal(found[1], found[width])
    weights = dequantized(raw, ggml_type).astype(np.float64)
    rounded = x.astype(np.float64)
    if not FORMATS[ggml_type].is_float:
        codes, scales = quantised(x)
        rounded = (codes * scales[..., None].astype(np.float64)).reshape(x.shape)
    scale = np.abs(rounded) @ np.abs(weights).T + 1e-9
    assert (np.abs(found[1] - rounded @ weights.T) / scale).max() < 1e-6


def test_extreme_codes_do_not_overflow(multiply) -> None:
    """Every code at its end, every activation at its end: the sums are the largest that can be."""
    for ggml_type in (GgmlType.Q8_0, GgmlType.Q6_K, GgmlType.Q5_1):
        elements, size = BLOCKS[ggml_type]
        for fill in (0x00, 0x80, 0x7F, 0xFF):
            raw = np.full((3, 2, size), fill, dtype=np.uint8)
            for place in {GgmlType.Q8_0: (0,), GgmlType.Q6_K: (208,), GgmlType.Q5_1: (0, 2)}[ggml_type]:
                raw[..., place : place + 2] = np.array([0.5], np.float16).view(np.uint8)
            raw = raw.reshape(3, -1)
            for sign in (1.0, -1.0):
                x = np.full((1, 2 * elements), sign, dtype=np.float32)
                exact = x.astype(np.float64) @ dequantized(raw, ggml_type).astype(np.float64).T
                np.testing.assert_allclose(multiply(ggml_type, raw, x, 1), exact, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(CHILD in os.environ, reason="this is the other instruction set's own run")
@pytest.mark.parametrize("isa", [isa for isa in available() if isa is not ISA], ids=lambda isa: isa.value)
def test_other_instruction_sets(isa: Isa) -> None:
    environment = {**os.environ, VARIABLE: isa.value, CHILD: "1"}
    models = Path(__file__).with_name("test_cpu_models.py")
    chosen = "product or overflow or (float_models and (gemma3 or qwen2)) or no_chunking"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen, __file__, str(models)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "passed" in ran.stdout
