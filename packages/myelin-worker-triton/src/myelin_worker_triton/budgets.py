"""What each kernel may cost, in one table; ``tests/sass`` holds the compiled kernels to it.

Instructions per weight are of one column. The limit of a chip is where its instruction rate meets its bandwidth: an
H200 issues 4 × 32 instructions a cycle on each of 132 multiprocessors at 1.755 GHz, and reads 4.8 TB/s, which makes 6.2
instructions a byte; a kernel that needs fewer for its bytes is bound by memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from myelin_worker_triton.layouts import LAYOUTS

H200_INSTRUCTIONS_PER_BYTE = 132 * 4 * 32 * 1.755e9 / 4.8e12
"""Lanes' instructions in the time in which a byte arrives."""

LAUNCHES_PER_LAYER = 5
"""Of a decode step."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper bounds, and the least width of the widest load.

    Attributes:
        instructions_per_weight: On sm_90, None where no weights are read.
        registers: Of a thread; shared_bytes: of a program.
        load_bits: Of the inner loop's widest load.
    """

    instructions_per_weight: float | None
    registers: int = 128
    shared_bytes: int = 49152
    load_bits: int = 128


_PER_WEIGHT = {
    "F32": 1.6,
    "F16": 3.4,
    "BF16": 2.9,
    "Q4_0": 1.0,
    "Q4_1": 1.1,
    "Q4_K": 1.1,
    "Q5_0": 1.65,
    "Q5_1": 1.75,
    "Q5_K": 1.75,
    "Q6_K": 1.75,
    "Q8_0": 0.7,
    "Q2_K": 1.45,
    "Q3_K": 1.85,
    "IQ4_NL": 1.6,
    "IQ4_XS": 1.6,
    "MXFP4": 1.55,
}

BUDGETS: dict[tuple[str, str], Budget] = {
    **{("project", kind): Budget(_PER_WEIGHT[kind]) for kind in LAYOUTS},
    **{("project, split", kind): Budget(_PER_WEIGHT[kind]) for kind in ("Q4_K", "Q6_K", "IQ4_NL", "MXFP4", "F16")},
    **{
        ("gate_up", kind): Budget(_PER_WEIGHT[kind])
        for kind in ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4", "F16")
    },
    ("project×8", "Q4_K"): Budget(5.0),
    ("gate_up×8", "Q4_K"): Budget(4.4, registers=255),
    ("qkv", "Q4_K+Q6_K"): Budget(1.75),
    ("tiled", "Q4_K"): Budget(None),
    ("tiled", "Q6_K"): Budget(None),
    ("tiled", "MXFP4"): Budget(None),
    **{("attend", kv): Budget(None, registers=255, shared_bytes=98304) for kv in ("f16", "f32", "q8_0")},
    **{("attend_runs", kv): Budget(None, registers=255, shared_bytes=163840) for kv in ("f16", "q8_0")},
    ("store_rows", "f16"): Budget(None, load_bits=32),
    ("rotate_queries", ""): Budget(None, load_bits=32),
    ("quantise_rows", ""): Budget(None),
    ("add_normalised_rows", ""): Budget(None),
    ("half_rows", ""): Budget(None),
    ("embed", "Q6_K"): Budget(None, load_bits=32),
    ("best", ""): Budget(None),
    ("merge", ""): Budget(None, load_bits=32),
}
"""By kernel and type: of the weights, or of keys and values."""
