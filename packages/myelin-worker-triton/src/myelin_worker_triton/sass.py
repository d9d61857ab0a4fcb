"""Compile every kernel for real GPUs, without one, and count what its machine code does.

``python -m myelin_worker_triton.sass --json`` prints one object for each kernel, type and target: ``{kernel, type,
target, instructions_per_weight, registers, stack, spills, shared_bytes, load_bits}``; without ``--json`` a table.
Kernels are compiled from the very launches of :mod:`myelin_worker_triton.operators`, recorded instead of run.

Instructions per weight are those of the innermost loop over a row's groups, everything in it counted, divided by the
weights that a thread consumes in one round of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from myelin_worker_triton import operators as op
from myelin_worker_triton.budgets import BUDGETS, H200_INSTRUCTIONS_PER_BYTE, LAUNCHES_PER_LAYER
from myelin_worker_triton.layouts import LAYOUTS, Book, Plain, Scales
from myelin_worker_triton.partials import MOST_SPLITS
from myelin_worker_triton.planes import Matrix, plane_strides
from myelin_worker_triton.tuning import AMD, NVIDIA, Tuning

TARGETS: dict[str, tuple[str, int | str, int]] = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32)}
"""What kernels are measured on: backend, capability, lanes of a warp."""

AMD_TARGET: tuple[str, int | str, int] = ("hip", "gfx942", 64)
"""CDNA 3: kernels are compiled for it, so that nothing ties them to one vendor, but not measured."""

COLUMNS = 8192
"""Of the matrices: so many that no compiler unrolls the loop over them."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a compiled kernel is like.

    Attributes:
        kernel, type, target: Which one; ``type`` is empty where no weights are read.
        instructions_per_weight: Of the inner loop, or None where there is none over weights.
        registers: Of a thread; stack: bytes; spills: instructions that touch local memory.
        shared_bytes: Of a program.
        load_bits: Of the widest load in the inner loop, or in the kernel where there is none over weights.
    """

    kernel: str
    type: str
    target: str
    instructions_per_weight: float | None
    registers: int
    stack: int
    spills: int
    shared_bytes: int
    load_bits: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that was recorded instead of made."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


KERNELS = (
    "project",
    "gate_up",
    "attend",
    "store_rows",
    "quantise_rows",
    "add_normalised_rows",
    "embed",
    "best",
    "merge",
    "half_rows",
    "tiled",
    "rotate_queries",
    "attend_runs",
)
"""Names of the kernels in :mod:`myelin_worker_triton.operators`."""


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Record launches within the block instead of making them."""
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, name: str, kernel: Any) -> None:
            self._name, self._kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                launches.append(Launch(self._name, self._kernel, grid, arguments, constants))

            return launch

    kernels = {name: getattr(op, name) for name in KERNELS if hasattr(op, name)}
    try:
        for name, kernel in kernels.items():
            setattr(op, name, Recorder(name, kernel))
        yield launches
    finally:
        for name, kernel in kernels.items():
            setattr(op, name, kernel)


_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
}


def compile_launch(launch: Launch, target: tuple[str, int | str, int]) -> Any:
    """Triton's compiled kernel of a launch, specialised as its launcher would."""
    import triton  # type: ignore[import-untyped]  # Triton has no types
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]  # Triton has no types
    from triton.compiler import ASTSource  # type: ignore[import-untyped]  # Triton has no types

    names = list(launch.kernel.arg_names)
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for index, (name, value) in enumerate(zip(names, launch.arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name] = "constexpr"
            constants[name] = 1
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    options = {}
    for name, value in launch.constants.items():
        if name in names:
            signature[name] = "constexpr"
            constants[name] = value
        else:
            options[name] = value
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget(*target), options=options)


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def usage(cubin: bytes) -> dict[str, int]:
    """``REG`` and ``STACK`` of a kernel, by cuobjdump."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [_tool("cuobjdump"), "-res-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}


def disassemble(cubin: bytes) -> list[str]:
    """The kernel's instructions and labels, by nvdisasm."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [_tool("nvdisasm"), "-c", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = []
    for line in text.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        instruction = re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line)
        if label:
            lines.append(label[1] + ":")
        elif instruction:
            lines.append(instruction[1].strip())
    return lines


