"""``myelin offers``: what the provider could start for each stage of the model, and at what price."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from myelin.cli.options import RUN_OPTIONS, Invocation, with_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from myelin.cli.composition import Root
    from myelin.cluster.provider import Need, Offer

NAME = "offers"


@with_options(RUN_OPTIONS)
def command(
    invocation: Invocation,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="Offers of each stage at most.", min=1)] = 5,
) -> int:
    """Show what the provider could start for the model's stages, best first. Starts nothing."""
    from myelin.cli.composition import assemble
    from myelin.cli.output import answer, answer_json, human_bytes, table
    from myelin.cli.running import run_to_end
    from myelin.cluster.quote import dollars

    root = assemble(invocation)
    stages = run_to_end(_offers(root))
    provider = root.settings.provider.name
    best = sum(offers[0].dollars_per_hour for _, offers in stages if offers)
    if invocation.json:
        answer_json(
            {
                "provider": provider,
                "dollars_per_hour": best if all(offers for _, offers in stages) else None,
                "max_dollars_per_hour": root.settings.provider.max_dph_total or None,
                "stages": [_stage_document(index, need, offers[:limit]) for index, (need, offers) in enumerate(stages)],
            }
        )
    else:
        rows = [
            (
                need.node,
                offer.description,
                human_bytes(offer.memory_bytes) if offer.memory_bytes else "",
                f"{dollars(offer.dollars_per_hour)}/h",
                offer.id,
            )
            for need, offers in stages
            for offer in offers[:limit]
        ]
        answer(table(("for", "offer", "memory", "price", "id"), rows, right=(2, 3)))
        for need, offers in stages:
            if not offers:
                answer(f"{need.node} needs {human_bytes(need.memory_bytes)}, and nothing is offered for that")
        if best:
            answer(f"\nThe best of each: {dollars(best)}/h")
    return 0 if all(offers for _, offers in stages) else 1


def _stage_document(index: int, need: Need, offers: Sequence[Offer]) -> dict[str, object]:
    return {
        "index": index,
        "node": need.node,
        "engine": need.engine,
        "memory_bytes": need.memory_bytes,
        "offers": [
            {
                "id": offer.id,
                "description": offer.description,
                "memory_bytes": offer.memory_bytes or None,
                "dollars_per_hour": offer.dollars_per_hour,
                "details": dict(offer.details),
            }
            for offer in offers
        ],
    }


async def _offers(root: Root) -> list[tuple[Need, Sequence[Offer]]]:
    """The offers for each stage of the plan."""
    from myelin.cli import composition
    from myelin.cli.display import Display
    from myelin.cluster.provider import Need, ProviderContext

    request = composition.run_request(root)
    with Display(root.settings.observability.log_level) as display:
        run = await composition.plan_run(request, root.registry, display)
    provider = root.registry.provider(
        request.provider, ProviderContext(request.run, request.provider_section, request.stages)
    )
    try:
        needs = [Need(stage.node, stage.memory_bytes, run.engine.name) for stage in run.plan.stages]
        return [(need, await provider.offers(need)) for need in needs]
    finally:
        await provider.close()
