"""How a run is planned: the model is opened, the provider asked what it offers, and stages are cut to fit that."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from opentelemetry.util.types import AttributeValue

from myelin.cluster.provider import Offer
from myelin.errors import PlanError, PluginError, ProviderError
from myelin.orchestrator.background import in_thread
from myelin.orchestrator.events import ProgressEvent
from myelin.orchestrator.machines import Planner, read_offers
from myelin.orchestrator.planning import (
    OpenedModel,
    Planning,
    abandonable,
    engine_of,
    make_tokenizer,
    open_model,
    plan_run,
    planner_of,
)
from myelin.orchestrator.run import Run
from myelin.telemetry import attributes
from myelin.transport.contract import ORCHESTRATOR


async def make_plan(run: Run, *, must_fit: bool) -> Planning:
    """The model's header, the engine, which node holds what, by what the provider offers. Starts nothing.

    Args:
        run: Its provider is made, where that can be.
        must_fit: Otherwise a model that fits nothing of what is offered is planned all the same, with a note.

    Raises:
        ModelError, PlanError, EngineError, PluginError: It can't be run as asked.
    """
    request = run.request
    model = await read_model(run)
    engine = engine_of(request, model, run.registry)
    offers = await known_offers(run, model, planner_of(request, model, run.registry), engine.name)
    packed = bool(getattr(run.provider, "packed", False))
    try:
        return plan_run(request, model, run.registry, engine, offers, packed=packed)
    except PlanError as error:
        if must_fit or error.reason != "too-little-memory":
            raise
        planning = plan_run(request, model, run.registry, engine)
        notes = (*planning.plan.notes, f"{request.provider} could not start it now: {error.message}")
        return replace(planning, plan=replace(planning.plan, notes=notes))


async def read_model(run: Run) -> OpenedModel:
    """Open the model and read its header in a thread; what is fetched for it is shown."""
    source = run.registry.model_source(run.request.model_uri, run.request.source_options)
    loop, abandoned = asyncio.get_running_loop(), False

    def show(done: int, total: int) -> None:
        event = ProgressEvent(ORCHESTRATOR, -1, "fetch", done, total)
        loop.call_soon_threadsafe(run.observer.progress, event)

    try:
        return await in_thread(lambda: open_model(source, abandonable(show, lambda: abandoned)))
    finally:
        abandoned = True


async def known_offers(run: Run, model: OpenedModel, plan: Planner, engine: str) -> tuple[Offer, ...]:
    """What the provider could start; none where that can't be known now. Its own phase tells of what is wrong
    with it."""
    try:
        async with asyncio.timeout(run.request.startup_timeout_s):
            return await read_offers(run.make_provider(model), engine, plan, run.request.stages)
    except (ProviderError, PluginError, TimeoutError):
        return ()


def begin_tokenizer(run: Run, model: OpenedModel) -> None:
    """Build the tokenizer in a thread, beside what else is to be done."""
    request = run.request
    run.tokenizing = run.background.start(
        in_thread(lambda: make_tokenizer(request, model.facts)), "build the tokenizer"
    )


def plan_attributes(planning: Planning) -> dict[str, AttributeValue]:
    """What the plan comes to, for its span. Pure."""
    facts = planning.model.facts
    return {
        attributes.MODEL_ARCHITECTURE: facts.architecture,
        attributes.MODEL_BYTES: facts.total_bytes,
        attributes.ENGINE: planning.engine.name,
        attributes.PLANNER: planning.plan.planner,
        attributes.STAGES: len(planning.plan.stages),
        attributes.MAX_CONTEXT: planning.options.max_context,
    }