def inner_loops(lines: Sequence[str]) -> list[list[str]]:
    """Bodies of the loops that contain no other: from the label to the branch back to it."""
    places = {line[:-1]: index for index, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for index, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", line)
        if target and places.get(target[1], index) < index:
            loops.append((places[target[1]], index))
    return [
        [line for line in lines[first : last + 1] if not line.endswith(":")]
        for first, last in loops
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in loops)
    ]


def load_bits(lines: Sequence[str]) -> int:
    """Of the widest load from global memory, into registers or, asynchronously, into shared memory."""
    widths = [0]
    for line in lines:
        load = re.search(r"\b(?:LDG|LDGSTS)\.\S*", line)
        if load:
            width = re.search(r"\.(64|128)\b", load[0])
            small = re.search(r"\.[US](8|16)\b", load[0])
            widths.append(int(width[1]) if width else int(small[1]) if small else 32)
    return max(widths)


def weight_loop(
    lines: Sequence[str], weights: int, columns: int, needle: str, times: int = 1
) -> tuple[float, list[str]] | None:
    """Instructions per weight of the dearest inner loop that has ``needle`` in it, and that loop.

    Args:
        weights: What a thread consumes in a round, before any unrolling.
        columns: How often each is multiplied.
        needle: The instruction that multiplies; their number tells how far the loop was unrolled.
        times: How often a weight is multiplied for each column.
    """
    found = [loop for loop in inner_loops(lines) if any(needle in line for line in loop)]
    if not found:
        return None
    loop = max(found, key=len)
    products = sum(needle in line for line in loop) * (4 if needle == "IDP.4A" else 1)
    rounds = max(1, round(products / (weights * columns * times)))
    return len(loop) / (weights * rounds), loop


def matrix(kind: str, rows: int, columns: int) -> Matrix:
    """A matrix without content."""
    low, high, scales = plane_strides(kind, columns)
    layout = LAYOUTS[kind]
    one = torch.empty(1, dtype=torch.int32, device="meta")
    dtype = torch.int16 if layout.plain or layout.scales is Scales.ONE else torch.int32
    return Matrix(
        kind,
        rows,
        columns,
        torch.empty((rows, low), dtype=torch.int32, device="meta"),
        torch.empty((rows, high), dtype=torch.int32, device="meta") if high else one,
        torch.empty((rows, scales) if scales else 1, dtype=dtype, device="meta"),
        0.5,
    )


def _floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def record_project(tuning: Tuning, kind: str, columns: int = 1) -> Launch:
    """The output projection of a matrix of this type: integer dots and the residual, without a prologue."""
    with recording() as launches:
        op.launch_project(
            tuning,
            op.Activations.of(columns, COLUMNS, "meta"),
            (matrix(kind, 4096, COLUMNS),),
            _floats(columns, 4096),
            columns=columns,
            add=True,
        )
    return launches[0]


def record_split(tuning: Tuning, kind: str) -> Launch:
    """The same of few rows, which are split along the columns, of which there are enough for a loop in each part."""
    columns = COLUMNS * MOST_SPLITS
    with recording() as launches:
        op.launch_project(
            tuning,
            op.Activations.of(1, columns, "meta"),
            (matrix(kind, 1024, columns),),
            _floats(1, 1024),
            columns=1,
            add=True,
            partials=op.Partials.of(tuning, "meta"),
        )
    return launches[0]


def record_gate_up(tuning: Tuning, kind: str, columns: int = 1) -> Launch:
    """Gate and up of this type, with norm, quantisation before and after, and SiLU."""
    with recording() as launches:
        op.launch_gate_up(
            tuning,
            op.Activations.of(columns, COLUMNS, "meta"),
            matrix(kind, 14336, COLUMNS),
            matrix(kind, 14336, COLUMNS),
            op.Activations.of(columns, 14336, "meta"),
            op.Prologue(_floats(columns, COLUMNS), _floats(COLUMNS), 1e-5),
            columns=columns,
            gelu=False,
            quantise=True,
        )
    return launches[0]


