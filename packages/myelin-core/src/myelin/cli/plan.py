"""``myelin plan``: which node would hold what, without starting any; and what it would be like on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from myelin.cli.options import RUN_OPTIONS, Invocation, with_options

if TYPE_CHECKING:
    from myelin.cli.composition import Root
    from myelin.model.shard import ShardPlan
    from myelin.orchestrator.planning import OpenedModel, PlannedRun
    from myelin.planner.what_if import Forecast, Machine

NAME = "plan"


@with_options(RUN_OPTIONS)
def command(
    invocation: Invocation,
    nodes: Annotated[
        Path | None,
        typer.Option("--nodes", metavar="PATH", help="A TOML file of machines that you could have."),
    ] = None,
) -> int:
    """Show how the model would be split, and what each stage costs. Only the model's header is fetched.

    With --nodes: which of those machines would serve it best, how fast, and at what price.
    """
    from myelin.cli import composition
    from myelin.cli.display import Display
    from myelin.cli.output import answer, answer_json
    from myelin.cli.running import run_to_end

    root = composition.assemble(invocation)
    if nodes is not None:
        return _what_if(invocation, root, nodes)
    request = composition.run_request(root)
    with Display(root.settings.observability.log_level) as display:
        run = run_to_end(composition.plan_run(request, root.registry, display))
    if invocation.json:
        answer_json(plan_document(run))
    else:
        answer(plan_text(run))
    return 0


def plan_document(run: PlannedRun) -> dict[str, object]:
    """What ``myelin plan --json`` answers. Sizes are bytes."""
    plan = run.plan
    return {
        "model": plan.model_uri,
        "architecture": run.facts.architecture,
        "n_layers": run.parameters.n_layers,
        "planner": plan.planner,
        "engine": run.engine.name,
        "max_context": plan.max_context,
        "max_sequences": plan.max_sequences,
        "max_batch_tokens": plan.max_batch_tokens,
        "stages": [
            {
                "index": stage.index,
                "node": str(stage.node),
                "layers": list(stage.layers),
                "tensors": stage.tensor_count,
                "weight_bytes": stage.weight_bytes,
                "kv_bytes": stage.kv_bytes,
                "scratch_bytes": stage.scratch_bytes,
                "memory_bytes": stage.memory_bytes,
                "shard": shard_document(shard),
            }
            for stage, shard in zip(plan.stages, _shards(run), strict=True)
        ],
        "edges": [
            {
                "kind": edge.kind.value,
                "source": edge.source,
                "target": edge.target,
                "token_bytes": edge.token_bytes,
                "record_bytes": edge.record_bytes,
            }
            for edge in plan.edges
        ],
        "notes": list(plan.notes),
    }


def plan_text(run: PlannedRun) -> str:
    """The plan for people."""
    from myelin.cli.output import human_bytes, table

    plan = run.plan
    stages = table(
        ("stage", "node", "layers", "tensors", "weights", "ranges", "of file", "KV", "scratch", "memory"),
        [
            (
                stage.index,
                stage.node,
                f"{stage.layers[0]}-{stage.layers[1] - 1}",
                stage.tensor_count,
                human_bytes(stage.weight_bytes),
                len(shard.ranges),
                f"{100 * shard.fraction:.1f} %",
                human_bytes(stage.kv_bytes),
                human_bytes(stage.scratch_bytes),
                human_bytes(stage.memory_bytes),
            )
            for stage, shard in zip(plan.stages, _shards(run), strict=True)
        ],
        right=(0, 3, 4, 5, 6, 7, 8, 9),
    )
    edges = table(
        ("edge", "from", "to", "a token", "a record at most"),
        [
            (edge.kind.value, edge.source, edge.target, human_bytes(edge.token_bytes), human_bytes(edge.record_bytes))
            for edge in plan.edges
        ],
        right=(3, 4),
    )
    head = (
        f"{plan.model_uri}\n{run.facts.architecture}, {run.parameters.n_layers} layers, "
        f"{human_bytes(run.facts.tensor_bytes)} of tensors; engine {run.engine.name}, planner {plan.planner}; "
        f"context {plan.max_context}, {plan.max_sequences} sequences"
    )
    return "\n\n".join([head, stages, edges, *(["\n".join(plan.notes)] if plan.notes else [])])


def _shards(run: PlannedRun) -> list[ShardPlan]:
    """What each stage would fetch."""
    from myelin.model.shard import plan_shard

    return [plan_shard(run.facts, run.parameters, stage.slice) for stage in run.plan.stages]


def shard_document(shard: ShardPlan) -> dict[str, object]:
    """A stage's bytes: ranges as ``[part, start, end]``."""
    return {
        "tensors": shard.tensors,
        "bytes": shard.range_bytes,
        "fraction": shard.fraction,
        "ranges": [[piece.part, piece.start, piece.end] for piece in shard.ranges],
    }


# What if -------------------------------------------------------------------------------------------------------------


