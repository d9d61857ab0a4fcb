"""``myelin inspect SOURCE``: what a model's file says, and whether it could be served."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from myelin.cli.options import RECORD_OPTIONS, Invocation, with_options

if TYPE_CHECKING:
    from myelin.cli.composition import Root
    from myelin.model.architecture import Hyperparameters
    from myelin.model.facts import ModelFacts
    from myelin.model.source import FetchProgress
    from myelin.plugins.registry import Registry

NAME = "inspect"

GREETING = ({"role": "user", "content": "Hello"},)
"""The conversation on which the chat template is tried."""


@with_options(RECORD_OPTIONS)
def command(
    invocation: Invocation,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A model's source, spelt as for --model.")],
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE,…", help="Memory of each node, in order: 24GB,24GB,16GB.")
    ] = "",
    context: Annotated[
        int, typer.Option("--max-context", metavar="TOKENS", min=0, help="Positions of one sequence, for --memory.")
    ] = 0,
) -> int:
    """Look into a model's file: what it is, what it is made of, and whether it could be served (exit code 1 if not).

    Of a model on another machine, only the header is fetched.
    """
    from myelin.cli.composition import assemble, source_options
    from myelin.cli.output import answer, answer_json
    from myelin.cli.quantities import parse_bytes
    from myelin.model.gguf import read_facts
    from myelin.model.opening import close_all

    nodes = tuple(parse_bytes(size) for size in memory.split(",")) if memory else ()
    root = assemble(invocation)
    opened = root.registry.model_source(source, source_options(root.settings))
    files = opened.open(_fetch_line())
    try:
        facts = read_facts(files)
    finally:
        close_all(files)
    document = examine(facts, opened.uri, root.registry)
    if nodes:
        document["fit"] = fit = fitting(facts, opened.uri, root, nodes, context)
        if not fit["fits"]:
            _add_problem(document, str(fit["reason"]))
    if invocation.json:
        answer_json(document)
    else:
        answer(inspect_text(document))
    return 0 if document["servable"] else 1


def examine(facts: ModelFacts, uri: str, registry: Registry) -> dict[str, object]:
    """What ``myelin inspect --json`` answers. Sizes are bytes; ``problems`` is empty for a model that can be served."""
    from myelin.errors import MyelinError
    from myelin.model.architecture import describe, legal_cuts

    problems: list[str] = []
    parameters: Hyperparameters | None = None
    try:
        parameters = describe(facts)
    except MyelinError as error:
        problems.append(error.message)
    tokenizer = _tokenizer_report(facts, problems)
    return {
        "source": uri,
        "name": _text(facts, "general.name"),
        "architecture": facts.architecture,
        "files": [{"name": part.name, "size": part.size} for part in facts.parts],
        "tensors": len(facts.tensors),
        "tensor_bytes": facts.tensor_bytes,
        "types": _types(facts),
        "hyperparameters": _plain(asdict(parameters)) if parameters is not None else None,
        "legal_cuts": list(legal_cuts(parameters)) if parameters is not None else [],
        "tokenizer": tokenizer,
        "engines": _engines(facts, parameters, registry, problems),
        "servable": not problems,
        "problems": problems,
    }


def fitting(facts: ModelFacts, uri: str, root: Root, memory: tuple[int, ...], context: int = 0) -> dict[str, object]:
    """Whether the model fits nodes of so many bytes, and what each would hold. ``reason`` and ``hint`` say why not."""
    from myelin.engine.contract import EngineOptions
    from myelin.errors import MyelinError
    from myelin.model.architecture import describe
    from myelin.orchestrator.machines import node_names
    from myelin.orchestrator.planning import KV_BYTES, resolved_options
    from myelin.planner.run_plan import NodeCapacity, PlanRequest

    runtime = root.settings.runtime
    answer: dict[str, object] = {"fits": False, "memory": list(memory), "reason": "", "hint": "", "stages": []}
    try:
        parameters = describe(facts)
        options = EngineOptions(
            max_context=context or runtime.max_context,
            max_sequences=runtime.max_sequences,
            max_batch_tokens=runtime.max_batch_tokens,
            kv_dtype=runtime.kv_dtype,
        )
        options = resolved_options(options, parameters)
        answer["max_context"], answer["max_sequences"] = options.max_context, options.max_sequences
        request = PlanRequest(
            facts=facts,
            parameters=parameters,
            model_uri=uri,
            nodes=tuple(NodeCapacity(name, size) for name, size in zip(node_names(len(memory)), memory, strict=True)),
            max_context=options.max_context,
            max_sequences=options.max_sequences,
            max_batch_tokens=options.max_batch_tokens,
            kv_bytes_per_value=KV_BYTES.get(options.kv_dtype, 2),
        )
        plan = root.registry.plan(request, runtime.planner)
    except MyelinError as error:
        answer["reason"], answer["hint"] = error.message, error.hint
        return answer
    answer["fits"] = True
    answer["stages"] = [
        {
            "layers": list(stage.layers),
            "memory_bytes": stage.memory_bytes,
            "weight_bytes": stage.weight_bytes,
            "kv_bytes": stage.kv_bytes,
            "free_bytes": size - stage.memory_bytes,
        }
        for stage, size in zip(plan.stages, memory, strict=True)
    ]
    return answer


def _add_problem(document: dict[str, object], problem: str) -> None:
    problems = document["problems"]
    assert isinstance(problems, list)
    if problem not in problems:
        problems.append(problem)
    document["servable"] = False


def _types(facts: ModelFacts) -> list[dict[str, object]]:
    """How many tensors and bytes there are of each type, the largest share first."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for tensor in facts.tensors.values():
        counts[tensor.ggml_type.name][0] += 1
        counts[tensor.ggml_type.name][1] += tensor.nbytes
    ordered = sorted(counts.items(), key=lambda item: -item[1][1])
    return [{"type": name, "tensors": number, "bytes": size} for name, (number, size) in ordered]


