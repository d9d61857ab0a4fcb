"""``myelin plan``: which node would hold what, without starting any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from myelin.cli.options import RUN_OPTIONS, Invocation, with_options

if TYPE_CHECKING:
    from myelin.orchestrator.planning import PlannedRun

NAME = "plan"


@with_options(RUN_OPTIONS)
def command(invocation: Invocation) -> int:
    """Show how the model would be split, and what each stage costs."""
    from myelin.cli import composition
    from myelin.cli.display import Display
    from myelin.cli.output import answer, answer_json
    from myelin.cli.running import run_to_end

    root = composition.assemble(invocation)
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
            }
            for stage in plan.stages
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
        ("stage", "node", "layers", "tensors", "weights", "KV", "scratch", "memory"),
        [
            (
                stage.index,
                stage.node,
                f"{stage.layers[0]}-{stage.layers[1] - 1}",
                stage.tensor_count,
                human_bytes(stage.weight_bytes),
                human_bytes(stage.kv_bytes),
                human_bytes(stage.scratch_bytes),
                human_bytes(stage.memory_bytes),
            )
            for stage in plan.stages
        ],
        right=(0, 3, 4, 5, 6, 7),
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
