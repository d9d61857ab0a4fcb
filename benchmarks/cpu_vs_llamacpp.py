"""Myelin's CPU engine and llama.cpp, interleaved in one run: the same file, the same threads, the same tokens.

    python benchmarks/cpu_vs_llamacpp.py [MODEL …] [--threads 1,2] [--tests pp512,tg128,…] [-r 5]

Models are files, or `smollm2` and `gemma3` (from their packages), or `llama1b` (a synthetic one in the shape of
Llama 3.2 1B, Q4_K_M, made when it isn't there). Tests, of which `--tests` chooses some:

    pp128, pp512     reading a prompt
    tg128            generating, from an empty context
    tg@2048          generating after a prompt of 2,048 tokens
    batch1, 4, 8     that many sequences generating at once, tokens of all together
    nodes            pipelines of one node and of two, as `myelin bench` runs them: pp512, tg128, two streams at once
    memory           what each process has resident at most, after pp512 and some tokens; and its loading time
    bandwidth        generating beside the GB/s that as many threads of this machine stream

llama.cpp comes from the package `xllamacpp`. Each side is a process in a session of its own; each round measures one
right after the other, in alternating order, so that a machine whose speed drifts is fair to both. What counts is the
ratio of the medians. Rates are tokens/s; spread is (largest - smallest) / median; a first round warms up and isn't
counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cpu_sides import Setup, Side

from myelin_testkit.models import gemma3_path, smollm2_path
from myelin_testkit.synthetic import LLAMA_1B, write_model

MYELIN, LLAMACPP = "myelin", "llama.cpp"
DEPTH = 2048
DEPTH_TOKENS = 32
BATCH_TOKENS = 48
SETTLE_SECONDS = 0.05
"""Before each measurement: until the other side's threads have gone to sleep."""

RATES = ("pp128", "pp512", "tg128", f"tg@{DEPTH}", "batch1", "batch4", "batch8")
TESTS = (*RATES, "nodes", "memory", "bandwidth")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of one model with one number of threads."""

    model: Path
    threads: int
    tests: tuple[str, ...]
    rounds: int
    kv_dtype: str


Figures = dict[str, Any]


def summary(values: Sequence[float]) -> Figures:
    """Median, spread, and the values."""
    median = statistics.median(values)
    return {
        "median": round(median, 2),
        "spread": round((max(values) - min(values)) / median, 3),
        "values": [round(value, 2) for value in values],
    }


def interleave(sides: Sequence[Side], rounds: int, measure: Callable[[Side], float]) -> dict[str, Figures]:
    """The sides' figures of one test, measured in turns."""
    values: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides if number % 2 else sides[::-1]:
            time.sleep(SETTLE_SECONDS)
            value = measure(side)
            if number:
                values[side.name].append(value)
    return {name: summary(found) for name, found in values.items()}


def compared(figures: dict[str, Figures], ours: str = MYELIN, theirs: str = LLAMACPP) -> Figures:
    """The figures with the ratio of their medians."""
    return {**figures, "ratio": round(figures[ours]["median"] / figures[theirs]["median"], 3)}


@contextlib.contextmanager
def started(*setups: tuple[str, Setup]) -> Iterator[list[Side]]:
    """Sides, ended afterwards."""
    sides: list[Side] = []
    try:
        for name, setup in setups:
            sides.append(Side(name, setup))
        yield sides
    finally:
        for side in sides:
            side.close()


def both(plan: Plan, context: int, sequences: int = 1) -> Any:
    """The engine and llama.cpp, with room for ``sequences``."""
    setups = [
        (name, Setup(kind, str(plan.model), plan.threads, context, sequences, kv_dtype=plan.kv_dtype))
        for name, kind in ((MYELIN, "engine"), (LLAMACPP, "llamacpp"))
    ]
    return started(*setups)


def random_tokens(vocabulary: int, count: int, seed: int = 0) -> list[int]:
    """Token ids; the first few of a vocabulary are special in most models."""
    return [int(token) for token in np.random.default_rng(seed).integers(10, vocabulary - 1, count)]


def rate_test(test: str, vocabulary: int) -> Callable[[Side], float]:
    """What is asked of a side in a test of :data:`RATES`."""
    if test.startswith("pp"):
        tokens = random_tokens(vocabulary, int(test[2:]))
        return lambda side: float(side.ask("prompt", tokens=tokens))
    if test == "tg128":
        start = random_tokens(vocabulary, 1)
        return lambda side: float(side.ask("generate", tokens=start, count=128))
    if test.startswith("tg@"):
        deep = random_tokens(vocabulary, int(test[3:]))
        return lambda side: float(side.ask("generate", tokens=deep, count=DEPTH_TOKENS))
    prompts = [random_tokens(vocabulary, 16, seed) for seed in range(int(test.removeprefix("batch")))]
    return lambda side: float(side.ask("streams", prompts=prompts, count=BATCH_TOKENS))


def run_rates(plan: Plan, report: Callable[[str, Figures], None]) -> None:
    """Every test of :data:`RATES` that was chosen; those that need a larger context or more sequences by themselves."""
    groups = (
        (("pp128", "pp512", "tg128"), 1024, 1),
        ((f"tg@{DEPTH}",), DEPTH + 256, 1),
        (("batch1", "batch4", "batch8"), 256, 8),
    )
    for names, context, sequences in groups:
        chosen = [name for name in names if name in plan.tests]
        if not chosen:
            continue
        with both(plan, context, sequences) as sides:
            for name in chosen:
                measure = rate_test(name, min(side.vocabulary for side in sides))
                report(name, compared(interleave(sides, plan.rounds, measure)))


