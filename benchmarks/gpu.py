"""The Triton engine on a real GPU: is every kernel right, and how near does each come to the card's bandwidth?

    python benchmarks/gpu.py [--json results.json] [--quick]      on a machine with a GPU; meant to take under 8 minutes
    python benchmarks/gpu.py --dry-run                            anywhere, in Triton's interpreter: all but the numbers

Needs torch, triton, numpy and the package ``myelin-worker-triton`` (its source folder beside this one will do); no
network, no model: weights are random planes. Whatever goes wrong is said, counted and passed over; the exit code is
then 1.

Checked are all types against float64, attention against float64, tiled products, and split ones (their bits, too).
Timed are kernels (as a share of the bandwidth of a copy, measured first) and whole steps of stages shaped like Llama
1B, 8B and ten layers of 70B: decoding at batch 1, 4 and 8 with contexts of 0, 4096 and 32768, prompts of 512 and 4096
tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
if importlib.util.find_spec("myelin_worker_triton") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "myelin-worker-triton" / "src"))

import numpy as np  # the interpreter must be chosen before Triton is imported, hence these so late
import torch
import triton  # type: ignore[import-untyped]  # Triton has no types

from myelin_worker_triton import operators as op
from myelin_worker_triton.graphs import Graphs
from myelin_worker_triton.interpreting import speed_up
from myelin_worker_triton.layouts import LAYOUTS, Plain, Scales
from myelin_worker_triton.planes import Matrix, plane_strides, read_planes
from myelin_worker_triton.stage import (
    DeviceStage,
    LayerWeights,
    Rows,
    Shape,
    Weights,
    pages_of,
    rope_tables,
    splits_of,
)
from myelin_worker_triton.tuning import Tuning, tuning_here


@dataclass(frozen=True)
class Model:
    """The shape of a stage; its matrices have the types of Q4_K_M. No vocabulary: neither head nor tail."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocabulary: int


MODELS = (
    Model("llama-1b", 16, 2048, 32, 8, 64, 8192, 128256),
    Model("llama-8b", 32, 4096, 32, 8, 128, 14336, 128256),
    Model("llama-70b, 10 layers", 10, 8192, 64, 8, 128, 28672, 0),
)
TINY = (Model("tiny", 1, 256, 4, 2, 64, 256, 300),)