def _what_if(invocation: Invocation, root: Root, path: Path) -> int:
    from myelin.cli import composition
    from myelin.cli.nodes_file import read_nodes
    from myelin.cli.output import answer, answer_json
    from myelin.config.model_choice import model_uri
    from myelin.orchestrator.planning import open_model

    machines = read_nodes(path)
    source = root.registry.model_source(model_uri(root.settings), composition.source_options(root.settings))
    model = open_model(source)
    forecasts = forecasts_for(model, root, machines)
    if invocation.json:
        answer_json(what_if_document(model, forecasts))
    else:
        answer(what_if_text(model, forecasts))
    return 0


def forecasts_for(model: OpenedModel, root: Root, machines: tuple[Machine, ...]) -> list[Forecast]:
    """Every way of serving the model on these machines, the fastest first.

    Raises:
        PlanError: There is none.
    """
    from myelin.engine.contract import EngineOptions
    from myelin.orchestrator.planning import KV_BYTES, resolved_options
    from myelin.planner.run_plan import NodeCapacity, PlanRequest, RunPlan
    from myelin.planner.what_if import what_if

    runtime = root.settings.runtime
    options = resolved_options(EngineOptions(max_context=runtime.max_context), model.parameters)

    def plan(nodes: tuple[NodeCapacity, ...]) -> RunPlan:
        request = PlanRequest(
            facts=model.facts,
            parameters=model.parameters,
            model_uri=model.uri,
            nodes=nodes,
            max_context=options.max_context,
            max_sequences=runtime.max_sequences,
            max_batch_tokens=runtime.max_batch_tokens,
            kv_bytes_per_value=KV_BYTES.get(runtime.kv_dtype, 2),
        )
        return root.registry.plan(request, runtime.planner)

    return what_if(model.facts, model.parameters, machines, plan)


def what_if_document(model: OpenedModel, forecasts: list[Forecast]) -> dict[str, object]:
    """What ``myelin plan --nodes --json`` answers: alternatives, the fastest first."""
    cheapest = min(forecasts, key=lambda one: one.batch_dollars_per_million)
    return {
        "model": model.uri,
        "architecture": model.facts.architecture,
        "n_layers": model.parameters.n_layers,
        "max_context": forecasts[0].plan.max_context,
        "max_sequences": forecasts[0].plan.max_sequences,
        "alternatives": [
            {
                "rank": rank,
                "nodes": [machine.name for machine in one.machines],
                "cheapest": one is cheapest,
                "seconds_per_token": one.token_seconds,
                "tokens_per_s": one.tokens_per_second,
                "batch_tokens_per_s": one.batch_tokens_per_second,
                "dollars_per_hour": one.dollars_per_hour,
                "dollars_per_million_tokens": one.dollars_per_million,
                "batch_dollars_per_million_tokens": one.batch_dollars_per_million,
                "stages": [
                    {
                        "node": str(stage.node),
                        "layers": list(stage.layers),
                        "weight_bytes": stage.weight_bytes,
                        "memory_bytes": stage.memory_bytes,
                        "seconds": seconds,
                    }
                    for stage, seconds in zip(one.plan.stages, one.stage_seconds, strict=True)
                ],
            }
            for rank, one in enumerate(forecasts, 1)
        ],
    }


_SHOWN = 10
"""Alternatives in the table; --json has all."""


def what_if_text(model: OpenedModel, forecasts: list[Forecast]) -> str:
    """The alternatives for people, and the best one's stages."""
    from myelin.cli.output import human_bytes, table

    best = forecasts[0]
    sequences = best.plan.max_sequences
    cheapest = min(forecasts, key=lambda one: one.batch_dollars_per_million)
    rows = [
        (
            rank,
            ", ".join(machine.name for machine in one.machines) + (" (cheapest)" if one is cheapest else ""),
            f"{1000 * one.token_seconds:.2f} ms",
            f"{one.tokens_per_second:.1f}",
            f"{one.batch_tokens_per_second:.1f}",
            f"{one.dollars_per_hour:.2f}",
            f"{one.dollars_per_million:.2f}",
            f"{one.batch_dollars_per_million:.2f}",
        )
        for rank, one in enumerate(forecasts, 1)
        if rank <= _SHOWN or one is cheapest
    ]
    ranking = table(
        ("rank", "nodes", "a token", "tokens/s", f"tokens/s of {sequences}", "$/h", "$/M", f"$/M of {sequences}"),
        rows,
        right=(0, 2, 3, 4, 5, 6, 7),
    )
    stages = table(
        ("node", "layers", "weights", "memory", "a token"),
        [
            (
                stage.node,
                f"{stage.layers[0]}-{stage.layers[1] - 1}",
                human_bytes(stage.weight_bytes),
                human_bytes(stage.memory_bytes),
                f"{1000 * seconds:.2f} ms",
            )
            for stage, seconds in zip(best.plan.stages, best.stage_seconds, strict=True)
        ],
        right=(2, 3, 4),
    )
    head = (
        f"{model.uri}\n{model.facts.architecture}, {model.parameters.n_layers} layers, "
        f"{human_bytes(model.facts.tensor_bytes)} of tensors; context {best.plan.max_context}, {sequences} sequences"
    )
    note = "Decoding as far as memory traffic and links go; a real engine comes near it, and never above."
    return "\n\n".join([head, ranking, "The fastest:\n" + stages, note])