def run_memory(plan: Plan, report: Callable[[str, Figures], None]) -> None:
    """Fresh processes with a context of 4,096: the most that they held, and how long they took to load."""
    loads: dict[str, list[float]] = {MYELIN: [], LLAMACPP: []}
    peaks: dict[str, list[float]] = {MYELIN: [], LLAMACPP: []}
    for _ in range(max(1, min(3, plan.rounds))):
        with both(plan, 4096) as sides:
            prompt = random_tokens(min(side.vocabulary for side in sides), 512)
            for side in sides:
                side.ask("prompt", tokens=prompt)
                side.ask("generate", tokens=prompt[:1], count=16)
                peaks[side.name].append(side.ask("peak") / 1e6)
                loads[side.name].append(side.load_seconds)
    report("peak memory, MB", compared({name: summary(found) for name, found in peaks.items()}))
    report("load, s", compared({name: summary(found) for name, found in loads.items()}))


def run_bandwidth(plan: Plan, report: Callable[[str, Figures], None]) -> None:
    """Decoding and plain reading in turns; what decoding reads for each token is taken to be the file's size."""
    size = plan.model.stat().st_size / 1e9
    setups = [
        (name, Setup(kind, str(plan.model), plan.threads, 1024))
        for name, kind in (("decode", "engine"), ("stream", "memory"))
    ]
    with started(*setups) as sides:
        start = random_tokens(sides[0].vocabulary, 1)

        def measure(side: Side) -> float:
            if side.name == "stream":
                return float(side.ask("rate"))
            return float(side.ask("generate", tokens=start, count=64)) * size

        report("streaming, GB/s", compared(interleave(sides, plan.rounds, measure), "decode", "stream"))


def run_nodes(plan: Plan, report: Callable[[str, Figures], None]) -> None:
    """Pipelines of one and of two nodes, each node with the same number of threads."""
    setups = [
        (f"-N {stages}", Setup("pipeline", str(plan.model), plan.threads, 1024, 2, stages, plan.kv_dtype))
        for stages in (1, 2)
    ]
    with started(*setups) as sides:
        vocabulary = min(side.vocabulary for side in sides)
        for name in ("pp512", "tg128"):
            figures = interleave(sides, plan.rounds, rate_test(name, vocabulary))
            report(f"{name} over nodes", compared(figures, "-N 2", "-N 1"))
        prompts = [random_tokens(vocabulary, 16, seed) for seed in range(2)]
        two = interleave(
            sides[1:], plan.rounds, lambda side: float(side.ask("streams", prompts=prompts, count=BATCH_TOKENS))
        )
        one = interleave(
            sides[1:], plan.rounds, lambda side: float(side.ask("streams", prompts=prompts[:1], count=BATCH_TOKENS))
        )
        report("-N 2, streams", compared({"2 streams": two["-N 2"], "1 stream": one["-N 2"]}, "2 streams", "1 stream"))


def processor() -> str:
    """What the machine calls its processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def model_path(name: str, folder: Path) -> Path:
    """The file of a model that was named on the command line."""
    if name == "smollm2":
        return smollm2_path()
    if name == "gemma3":
        return gemma3_path(folder)
    if name == "llama1b":
        path = folder / "synthetic-llama-1b-q4_k_m.gguf"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            write_model(LLAMA_1B, partial)
            partial.replace(path)
        return path
    return Path(name)


def line_of(test: str, figures: Figures) -> str:
    """A row of the table."""
    names = [name for name in figures if name != "ratio"]
    cells = "  ".join(f"{name} {figures[name]['median']:9.2f} ±{figures[name]['spread'] / 2:4.0%}" for name in names)
    return f"{test:18} {cells}   ratio {figures['ratio']:.3f}"


def main() -> None:
    """Measure, print a table, write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--threads", default="1", help="numbers of compute threads, as in 1,2")
    parser.add_argument("--tests", default="pp128,pp512,tg128,memory", help=f"some of {','.join(TESTS)}, or all")
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--kv-dtype", default="f16", choices=("f16", "q8_0"), help="of both sides")
    parser.add_argument("--models-folder", type=Path, default=Path(tempfile.gettempdir()) / "myelin-benchmark-models")
    parser.add_argument("--json", type=Path, help="write everything there")
    options = parser.parse_args()
    tests = TESTS if options.tests == "all" else tuple(options.tests.split(","))
    unknown = sorted(set(tests) - set(TESTS))
    if unknown:
        parser.error(f"no test is called {', '.join(unknown)}; there are {', '.join(TESTS)}")

    import importlib.metadata

    result: Figures = {
        "processor": processor(),
        "system": platform.platform(),
        "llamacpp": importlib.metadata.version("xllamacpp"),
        "rounds": options.rounds,
        "runs": [],
    }
    print(f"{processor()}; xllamacpp {result['llamacpp']}; medians of {options.rounds}")
    for name in options.models:
        path = model_path(name, options.models_folder)
        for threads in (int(number) for number in options.threads.split(",")):
            plan = Plan(path, threads, tests, options.rounds, options.kv_dtype)
            found: dict[str, Figures] = {}

            def report(test: str, figures: Figures, found: dict[str, Figures] = found) -> None:
                found[test] = figures
                print(line_of(test, figures), flush=True)

            print(f"{path.name}, {threads} thread{'s' if threads > 1 else ''}")
            run_rates(plan, report)
            if "memory" in tests:
                run_memory(plan, report)
            if "bandwidth" in tests:
                run_bandwidth(plan, report)
            if "nodes" in tests:
                run_nodes(plan, report)
            result["runs"].append(
                {"model": path.name, "bytes": path.stat().st_size, "threads": threads, "tests": found}
            )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