@dataclass(frozen=True)
class Plan:
    """How much is run: models, batches, contexts, prompts, shape of the timed matrix, shapes of few rows (timed split
    and not), least seconds of a timing, and rows of a prompt at once."""

    models: tuple[Model, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    matrix: tuple[int, int]
    few_rows: tuple[tuple[int, int], ...]
    seconds: float
    chunk: int


FEW_ROWS = ((1024, 4096), (2048, 8192), (4096, 4096))
WHOLE = Plan(MODELS, (1, 4, 8), (0, 4096, 32768), (512, 4096), (8192, 8192), FEW_ROWS, 0.25, 512)
QUICK = replace(WHOLE, models=MODELS[1:2], contexts=(0, 4096), prompts=(512,), seconds=0.1)
DRY = Plan(TINY, (1, 2), (0, 70), (24,), (64, 512), ((32, 1024),), 0.0, 32)


class Bench:
    """Runs everything; collects results and failures."""

    def __init__(self, plan: Plan, device: torch.device, tuning: Tuning) -> None:
        self.plan, self.device, self.tuning = plan, device, tuning
        self.dry = device.type != "cuda"
        self.results: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.copy = 1.0
        torch.manual_seed(0)

    def guard(self, what: str, task: Callable[[], None]) -> None:
        """Do it; a failure is told, not raised."""
        try:
            task()
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else ""
            self.failures.append(f"{what}: {type(error).__name__}: {first}")
            print(f"WRONG    {self.failures[-1]}", flush=True)
            traceback.print_exc(limit=4, file=sys.stderr)
            if not self.dry:
                torch.cuda.empty_cache()

    def row(self, kind: str, name: str, **values: Any) -> None:
        """Keep and show a result."""
        self.results.append({"kind": kind, "name": name, **values})
        texts = [
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
        ]
        print(f"{kind:8} {name:40} {'  '.join(texts)}", flush=True)

    def seconds(self, task: Callable[[], None]) -> float:
        """The median time of a task, once it has run."""
        task()
        if self.dry:
            began = time.perf_counter()
            task()
            return time.perf_counter() - began
        torch.cuda.synchronize()
        times: list[float] = []
        while sum(times) < self.plan.seconds or len(times) < 5:
            event: Any = torch.cuda.Event  # torch has no types for it
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            task()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return sorted(times)[len(times) // 2]

    # Random things.

    def floats(self, *shape: int) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(shape, dtype=torch.float32, device=self.device)

    def matrix(self, kind: str, rows: int, columns: int) -> Matrix:
        """Random planes: any bits are codes; scales are half to one, of either sign, times the gain."""
        layout = LAYOUTS[kind]
        low, high, scales = plane_strides(kind, columns)

        def bits(count: int) -> torch.Tensor:
            return torch.randint(-(2**31), 2**31 - 1, (rows, count), dtype=torch.int32, device=self.device)

        one = torch.zeros(1, dtype=torch.int32, device=self.device)
        if layout.plain:
            dtype = {Plain.F32: torch.float32, Plain.F16: torch.float16, Plain.BF16: torch.bfloat16}[layout.plain]
            per_word = 1 if layout.plain is Plain.F32 else 2
            plane = (self.floats(rows, low * per_word) * 0.02).to(dtype).view(torch.int32)
            return Matrix(kind, rows, columns, plane, one, one.to(torch.int16), 1.0)
        per_element = 1 if layout.scales is Scales.ONE else 2
        halves = torch.rand((rows, scales * per_element), device=self.device) * 0.5 + 0.5
        halves *= torch.randint(0, 2, halves.shape, device=self.device) * 2 - 1
        plane = halves.to(torch.float16).view(torch.int16 if per_element == 1 else torch.int32)
        return Matrix(kind, rows, columns, bits(low), bits(high) if high else one, plane, 2.0**-9)

    # Checks.

    def compare(self, name: str, found: torch.Tensor, expected: Any, tolerance: float) -> None:
        """Relative to the largest of what is expected."""
        error = float(np.abs(found.cpu().numpy() - expected).max() / max(float(np.abs(expected).max()), 1e-9))
        good = error <= tolerance
        self.row("check", name, error=error, ok=good)
        if not good:
            self.failures.append(f"{name}: relative error {error:.2g}, where {tolerance:.0e} is allowed")

    def check_type(self, kind: str, columns: int) -> None:
        """A projection after a norm, and a tiled product, of an odd number of rows."""
        k = 512 if self.dry else 2304
        matrix = self.matrix(kind, 77, k)
        weights = read_planes(matrix)
        x, norm = self.floats(columns, k), self.floats(k)
        rows, out = op.Activations.of(columns, k, self.device), torch.zeros((columns, 77), device=self.device)
        op.launch_project(self.tuning, rows, (matrix,), out, columns=columns, prologue=op.Prologue(x, norm, 1e-5))
        wide = x.cpu().numpy().astype(np.float64)
        normal = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * norm.cpu().numpy()
        codes = rows.codes.cpu().numpy().astype(np.float64).reshape(columns, -1, 32)
        meant = (codes * rows.scales.cpu().numpy()[:, :, None]).reshape(columns, -1)
        self.compare(f"project {kind} × {columns}", out, (normal if matrix.layout.plain else meant) @ weights.T, 1e-4)
        if columns == 1:
            many, halves = self.floats(19, k), op.Halves.of(19, k, self.device)
            tiled = torch.zeros((19, 77), device=self.device)
            op.launch_half_rows(self.tuning, many, halves, 19)
            op.launch_tiled(self.tuning, halves, matrix, tiled, 19)
            self.compare(f"tiled {kind}", tiled, many.cpu().numpy().astype(np.float64) @ weights.T, 2e-3)

    def check_split(self, kind: str, columns: int) -> None:
        """A projection of few rows, split along its columns, thrice: the same bits each time, alone and in a batch."""
        rows, k, tuning = (48, 512, replace(self.tuning, rows=16, groups=4, multiprocessors=8))
        if not self.dry:
            rows, k, tuning = 1000, 8192, self.tuning
        matrix, x = self.matrix(kind, rows, k), op.Activations.of(columns, k, self.device)
        x.plain[:, :k] = self.floats(columns, k)
        op.launch_quantise(tuning, x, columns)
        partials = op.Partials.of(tuning, self.device)
        found = []
        for count in (columns, columns, 1):
            out = torch.zeros((count, rows), device=self.device)
            op.launch_project(tuning, x.rows(0, count), (matrix,), out, columns=count, partials=partials)
            found.append(out)
        codes = x.codes.cpu().numpy().astype(np.float64).reshape(columns, -1, 32)
        meant = (codes * x.scales.cpu().numpy()[:, :, None]).reshape(columns, -1)
        plain = x.plain.cpu().numpy().astype(np.float64)
        expected = (plain if matrix.layout.plain else meant) @ read_planes(matrix).T
        self.compare(f"project {kind} × {columns}, split", found[0], expected, 1e-4)
        same = torch.equal(found[0], found[1]) and torch.equal(found[0][:1], found[2])
        self.row("check", f"project {kind} × {columns}, split: the same bits", ok=same)
        if not same or bool(partials.counters.any()):
            self.failures.append(f"project {kind} × {columns}, split: other bits in another run, or a counter is left")

    def check_attention(self, kv: str, length: int) -> None:
        """The last row of a context, without a rotation."""
        heads = op.HeadShape(8, 2, 128, 128, 128, False, 1e-5, 128**-0.5)
        pages = -(-length // self.tuning.page)
        cache = _cache(kv, pages, heads, self.tuning.page, self.device)
        table = torch.randperm(pages, device=self.device).to(torch.int32)[None]
        still = torch.ones((length, 64), device=self.device)
        angles = op.Angles(still, still * 0)
        qkv = self.floats(length, heads.row)
        numbers = torch.arange(length, dtype=torch.int32, device=self.device)
        places = op.Places(numbers, numbers * 0, table)
        if length > 1:
            op.launch_store_rows(self.tuning, heads, qkv[:-1], places.rows(0, length - 1), cache, angles, None)
        splits = splits_of(self.tuning, length)
        scratch = op.Splits.of(self.tuning, heads, 1, splits, self.device)
        result, last = op.Activations.of(1, heads.output, self.device), places.rows(length - 1, 1)
        op.launch_attend(
            self.tuning,
            heads,
            qkv[-1:],
            last,
            cache,
            angles,
            None,
            scratch,
            result,
            window=0,
            splits=splits,
            store=True,
        )
        raw = qkv.cpu().numpy().astype(np.float64)
        query = raw[-1, :1024].reshape(2, 4, 128)
        keys, values = raw[:, 1024:1280].reshape(-1, 2, 128), raw[:, 1280:].reshape(-1, 2, 128)
        scores = np.einsum("hgd,thd->hgt", query, keys) * heads.scale
        soft = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.einsum("hgt,thd->hgd", soft / soft.sum(-1, keepdims=True), values).reshape(1, -1)
        self.compare(f"attend {kv}, {length} positions", result.plain, expected, 1e-4 if kv == "f32" else 3e-2)

    def check_choice(self) -> None:
        """The best token, the lowest among equals."""
        logits = self.floats(3, 1000 if self.dry else 128256)
        logits[1, [17, 170]] = 99.0
        tokens, logprobs = op.launch_choose(self.tuning, logits)
        wide = logits.cpu().numpy().astype(np.float64)
        self.compare("choose: tokens", tokens, wide.argmax(1), 0.0)
        expected = -np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1))
        self.compare("choose: log-probabilities", logprobs, expected, 1e-4)

    # Times.

    def measure_copy(self) -> None:
        """Bytes a second, read and written, of a copy."""
        count = (1 << 20) if self.dry else (1 << 30)
        source = torch.zeros(count, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)

        def copy() -> None:
            target.copy_(source)

        self.copy = 2 * count / self.seconds(copy)
        self.row("copy", "bandwidth", gigabytes_a_second=self.copy / 1e9)

    def time_projection(self, kind: str, columns: int, shape: tuple[int, int], split: bool) -> None:
        """One matrix after the other, more of them than the card's cache holds; ``split``, where its rows are few."""
        rows, k = shape
        partials = op.Partials.of(self.tuning, self.device) if split else None
        size = LAYOUTS[kind].bytes_per_weight * rows * k
        copies = 1 if self.dry else max(2, round(512e6 / size))
        matrices = [self.matrix(kind, rows, k) for _ in range(copies)]
        x, out = op.Activations.of(columns, k, self.device), torch.zeros((columns, rows), device=self.device)

        def run() -> None:
            for matrix in matrices:
                op.launch_project(self.tuning, x, (matrix,), out, columns=columns, add=True, partials=partials)

        run()
        if not self.dry:  # a graph, or the launches' own time on the host would be measured
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            seconds = self.seconds(graph.replay) / copies
        else:
            seconds = self.seconds(run) / copies
        name = f"project {kind} × {columns}, {rows} × {k}{', split' if split else ''}"
        self.row("kernel", name, microseconds=seconds * 1e6, of_copy=size / seconds / self.copy)

    def stage(self, model: Model, max_context: int, sequences: int) -> DeviceStage:
        """A stage with random weights of Q4_K_M's types."""
        size = model.head
        heads = op.HeadShape(model.heads, model.kv_heads, size, size, size, False, 1e-5, size**-0.5)
        shape = Shape(
            width=model.width,
            ffn_width=model.ffn,
            vocab_size=model.vocabulary or 256,
            heads=heads,
            epsilon=1e-5,
            gelu=False,
            qk_norm=False,
            post_norms=False,
            windows=(0,) * model.layers,
            embedding_scale=1.0,
            final_softcap=0.0,
            max_context=max_context,
            max_sequences=sequences,
            max_rows=self.plan.chunk,
        )
        queries, keys = model.heads * size, model.kv_heads * size
        layers = []
        for number in range(model.layers):
            more = "Q6_K" if number % 2 else "Q4_K"
            qkv = [self.matrix("Q4_K", queries + keys, model.width), self.matrix(more, keys, model.width)]
            matrices = {
                "attn_output": self.matrix("Q4_K", model.width, queries),
                "ffn_gate": self.matrix("Q4_K", model.ffn, model.width),
                "ffn_up": self.matrix("Q4_K", model.ffn, model.width),
                "ffn_down": self.matrix(more, model.width, model.ffn),
            }
            norms = {name: self.floats(model.width) * 0.1 for name in ("attn_norm", "ffn_norm")}
            layers.append(LayerWeights(qkv, matrices, norms))
        weights = Weights(layers)
        if model.vocabulary:
            weights.embedding = weights.output = self.matrix("Q6_K", model.vocabulary, model.width)
            weights.output_norm = self.floats(model.width)
        cosines, sines = rope_tables(max_context, size, 500000.0, 1.0, None)
        angles = op.Angles(torch.from_numpy(cosines).to(self.device), torch.from_numpy(sines).to(self.device))
        stage = DeviceStage(self.tuning, shape, weights, (angles, angles), self.device)
        pages = pages_of(self.tuning, shape)
        for slot in range(sequences):
            stage.assign_pages(slot, np.arange(slot * pages, (slot + 1) * pages, dtype=np.int32))
        return stage

    def upload(self, stage: DeviceStage, rows: Rows) -> None:
        """A batch of token 1, or of hidden states."""
        count = len(rows.positions)
        if stage.weights.embedding is not None:
            stage.upload(rows, np.ones(count, np.int32), None)
        else:
            stage.upload(rows, None, np.ones((count, stage.shape.width), np.float32))

    def time_model(self, model: Model) -> None:
        """Decode steps and prompts of one model."""
        context = max(*self.plan.contexts, *self.plan.prompts) + self.plan.chunk
        stage = self.stage(model, context, max(self.plan.batches))
        graphs = None if self.dry else Graphs(stage)
        for context in self.plan.contexts:
            for batch in self.plan.batches:
                name = f"{model.name}, batch {batch}, context {context}"
                self.guard(name, partial(self.time_decode, stage, graphs, context, batch, name))
        for count in self.plan.prompts:
            name = f"{model.name}, prompt of {count}"
            self.guard(name, partial(self.time_prompt, stage, count, name))

    def time_decode(self, stage: DeviceStage, graphs: Graphs | None, context: int, batch: int, name: str) -> None:
        """One step: the layers and, where there is one, the output head with a greedy choice."""
        self.upload(stage, Rows(np.full(batch, context, np.int32), np.arange(batch, dtype=np.int32), (1,) * batch))
        splits = splits_of(self.tuning, context + 1)
        everyone = torch.arange(batch, device=self.device)

        def step() -> None:
            if graphs is not None:
                graphs.run(batch, splits)
            else:
                stage.run(batch, splits, single=True)
            if stage.weights.output is not None:
                op.launch_choose(self.tuning, stage.logits(everyone))

        for _ in range(0 if graphs is None else 3):
            step()
        seconds = self.seconds(step)
        if stage.weights.output is not None and not bool(torch.isfinite(stage.x[:batch]).all()):
            self.failures.append(f"{name}: the result is not finite")
        heads = stage.shape.heads
        cache = batch * context * len(stage.shape.windows) * heads.kv_heads * (heads.head + heads.value) * 2
        self.row(
            "decode",
            name,
            milliseconds=seconds * 1e3,
            tokens_a_second=batch / seconds,
            of_copy=(stage.weights.nbytes + cache) / seconds / self.copy,
        )

    def time_prompt(self, stage: DeviceStage, count: int, name: str) -> None:
        """A prompt in chunks, by tiled products and by the decode kernels (which give the same bits as decoding)."""

        def run(tiled: bool) -> None:
            for start in range(0, count, self.plan.chunk):
                rows = min(self.plan.chunk, count - start)
                positions = np.arange(start, start + rows, dtype=np.int32)
                batch = Rows(positions, np.zeros(rows, np.int32), (rows,))
                self.upload(stage, batch)
                if tiled:
                    stage.run_tiled(batch)
                else:
                    stage.run(rows, splits_of(self.tuning, start + rows), single=False)

        for label, tiled in (("tiled", True), ("as decoded", False)):
            if tiled or count <= 512:
                seconds = self.seconds(partial(run, tiled))
                self.row("prompt", f"{name}, {label}", milliseconds=seconds * 1e3, tokens_a_second=count / seconds)

    def run(self) -> None:
        """Everything."""
        for kind in LAYOUTS:
            for columns in (1,) if self.dry else (1, 2, 4, 8):
                self.guard(f"check {kind} × {columns}", partial(self.check_type, kind, columns))
        for kind in ("Q4_K", "F16", "MXFP4"):
            self.guard(f"check {kind}, split", partial(self.check_split, kind, 2 if self.dry else 8))
        for kv in op.KV_KINDS:
            for length in (70,) if self.dry else (1, 65, 3000):
                self.guard(f"check attention {kv}", partial(self.check_attention, kv, length))
        self.guard("check choice", self.check_choice)
        self.guard("copy", self.measure_copy)
        for kind in ("Q4_K",) if self.dry else tuple(LAYOUTS):
            for columns in (1,) if self.dry else (1, 8):
                task = partial(self.time_projection, kind, columns, self.plan.matrix, False)
                self.guard(f"time {kind} × {columns}", task)
        for shape in self.plan.few_rows:
            for split in (False, True):
                self.guard(f"time {shape}, split: {split}", partial(self.time_projection, "Q4_K", 1, shape, split))
        for model in self.plan.models:
            self.guard(model.name, partial(self.time_model, model))
            if not self.dry:
                torch.cuda.empty_cache()


def _cache(kv: str, pages: int, heads: op.HeadShape, page: int, device: torch.device) -> op.LayerCache:
    dtype = {"f16": torch.float16, "f32": torch.float32, "q8_0": torch.int8}[kv]
    shape = (pages, heads.kv_heads, page)
    keys, values = (torch.zeros((*shape, size), dtype=dtype, device=device) for size in (heads.head, heads.value))
    sizes = (heads.head // 32, heads.value // 32)
    scales = [torch.zeros((*shape, size), dtype=torch.float16, device=device) for size in sizes]
    return op.LayerCache(kv, keys, values, scales[0], scales[1])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in the interpreter, on any machine")
    parser.add_argument("--quick", action="store_true", help="the 8B shape alone")
    parser.add_argument("--json", type=Path, help="write the results there")
    given = parser.parse_args()
    began = time.perf_counter()
    if given.dry_run:
        speed_up()
        device, plan, name = torch.device("cpu"), DRY, "interpreter"
    elif torch.cuda.is_available():
        device, plan = torch.device("cuda", 0), QUICK if given.quick else WHOLE
        name = torch.cuda.get_device_name(0)
    else:
        print("there is no GPU here; --dry-run goes through everything without one", file=sys.stderr)
        return 2
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    bench = Bench(plan, device, tuning_here())
    bench.run()
    took = time.perf_counter() - began
    print(f"\n{len(bench.results)} results, {len(bench.failures)} failures, {took:.0f} s")
    for failure in bench.failures:
        print(f"WRONG    {failure}")
    if given.json:
        document = {
            "device": name,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "dry_run": given.dry_run,
            "seconds": round(took, 1),
            "results": bench.results,
            "failures": bench.failures,
        }
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
