"""``myelin bench``: how fast a pipeline takes a prompt in, and how fast it gives tokens out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from myelin.cli.options import MODEL_OPTIONS, PIPELINE_OPTIONS, RECORD_OPTIONS, Invocation, with_options

if TYPE_CHECKING:
    from myelin.cli.composition import Root
    from myelin.cli.llamacpp import LlamaCpp
    from myelin.orchestrator.pipeline import Pipeline

NAME = "bench"

SEED = 20_240_229
"""Of the random token ids, so that every run computes the same."""

LLAMACPP = "llamacpp"


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured: tokens of a prompt, tokens generated, how often; 0 leaves one out."""

    prompt_tokens: int
    new_tokens: int
    repetitions: int


@dataclass(slots=True)
class Rates:
    """Tokens a second of each repetition: of prompts (``pp``), and of generation (``tg``)."""

    pp: list[float] = field(default_factory=list)
    tg: list[float] = field(default_factory=list)


@with_options(MODEL_OPTIONS, PIPELINE_OPTIONS, RECORD_OPTIONS, yes=True)
def command(
    invocation: Invocation,
    prompt_tokens: Annotated[
        int, typer.Option("-p", "--n-prompt", min=0, metavar="TOKENS", help="Tokens of the prompt; 0 leaves it out.")
    ] = 512,
    new_tokens: Annotated[
        int, typer.Option("-n", "--n-gen", min=0, metavar="TOKENS", help="Tokens to generate; 0 leaves it out.")
    ] = 128,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, metavar="N", help="How often.")] = 5,
    compare: Annotated[
        str, typer.Option("--compare", metavar="llamacpp", help="Also measure llama.cpp (xllamacpp), in turns.")
    ] = "",
) -> int:
    """Measure prompt and generation speed of a real pipeline, with random tokens.

    As llama-bench does, both are measured apart: a prompt of -p tokens until its first new token, and -n tokens after a
    prompt of one. A round that isn't counted goes before.
    """
    from myelin.cli.composition import assemble
    from myelin.cli.output import answer, answer_json
    from myelin.cli.running import run_to_end
    from myelin.errors import UsageError

    if compare not in ("", LLAMACPP):
        raise UsageError(f"There is nothing to compare with by the name {compare!r}", f"use --compare {LLAMACPP}")
    if not prompt_tokens and not new_tokens:
        raise UsageError("With -p 0 and -n 0 there is nothing to measure", "give one of them a number above 0")
    workload = Workload(prompt_tokens, new_tokens, repetitions)
    document = run_to_end(_measure(assemble(invocation), workload, compare, yes=invocation.yes))
    if invocation.json:
        answer_json(document)
    else:
        answer(bench_text(document))
    return 0


async def _measure(root: Root, workload: Workload, compare: str, *, yes: bool) -> dict[str, object]:
    from myelin.cli import composition
    from myelin.cli.agreement import asking
    from myelin.cli.display import Display
    from myelin.cli.output import tell
    from myelin.cli.stages import stages_json, stages_table

    request = composition.run_request(root)
    longest = max(workload.prompt_tokens, workload.new_tokens + 1) + 1
    if not request.engine_options.max_context and longest > DEFAULT_CONTEXT:
        request = replace(request, engine_options=replace(request.engine_options, max_context=longest))
    with Display(root.settings.observability.log_level) as display:
        request = asking(request, yes=yes, quiet=display.quiet)
        async with composition.open_pipeline(request, root.registry, display) as pipeline:
            display.quiet()
            tell(stages_table(pipeline.stages))
            other = _other(compare, root, pipeline, longest)
            try:
                ours, theirs = await _rounds(pipeline, other, workload)
            finally:
                if other is not None:
                    other.close()
            status = await pipeline.status()
            document: dict[str, object] = {
                "model": pipeline.plan.model_uri,
                "pp": _middle(ours.pp),
                "tg": _middle(ours.tg),
                "threads": max(stage.threads for stage in pipeline.stages),
                "stages": len(pipeline.stages),
                "engine": pipeline.stages[0].engine,
                "n_prompt": workload.prompt_tokens,
                "n_gen": workload.new_tokens,
                "repetitions": workload.repetitions,
                "pp_runs": ours.pp,
                "tg_runs": ours.tg,
                "bootstrap_s": pipeline.bootstrap_seconds,
                "peak_resident_bytes": [stage.peak_resident_bytes for stage in status],
                "nodes": stages_json(pipeline.stages),
            }
    if other is not None:
        document["llamacpp"] = {
            "version": other.version,
            "threads": other.threads,
            "pp": _middle(theirs.pp),
            "tg": _middle(theirs.tg),
            "pp_runs": theirs.pp,
            "tg_runs": theirs.tg,
            "pp_ratio": _ratio(ours.pp, theirs.pp),
            "tg_ratio": _ratio(ours.tg, theirs.tg),
        }
    return document


DEFAULT_CONTEXT = 4096
"""A pipeline's context where none was asked for (the model's own, if that is smaller)."""