def record_qkv(tuning: Tuning, kinds: Sequence[str], columns: int = 1) -> Launch:
    """Queries with keys, and values, of two types, with the norm before."""
    sizes = (5120, 1024)
    with recording() as launches:
        op.launch_project(
            tuning,
            op.Activations.of(columns, 4096, "meta"),
            tuple(matrix(kind, size, 4096) for kind, size in zip(kinds, sizes, strict=True)),
            _floats(columns, sum(sizes)),
            columns=columns,
            prologue=op.Prologue(_floats(columns, 4096), _floats(4096), 1e-5),
        )
    return launches[0]


_HEADS = op.HeadShape(32, 8, 128, 128, 128, False, 1e-5, 0.088)
"""Of an 8B model."""


def record_attention(tuning: Tuning, kv: str) -> dict[str, Launch]:
    """Attention of one row, and of a run, with what belongs to it."""
    heads, pages, count = _HEADS, 64, 64
    shape = (pages, heads.kv_heads, tuning.page, heads.head)
    dtype = {"f16": torch.float16, "f32": torch.float32, "q8_0": torch.int8}[kv]
    half = torch.empty((*shape[:3], heads.head // 32), dtype=torch.float16, device="meta")
    cache = op.LayerCache(
        kv, torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape, dtype=dtype, device="meta"), half, half
    )
    numbers = torch.empty(count, dtype=torch.int32, device="meta")
    places = op.Places(numbers, numbers, torch.empty((4, pages), dtype=torch.int32, device="meta"))
    angles = op.Angles(_floats(4096, heads.rope_dims // 2), _floats(4096, heads.rope_dims // 2))
    qkv = _floats(count, heads.row)
    scratch = op.Splits.of(tuning, heads, count, 16, "meta")
    result = op.Activations.of(count, heads.output, "meta")
    runs = op.Runs(numbers[:2], numbers[:2], tuning.prefill_run)
    with recording() as launches:
        op.launch_attend(
            tuning, heads, qkv, places, cache, angles, None, scratch, result, window=0, splits=16, store=True
        )
        op.launch_attend_runs(tuning, heads, qkv, places, runs, cache, angles, None, result.plain, window=0)
    return {launch.name: launch for launch in launches}


def record_tiled(tuning: Tuning, kind: str) -> Launch:
    """A tiled product of 512 rows."""
    with recording() as launches:
        op.launch_tiled(tuning, op.Halves.of(512, 4096, "meta"), matrix(kind, 4096, 4096), _floats(512, 4096), 512)
    return launches[0]


def record_others(tuning: Tuning) -> dict[str, Launch]:
    """The kernels that are neither projections nor attention."""
    with recording() as launches:
        op.launch_quantise(tuning, op.Activations.of(4, 4096, "meta"), 4)
        op.launch_add_normalised(tuning, _floats(4, 4096), _floats(4, 4096), _floats(4096), _floats(4, 4096), 1e-5)
        op.launch_half_rows(tuning, _floats(4, 4096), op.Halves.of(4, 4096, "meta"), 4, norm=_floats(4096))
        op.launch_choose(tuning, _floats(4, 128256))
    return {launch.name: launch for launch in launches}


def record_embed(tuning: Tuning, kind: str) -> Launch:
    """Four tokens' embeddings."""
    tokens = torch.empty(4, dtype=torch.int32, device="meta")
    with recording() as launches:
        op.launch_embed(tuning, tokens, matrix(kind, 128256, 4096), 1.0, _floats(4, 4096))
    return launches[0]


def measure(launch: Launch, target: str, name: str, kind: str) -> Report:
    """Compile a launch and look at its code."""
    compiled = compile_launch(launch, TARGETS[target])
    cubin = compiled.asm["cubin"]
    lines = disassemble(cubin)
    used = usage(cubin)
    per_weight: float | None = None
    width = load_bits(lines)
    if "REPEAT" in launch.constants:
        layout = LAYOUTS[kind.split("+")[0]]
        plain = layout.plain
        repeat, columns = int(launch.constants["REPEAT"]), int(launch.constants["COLUMNS"])
        elements = 32 if not plain else 4 if plain is Plain.F32 else 8
        times = 2 if layout.book is Book.E2M1 else 1  # as a plain code, and for what a table has more
        found = weight_loop(lines, repeat * elements, columns, "FFMA" if plain else "IDP.4A", times)
        if found is not None:
            per_weight, loop = found
            width = load_bits(loop)
    return Report(
        name,
        kind,
        target,
        None if per_weight is None else round(per_weight, 3),
        used.get("REG", 0),
        used.get("STACK", 0),
        sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in lines),
        int(compiled.metadata.shared),
        width,
    )


def cases(tuning: Tuning = NVIDIA) -> Iterator[tuple[str, str, Launch]]:
    """Every kernel of the table of budgets: its name, its type, its launch."""
    attention = {kv: record_attention(tuning, kv) for kv in op.KV_KINDS}
    others = record_others(tuning)
    for name, kind in BUDGETS:
        if name == "qkv":
            yield name, kind, record_qkv(tuning, kind.split("+"))
        elif name in ("project", "project×8"):
            yield name, kind, record_project(tuning, kind, 8 if "×" in name else 1)
        elif name in ("gate_up", "gate_up×8"):
            yield name, kind, record_gate_up(tuning, kind, 8 if "×" in name else 1)
        elif name == "project, split":
            yield name, kind, record_split(tuning, kind)
        elif name == "tiled":
            yield name, kind, record_tiled(tuning, kind)
        elif name == "embed":
            yield name, kind, record_embed(tuning, kind)
        else:
            yield name, kind, attention[kind or "f16"].get(name) or others[name]


def amd_spills(tuning: Tuning = AMD) -> dict[str, int]:
    """Vector registers spilled to memory, by kernel and type, on :data:`AMD_TARGET`.

    Raises:
        KeyError, RuntimeError: Triton has no backend for it, or can't compile a kernel.
    """
    launches = {
        "project Q4_K": record_project(tuning, "Q4_K"),
        "project MXFP4": record_project(tuning, "MXFP4"),
        "split Q4_K": record_split(tuning, "Q4_K"),
        "gate_up Q6_K": record_gate_up(tuning, "Q6_K"),
        "tiled Q4_K": record_tiled(tuning, "Q4_K"),
        **record_attention(tuning, "f16"),
    }
    found = {}
    for name, launch in launches.items():
        text = compile_launch(launch, AMD_TARGET).asm["amdgcn"]
        found[name] = sum(int(count) for count in re.findall(r"\.vgpr_spill_count:\s*(\d+)", text))
    return found


def table(targets: Sequence[str] = tuple(TARGETS)) -> list[Report]:
    """Compile and measure everything."""
    return [measure(launch, target, name, kind) for name, kind, launch in cases() for target in targets]


def markdown(reports: Sequence[Report], triton_version: str) -> str:
    """``docs/kernels.md``."""
    lines = [
        "# Kernels of the Triton engine",
        "",
        f"Written by `python -m myelin_worker_triton.sass --markdown` with Triton {triton_version};",
        "`tests/sass` holds it true.",
        "",
        "Nothing here was measured on a GPU: these are counts in machine code that was compiled without one.",
        f"A decode step of a layer is at most {LAUNCHES_PER_LAYER} launches. Instructions are those of the inner loop",
        "for one weight (with `×8`: for one weight and eight columns), loads and addresses included. *Limit* is what",
        "an H200 can issue in the time in which a weight's bytes arrive: a kernel below it is bound by memory, not by",
        "instructions.",
        "Registers and shared bytes are of sm_80 / sm_90. Loads of `tiled` are asynchronous, into shared memory.",
        "",
        "| kernel | type | bytes per weight | limit | instructions per weight: sm_80 | sm_90 | budget | registers "
        "| shared bytes | widest load |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    found = {(report.kernel, report.type, report.target): report for report in reports}
    for (name, kind), budget in BUDGETS.items():
        per_target = [found.get((name, kind, target)) for target in TARGETS]
        known = [report for report in per_target if report is not None]
        size = max((LAYOUTS[part].bytes_per_weight for part in kind.split("+") if part in LAYOUTS), default=None)
        weighs = budget.instructions_per_weight is not None and size is not None
        cells = [name, kind or "–"]
        cells += (
            [f"{size:.3f}", f"{size * H200_INSTRUCTIONS_PER_BYTE:.1f}"] if weighs and size is not None else ["–", "–"]
        )
        cells += [_number(report.instructions_per_weight if report else None) for report in per_target]
        cells.append(_number(budget.instructions_per_weight))
        cells += [" / ".join(str(report.registers) for report in known)]
        cells += [" / ".join(str(report.shared_bytes) for report in known)]
        cells += [f"{min(report.load_bits for report in known)} bits" if known else "–"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "No kernel spills registers or uses a stack.", "", *_NOTES.splitlines(), ""]
    return "\n".join(lines)


_NOTES = """\
## Codebooks
`prmt` picks four bytes of eight by the nibbles of a selector; a nibble's top bit makes it 0 instead. IQ4's sixteen
values take two of them for four weights, by complementary selectors, and a subtraction. The values of MXFP4 are
repacked into codes of our own: `value + 12` is the code itself, which needs no table, and for codes below 8 what one
`prmt` picks on top, added by an integer dot product of its own. For IQ4 looking up and multiplying is 1.375
instructions a weight by itself; `project` and `gate_up` keep within 1.6 by serving eight rows with each activation
they load. `gate_up` is held to 128 registers for that: given all, the compiler takes 158 and more instructions.

## Split-K
Where a projection's tiles of rows leave multiprocessors idle, it is cut along its columns too (`partials.py`), into
up to eight parts. Each leaves its sums in scratch, and the program that comes last for a tile adds all parts in their
order, in the same launch. Into how many parts follows from the matrix and the device, never from the batch.

## Tiled prompts
`tiled` reads weights with 128-bit asynchronous copies and unpacks a group for each thread. It is off unless
`TRITON_ENGINE_TILED_PROMPTS=1`: its products are float16 on tensor cores, so a position that was computed in a prompt
has other bits than the same position decoded, which breaks batch invariance (ADR 5) and with it exact replays after a
lost node. Switch it on where long prompts matter more than that. Rows within tiles don't depend on each other.

## Not used: programmatic dependent launch
`launch_pdl` lets a kernel begin before the one ahead has ended, and asks of each kernel a wait before it reads what
others wrote. A wait in the wrong place is a race that neither the interpreter, which runs programs one after another,
nor machine code shows; and scratch is shared between consecutive launches (partial sums, counters, quantised
activations), which such an overlap would have to double. It waits for a GPU to be tried on.
"""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.stderr.write("TRITON_INTERPRET is set: there is nothing to compile" + "\n")
        return 2
    parser = argparse.ArgumentParser(prog="python -m myelin_worker_triton.sass", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout")
    parser.add_argument("--markdown", action="store_true", help="docs/kernels.md")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="default: all")
    parser.add_argument("--dump", nargs=2, metavar=("KERNEL", "TYPE"), help="print one kernel's inner loop")
    parser.add_argument("--amd", action="store_true", help="only compile for an AMD card: what kernels spill, as JSON")
    given = parser.parse_args(arguments)
    if given.amd:
        sys.stdout.write(json.dumps(amd_spills()) + "\n")
        return 0
    targets = given.target or list(TARGETS)
    if given.dump:
        for name, kind, launch in cases():
            if [name, kind] == given.dump:
                lines = disassemble(compile_launch(launch, TARGETS[targets[-1]]).asm["cubin"])
                sys.stdout.write("\n\n".join("\n".join(loop) for loop in inner_loops(lines)) + "\n")
        return 0
    reports = table(targets)
    if given.markdown:
        import triton

        sys.stdout.write(markdown(reports, triton.__version__))
    elif given.json:
        sys.stdout.write(json.dumps([asdict(report) for report in reports], indent=1) + "\n")
    else:
        for report in reports:
            cells = (f"{value if value is not None else '–':>14}" for value in asdict(report).values())
            sys.stdout.write("  ".join(cells) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