def _tokenizer_report(facts: ModelFacts, problems: list[str]) -> dict[str, object] | None:
    """What the tokenizer is, and what the chat template makes of a greeting."""
    from myelin.errors import MyelinError
    from myelin.model.chat_template import ChatTemplate, encode_chat
    from myelin.model.tokenizer import build_tokenizer

    try:
        tokenizer = build_tokenizer(facts)
    except MyelinError as error:
        problems.append(error.message)
        return None
    report: dict[str, object] = {
        "model": _text(facts, "tokenizer.ggml.model"),
        "pre": _text(facts, "tokenizer.ggml.pre"),
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "add_bos": tokenizer.add_bos,
        "end_ids": sorted(tokenizer.end_ids),
        "chat_template": False,
        "chat_example": None,
        "chat_error": None,
    }
    try:
        template = ChatTemplate.from_facts(facts, tokenizer)
        if template is not None:
            report["chat_template"] = True
            report["chat_example"] = template.render(GREETING)
            encode_chat(template, tokenizer, GREETING)
    except MyelinError as error:
        # Such a model can still be asked with --raw.
        report["chat_error"] = error.message
    return report


def _engines(
    facts: ModelFacts, parameters: Hyperparameters | None, registry: Registry, problems: list[str]
) -> list[dict[str, object]]:
    """Which engines could compute the model, and why others couldn't."""
    from myelin.model.architecture import stage_tensors
    from myelin.orchestrator.engines import why_not

    if parameters is None:
        return []
    tensors = [facts.tensors[name] for name in stage_tensors(facts, parameters, 0, parameters.n_layers)]
    found: list[dict[str, object]] = []
    for support in registry.engine_support():
        reason = support.unavailable or why_not(support, facts.architecture, tensors)
        found.append({"name": support.name, "able": not reason, "reason": reason})
    if not any(engine["able"] for engine in found):
        problems.append("no engine that is installed computes it")
    return found


