"""What a GPU of a type has, by the names that Ray gives to types (``ray.util.accelerators``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in bytes, and bytes per second between it and the processor."""

    memory_bytes: int
    bandwidth: float


def _gpu(gigabytes: int, gigabytes_per_second: float) -> Gpu:
    return Gpu(gigabytes * 10**9, gigabytes_per_second * 1e9)


GPUS: Mapping[str, Gpu] = {
    "K80": _gpu(12, 240),
    "P4": _gpu(8, 192),
    "P100": _gpu(16, 732),
    "V100": _gpu(16, 900),
    "T4": _gpu(16, 320),
    "A10G": _gpu(24, 600),
    "L4": _gpu(24, 300),
    "L40S": _gpu(48, 864),
    "A100": _gpu(40, 1555),
    "A100-40G": _gpu(40, 1555),
    "A100-80G": _gpu(80, 2039),
    "H100": _gpu(80, 3350),
    "H200": _gpu(141, 4800),
}
"""From the makers' data sheets; of a type that comes in several sizes, the smallest."""
