"""Which instructions the kernels are made of: chosen once a process, from the host or from ``MYELIN_CPU_ISA``."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from enum import StrEnum

from myelin.engine_api import EngineError

VARIABLE = "MYELIN_CPU_ISA"


class Isa(StrEnum):
    """From the fastest to the one that runs everywhere."""

    AVX512VNNI = "avx512vnni"
    """AVX-512 with its 8-bit dot product (``vpdpbusd``), 16 rows in one register."""
    AVXVNNI = "avxvnni"
    """AVX2 with the same dot product on 32 bytes."""
    AVX2 = "avx2"
    """AVX2 with FMA and F16C; 8-bit products through ``vpmaddubsw``."""
    NEON = "neon"
    """64-bit ARM with its 8-bit dot product (``sdot``)."""
    PLAIN = "plain"
    """Only what LLVM's vectors offer on any machine."""


_NEEDS: dict[Isa, tuple[tuple[str, ...], ...]] = {
    Isa.AVX512VNNI: (("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "f16c"),),
    # AVX-512 has the 32-byte form too, in an encoding of its own: LLVM takes the one that the host has
    Isa.AVXVNNI: (("avx2", "fma", "f16c", "avxvnni"), ("avx2", "fma", "f16c", "avx512vl", "avx512vnni")),
    Isa.AVX2: (("avx2", "fma", "f16c"),),
    Isa.NEON: (("neon", "dotprod"),),
    Isa.PLAIN: ((),),
}
"""The features that each needs, by LLVM's names: all of one of these sets."""


def available() -> tuple[Isa, ...]:
    """What this machine can run, the fastest first."""
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    return able({name for name, has in features.items() if has})


def able(features: Collection[str]) -> tuple[Isa, ...]:
    """What a machine with these features can run, the fastest first."""
    return tuple(isa for isa in Isa if any(set(needs) <= set(features) for needs in _NEEDS[isa]))


def chosen() -> Isa:
    """The instruction set to use.

    Raises:
        EngineError: ``MYELIN_CPU_ISA`` names none, or one that this machine lacks.
    """
    here = available()
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if not wanted or wanted == "auto":
        return here[0]
    for isa in here:
        if isa.value == wanted:
            return isa
    names = ", ".join(isa.value for isa in here)
    raise EngineError(
        f"{VARIABLE}={wanted} is not an instruction set that this machine has", f"Use one of: {names}", reason="isa"
    )


def fuses_multiply_add(isa: Isa) -> bool:
    """Whether a fused multiply-add is one instruction (elsewhere it would be a slow library call)."""
    return isa is not Isa.PLAIN or platform.machine().lower() in {"aarch64", "arm64"}


def converts_half(isa: Isa) -> bool:
    """Whether conversions of 16-bit floats are instructions."""
    return fuses_multiply_add(isa)


def multiplies_signed_bytes(isa: Isa) -> bool:
    """Whether the dot product is of two vectors of signed bytes (and not of an unsigned with a signed one)."""
    return isa is Isa.NEON


def register_rows(isa: Isa) -> int:
    """Activations whose sums of 16 rows fit into the registers at once, beside the weights."""
    return 16 if isa is Isa.AVX512VNNI else 4