def inspect_text(document: dict[str, object]) -> str:
    """The document for people."""
    from myelin.cli.output import human_bytes, table

    lines = [f"{document['source']}", ""]
    name = document["name"]
    lines.append(f"{document['architecture']}{f': {name}' if name else ''}")
    files = document["files"]
    assert isinstance(files, list)
    size = sum(int(file["size"]) for file in files)
    lines.append(
        f"{len(files)} file{'s' if len(files) != 1 else ''}, {human_bytes(size)}; {document['tensors']} tensors"
    )
    parameters = document["hyperparameters"]
    if isinstance(parameters, dict):
        lines.append(
            f"{parameters['n_layers']} layers of width {parameters['width']}, {parameters['n_heads']} heads "
            f"({parameters['n_kv_heads']} for keys and values), trained for {parameters['context_length']} positions"
        )
        cuts = document["legal_cuts"]
        assert isinstance(cuts, list)
        lines.append(f"may be cut before layers {_ranges(cuts)}" if cuts else "may not be cut")
    types = document["types"]
    assert isinstance(types, list)
    rows = [(kind["type"], kind["tensors"], human_bytes(kind["bytes"])) for kind in types]
    lines += ["", table(("type", "tensors", "size"), rows, right=(1, 2))]
    tokenizer = document["tokenizer"]
    if isinstance(tokenizer, dict):
        kind = " ".join(str(tokenizer[key]) for key in ("model", "pre") if tokenizer[key])
        lines += ["", f"tokenizer {kind}, {tokenizer['vocab_size']} tokens"]
        if tokenizer["chat_error"]:
            lines.append(f"chat template: fails ({tokenizer['chat_error']})")
        elif tokenizer["chat_template"]:
            lines.append(f"chat template: {tokenizer['chat_example']!r}")
        else:
            lines.append("chat template: none")
    engines = document["engines"]
    assert isinstance(engines, list)
    lines += [""] + [f"engine {one['name']}: {'able' if one['able'] else one['reason']}" for one in engines]
    lines += _fit_lines(document.get("fit"))
    problems = document["problems"]
    assert isinstance(problems, list)
    lines += ["", "can be served" if not problems else f"can't be served: {'; '.join(problems)}"]
    return "\n".join(lines)


def _fit_lines(fit: object) -> list[str]:
    """What would be where, for people."""
    from myelin.cli.output import human_bytes, table

    if not isinstance(fit, dict):
        return []
    if not fit["fits"]:
        return ["", f"does not fit: {fit['reason']}", *([f"hint: {fit['hint']}"] if fit["hint"] else [])]
    rows = [
        (
            index,
            f"{stage['layers'][0]}-{stage['layers'][1] - 1}",
            human_bytes(stage["weight_bytes"]),
            human_bytes(stage["kv_bytes"]),
            human_bytes(stage["memory_bytes"]),
            human_bytes(size),
        )
        for index, (stage, size) in enumerate(zip(fit["stages"], fit["memory"], strict=True))
    ]
    heading = f"fits with a context of {fit['max_context']} and {fit['max_sequences']} sequences:"
    return ["", heading, table(("node", "layers", "weights", "KV", "needs", "has"), rows, right=(0, 2, 3, 4, 5))]


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers with runs in short: ``1-29`` or ``5, 10, 15``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _text(facts: ModelFacts, key: str) -> str | None:
    value = facts.metadata.get(key)
    return value if isinstance(value, str) else None


def _plain(values: dict[str, object]) -> dict[str, object]:
    return {
        key: value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
    }


def _fetch_line() -> FetchProgress:
    """Progress of fetching as lines on stderr, where a source has to fetch at all."""
    from myelin.cli.display import Display
    from myelin.orchestrator.events import ProgressEvent
    from myelin.values import NodeId

    display = Display(bars=False)
    return lambda done, total: display.progress(ProgressEvent(NodeId("here"), 0, "fetch", done, total))