def _other(compare: str, root: Root, pipeline: Pipeline, context: int) -> LlamaCpp | None:
    """llama.cpp with the same model and threads, loaded; None where nobody asked for it."""
    if not compare:
        return None
    from myelin.cli import composition
    from myelin.cli.llamacpp import LlamaCpp

    source = root.registry.model_source(pipeline.plan.model_uri, composition.source_options(root.settings))
    return LlamaCpp(source, threads=max(stage.threads for stage in pipeline.stages), context=context)


async def _rounds(pipeline: Pipeline, other: LlamaCpp | None, workload: Workload) -> tuple[Rates, Rates]:
    """Rounds in turns, ours and the other's, so that whatever slows the machine slows both. The first isn't counted."""
    import asyncio
    import random

    from myelin.cli.output import tell

    generator = random.Random(SEED)
    vocabulary = min(pipeline.parameters.vocab_size, pipeline.tokenizer.vocab_size)
    prompt = [generator.randrange(vocabulary) for _ in range(workload.prompt_tokens)]
    start = prompt[:1] or [generator.randrange(vocabulary)]
    ours, theirs = Rates(), Rates()
    for number in range(workload.repetitions + 1):
        counted = number > 0
        if prompt:
            rate = await _prompt_rate(pipeline, prompt)
            ours.pp += [rate] * counted
        if other is not None and prompt:
            rate = await asyncio.to_thread(other.prompt_rate, prompt)
            theirs.pp += [rate] * counted
        if workload.new_tokens:
            rate = await _generation_rate(pipeline, start, workload.new_tokens)
            ours.tg += [rate] * counted
        if other is not None and workload.new_tokens:
            rate = await asyncio.to_thread(other.generation_rate, start, workload.new_tokens)
            theirs.tg += [rate] * counted
        if counted:
            beside = f"; llama.cpp {_last(theirs)}" if other is not None else ""
            tell(f"round {number} of {workload.repetitions}: {_last(ours)}{beside}")
    return ours, theirs


async def _prompt_rate(pipeline: Pipeline, prompt: Sequence[int]) -> float:
    """Tokens of the prompt a second, until the first new token is here."""
    times = await _token_times(pipeline, prompt, 1)
    return len(prompt) / times[1]


async def _generation_rate(pipeline: Pipeline, start: Sequence[int], count: int) -> float:
    """New tokens a second, from the first (which the prompt's own step gives) over the next ``count``."""
    times = await _token_times(pipeline, start, count + 1)
    return count / (times[-1] - times[1])


async def _token_times(pipeline: Pipeline, prompt: Sequence[int], count: int) -> list[float]:
    """When each of ``count`` new tokens came, in seconds after the request; 0.0 for the request itself comes first."""
    from myelin.errors import EngineError
    from myelin.wire.requests import NewToken

    began = time.perf_counter()
    async with aclosing(pipeline.generate(prompt, max_tokens=count, ignore_end=True)) as events:
        times = [0.0, *[time.perf_counter() - began async for event in events if isinstance(event, NewToken)]]
    if len(times) != count + 1:
        raise EngineError(
            f"The pipeline gave {len(times) - 1} tokens where {count} were asked for", "use a larger --max-context"
        )
    return times


def _middle(rates: Sequence[float]) -> float | None:
    """The median; None where nothing was measured."""
    return statistics.median(rates) if rates else None


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Our median over theirs."""
    return statistics.median(ours) / statistics.median(theirs) if ours and theirs else None


def _last(rates: Rates) -> str:
    return ", ".join(f"{name} {runs[-1]:.2f}" for name, runs in (("pp", rates.pp), ("tg", rates.tg)) if runs)


def bench_text(document: dict[str, object]) -> str:
    """Rows as ``llama-bench`` has them: the median and the standard deviation of each test."""
    from myelin.cli.output import table

    rows: list[tuple[object, ...]] = []
    engines: list[tuple[str, dict[str, object]]] = [(str(document["engine"]), document)]
    theirs = document.get("llamacpp")
    if isinstance(theirs, dict):
        engines.append(("llama.cpp", theirs))
    for test, size in (("pp", document["n_prompt"]), ("tg", document["n_gen"])):
        for name, source in engines:
            runs = source[f"{test}_runs"]
            assert isinstance(runs, list)
            if not runs:
                continue
            spread = statistics.stdev(runs) if len(runs) > 1 else 0.0
            stages = document["stages"] if source is document else 1
            rate = f"{statistics.median(runs):.2f} ± {spread:.2f}"
            rows.append((name, source["threads"], stages, f"{test}{size}", rate))
    lines = [str(document["model"]), table(("engine", "threads", "stages", "test", "tokens/s"), rows, right=(1, 2, 4))]
    if isinstance(theirs, dict):
        ratios = [
            f"{test} {theirs[f'{test}_ratio']:.3f}" for test in ("pp", "tg") if theirs[f"{test}_ratio"] is not None
        ]
        lines.append(f"times as fast as llama.cpp {theirs['version']}: {', '.join(ratios)}")
    return "\n".join(lines)
