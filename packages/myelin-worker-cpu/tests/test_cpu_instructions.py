"""The instructions that kernels become, for machines other than this one: LLVM compiles for all of them.

What a kernel computes is tested where it can run (``test_cpu_products.py``); that the fast instruction is in it, and
none that the machine lacks, can be seen in its assembly.
"""

from __future__ import annotations

import re

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from myelin.engine_api import GgmlType
from myelin_worker_cpu.formats import FORMATS
from myelin_worker_cpu.isa import Isa, able
from myelin_worker_cpu.tile_dot import emit_tile
from myelin_worker_cpu.vector_ir import I64, Emitter

MACHINES = {
    Isa.AVX512VNNI: ("x86_64-unknown-linux-gnu", "cascadelake", ""),
    Isa.AVXVNNI: ("x86_64-unknown-linux-gnu", "alderlake", "+avxvnni"),
    Isa.AVX2: ("x86_64-unknown-linux-gnu", "haswell", ""),
    Isa.NEON: ("aarch64-unknown-linux-gnu", "neoverse-n1", "+dotprod"),
}
"""A triple, a processor, and features, for each set."""


def assembly(isa: Isa, kind: GgmlType, width: int) -> str:
    """A tile kernel as such a machine's assembly."""
    triple, processor, features = MACHINES[isa]
    module = ir.Module("kernel")
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 5), "tile")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    emit_tile(Emitter(builder, isa), FORMATS[kind], width, *function.args)
    builder.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    text: str = machine.emit_assembly(parsed)
    return text


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("kind", [GgmlType.Q4_1, GgmlType.Q5_0, GgmlType.Q8_0, GgmlType.Q4_K, GgmlType.Q6_K])
def test_arm_has_its_dot_product(kind: GgmlType, width: int) -> None:
    found = assembly(Isa.NEON, kind, width)
    # 16 rows by 32 columns are 512 products, 16 of them in an instruction, for each activation of a block
    assert len(re.findall(r"\bsdot\b", found)) % (32 * width) == 0
    assert re.search(r"\bsdot\tv\d+\.4s", found)
    assert not re.search(r"\bbl\t", found), "a call: something is not one instruction"


@pytest.mark.parametrize("kind", [GgmlType.Q4_1, GgmlType.Q8_0, GgmlType.Q6_K])
def test_avx_vnni_is_in_its_own_encoding(kind: GgmlType) -> None:
    found = assembly(Isa.AVXVNNI, kind, 1)
    assert len(re.findall(r"\{vex\}\s+vpdpbusd\b", found)) % 16 == 0
    assert "{vex}" in found
    assert "zmm" not in found
    assert not re.search(r"\bcall", found)


@pytest.mark.parametrize(("isa", "instruction"), [(Isa.AVX512VNNI, "vpdpbusd"), (Isa.AVX2, "vpmaddubsw")])
def test_the_other_sets_have_theirs(isa: Isa, instruction: str) -> None:
    assert instruction in assembly(isa, GgmlType.Q4_K, 1)


@pytest.mark.parametrize(
    ("features", "best"),
    [
        ({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "f16c", "avx2", "fma"}, Isa.AVX512VNNI),
        ({"avx2", "fma", "f16c", "avxvnni"}, Isa.AVXVNNI),
        ({"avx2", "fma", "f16c"}, Isa.AVX2),
        ({"neon", "dotprod", "fp-armv8"}, Isa.NEON),
        ({"neon", "fp-armv8"}, Isa.PLAIN),
        (set(), Isa.PLAIN),
    ],
)
def test_the_best_that_a_machine_has(features: set[str], best: Isa) -> None:
    assert able(features)[0] is best
    assert able(features)[-1] is Isa.PLAIN
