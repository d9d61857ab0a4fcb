"""From a request to a pipeline that serves, phase by phase, and back to nothing.

:func:`running` is the story, and :func:`bring_up` its long first part; each function after it is one phase. What they
work on is the :class:`~myelin.orchestrator.run.Run`. Whatever happens, in whichever phase, what was started is released
before :func:`running` is left.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from opentelemetry.util.types import AttributeValue

from myelin.errors import MyelinError
from myelin.model.shard import plan_shard
from myelin.orchestrator.accounts import agree_on_price, make_executor, open_book
from myelin.orchestrator.background import in_thread
from myelin.orchestrator.events import Observer, Silent
from myelin.orchestrator.mender import Mender
from myelin.orchestrator.nodes import Step, wanted_nodes
from myelin.orchestrator.orders import handed_on, node_environment, provision_message
from myelin.orchestrator.pipeline import Pipeline
from myelin.orchestrator.planning import PlannedRun, Planning, named_plugins
from myelin.orchestrator.request import RunRequest
from myelin.orchestrator.run import Run
from myelin.orchestrator.run_planning import begin_tokenizer, make_plan, plan_attributes
from myelin.orchestrator.shutdown import bring_down, close
from myelin.orchestrator.story import Serving, Story
from myelin.orchestrator.traced_provider import TracedProvider
from myelin.telemetry import attributes
from myelin.telemetry.phases import Phase
from myelin.telemetry.tracing import traceparent
from myelin.transport.contract import ORCHESTRATOR, PeerIdentity, TransportOptions
from myelin.values import Attempt
from myelin.wire import control_pb2 as pb

if TYPE_CHECKING:
    from myelin.model.tokenizer import Tokenizer
    from myelin.plugins.registry import Registry

_SILENT = Silent()


async def planned(request: RunRequest, registry: Registry, observer: Observer = _SILENT) -> PlannedRun:
    """What ``request`` comes to: the model's facts, the engine, the plan, the tokenizer. Starts nothing.

    Raises:
        ModelError, PlanError, EngineError, PluginError: It can't be run as asked.
    """
    run = Run(request, registry, observer)
    try:
        with run.story.phase(Phase.CONFIG):
            registry.require(named_plugins(request))
        plan = await plan_stages(run, must_fit=False)
        tokenizer = await run.tokenizer
        return PlannedRun(
            plan.request, plan.model, plan.options, plan.engine, plan.plan, tokenizer, placement=plan.placement
        )
    finally:
        await close(run)


@asynccontextmanager
async def running(request: RunRequest, registry: Registry, observer: Observer = _SILENT) -> AsyncIterator[Pipeline]:
    """A pipeline that serves ``request``'s model, for as long as the block lasts.

    On exit, whatever happens, every node is released. A cancellation (SIGINT) in any phase ends the run in good order,
    within deadlines; another one makes it skip every courtesy.

    Raises:
        MyelinError: It could not be brought up, or (only where nothing else went wrong) not be taken down.
    """
    run = Run(request, registry, observer)
    failure: BaseException | None = None
    try:
        pipeline = await bring_up(run)
        serving = serve(run, pipeline)
        try:
            yield pipeline
        finally:
            serving.end(pipeline.requests, pipeline.error)
    except BaseException as error:
        failure = error
        raise
    finally:
        await bring_down(run, failure)


async def bring_up(run: Run) -> Pipeline:
    """All phases up to serving, in order."""
    await open_telemetry(run)
    plan = await plan_stages(run)
    await keep_book(run)
    open_transport(run)
    watch_membership(run)
    open_provider(run, plan)
    await specify_nodes(run, plan)
    provisions = plan_shards(run, plan)
    run.gather_tools(provisions)
    await start_nodes(run)
    await reach_nodes(run)
    await acknowledge_nodes(run)
    await provision_stages(run, provisions)
    await confirm_weights(run)
    pipeline = await probe_pipeline(run, plan)
    pipeline.bootstrap_seconds = time.perf_counter() - run.began
    return pipeline


async def open_telemetry(run: Run) -> None:
    """config, telemetry: what there is to record them with is made in them, so their begin is told after."""
    request = run.request
    began_ns = request.began_ns or time.time_ns()
    run.registry.require(named_plugins(request))
    configured_ns = time.time_ns()
    run.telemetry.open(run.registry, run.secret)
    run.observer = run.telemetry.observer
    run.story = Story(run.telemetry.tracing, run.observer, request.run, began_ns)
    run.telemetry.begin(run.story.root)
    run.story.root.set_attributes(
        {
            attributes.MODEL: request.model_uri,
            attributes.STAGES: request.stages,
            attributes.PROVIDER: request.provider,
        }
    )
    run.story.past(Phase.CONFIG, began_ns, configured_ns)
    with run.story.phase(Phase.TELEMETRY, start_ns=configured_ns) as span:
        span.set_attributes(await run.telemetry.preflight(traceparent(span)))


async def plan_stages(run: Run, *, must_fit: bool = True) -> Planning:
    """run_plan: the model's header, the engine, which node holds what, by what the provider offers. The tokenizer is
    begun, too.

    Args:
        must_fit: Otherwise a model that fits nothing of what is offered is planned all the same, with a note.
    """
    with run.story.phase(Phase.RUN_PLAN, {attributes.MODEL: run.request.model_uri}) as span:
        planning = await make_plan(run, must_fit=must_fit)
        span.set_attributes(plan_attributes(planning))
    begin_tokenizer(run, planning.model)
    return planning


async def keep_book(run: Run) -> None:
    """Part of run_plan: the ledger; what an earlier orchestrator of this run has left there is ours now."""
    run.book = book = await in_thread(lambda: open_book(run.request, run.secret))
    if book is not None and not isinstance(book, MyelinError) and book.inherited:
        run.secret = book.record.secret
        run.request = replace(run.request, secret=run.secret)
        run.telemetry.redactor.learn([run.secret.get_secret_value()])


def open_transport(run: Run) -> None:
    """transport: how nodes are reached."""
    with run.story.phase(Phase.TRANSPORT, {attributes.TRANSPORT: run.request.transport}):
        identity = PeerIdentity(run.request.run, ORCHESTRATOR, Attempt(1))
        run.transport = run.registry.transport(
            run.request.transport, TransportOptions(identity=identity, secret=run.secret)
        )


def watch_membership(run: Run) -> None:
    """membership: who is alive. A node is while its control stream is, which the transport tests by itself."""
    with run.story.phase(Phase.MEMBERSHIP, {attributes.MEMBERSHIP_KIND: "control-stream"}):
        run.background.start(run.follow_losses(), "follow losses")


def open_provider(run: Run, plan: Planning) -> None:
    """provisioner: who starts nodes."""
    request = run.request
    with run.story.phase(Phase.PROVISIONER, {attributes.PROVIDER: request.provider}):
        provider = run.make_provider(plan.model)
        run.same_host = bool(getattr(provider, "same_host", False))
        asked = TracedProvider(provider, run.story.tracing) if run.story.tracing.recording else provider
        run.executor, run.book = make_executor(request, asked, run.book)
        run.telemetry.watch_spend(run.executor)


async def specify_nodes(run: Run, plan: Planning) -> None:
    """node_spec: what each node must be, and is told; and what that costs, before anything is started."""
    assert run.provider is not None
    assert run.executor is not None
    with run.story.phase(Phase.NODE_SPEC, {attributes.STAGES: len(plan.plan.stages)}):
        variables = handed_on(os.environ) | run.telemetry.node_variables(os.environ)
        environment = node_environment(run.request, variables, same_host=run.same_host)
        run.nodes = wanted_nodes(plan, run.secret, environment)
        specs = [node.spec for node in run.nodes]
        await run.unless_lost(agree_on_price(run.request, run.provider, run.executor, specs))


def plan_shards(run: Run, plan: Planning) -> tuple[pb.Provision, ...]:
    """stage_shard_plan: what each node is going to load; the end tokens follow once the tokenizer is there."""
    total = sum(stage.weight_bytes for stage in plan.plan.stages)
    with run.story.phase(Phase.STAGE_SHARD_PLAN, {attributes.WEIGHT_BYTES: total}):
        for stage in plan.plan.stages:
            shard = plan_shard(plan.facts, plan.parameters, stage.slice)
            fields: dict[str, AttributeValue] = {
                attributes.STAGE: stage.index,
                attributes.SHARD_RANGES: len(shard.ranges),
                attributes.SHARD_BYTES: shard.range_bytes,
                attributes.SHARD_TENSORS: shard.tensors,
                attributes.SHARD_FRACTION: shard.fraction,
            }
            with run.story.node(Phase.STAGE_SHARD_PLAN, stage.node, None, fields):
                pass
        return tuple(provision_message(plan, index, same_host=run.same_host) for index in range(len(plan.plan.stages)))


async def start_nodes(run: Run) -> None:
    """provider_start: all nodes at once, until each has announced where it listens."""
    assert run.watch is not None
    with run.story.phase(Phase.PROVIDER_START, {attributes.PROVIDER: run.request.provider}):
        run.watch.begin()
        await run.pass_barrier(Step.ANNOUNCED)


async def reach_nodes(run: Run) -> None:
    """node_runtime_ready: every node is dialled, and is the one that was meant."""
    with run.story.phase(Phase.NODE_RUNTIME_READY):
        await run.pass_barrier(Step.REACHED)


async def acknowledge_nodes(run: Run) -> None:
    """runtime_ready_ack: the barrier. Every node has answered, for the attempt that was meant."""
    with run.story.phase(Phase.RUNTIME_READY_ACK):
        await run.pass_barrier(Step.ACKNOWLEDGED)


async def provision_stages(run: Run, provisions: tuple[pb.Provision, ...]) -> None:
    """stage_provision: every node loads its own layers, and shows how far it is."""
    with run.story.phase(Phase.STAGE_PROVISION):
        end_tokens = sorted((await run.unless_lost(run.wait_for_tokenizer())).end_ids)
        for message in provisions:
            message.end_tokens.extend(end_tokens)
        await run.pass_barrier(Step.LOADED)


async def confirm_weights(run: Run) -> None:
    """weights_loaded: the barrier. Every stage is loaded, and what each one holds is known."""
    with run.story.phase(Phase.WEIGHTS_LOADED):
        await run.pass_barrier(Step.CONFIRMED)


async def probe_pipeline(run: Run, plan: Planning) -> Pipeline:
    """pipeline_probe: the edges are opened, and one token goes through the whole chain and back."""
    assert run.chain is not None
    assert run.life is not None
    assert run.watch is not None
    tokenizer, rounds = await run.tokenizer, iter(range(run.request.max_attempts - 1))
    with run.story.phase(Phase.PIPELINE_PROBE) as span:
        token = probe_token(tokenizer, plan.parameters.vocab_size)
        edge = await run.unless_lost(run.chain.join(token, lambda: next(rounds, None) is not None))
        span.set_attribute(attributes.EPOCH, run.chain.epoch)
    pipeline = run.make_pipeline(plan, tokenizer)
    run.mender = Mender(run.request, run.chain, run.life, run.watch, run.trouble, pipeline, run.story, token)
    run.mender.serve(edge)
    return pipeline


def serve(run: Run, pipeline: Pipeline) -> Serving:
    """serving: the caller has the pipeline. The control streams alone tell of losses from now on."""
    if run.watch is not None:
        run.watch.end()
    if run.mender is not None:
        run.mending = run.background.start(run.mender.run(), "mend the pipeline")
    run.serving = run.story.begin_serving()
    pipeline.trace_parent = run.serving.trace_parent
    if pipeline.request_log is not None:
        pipeline.request_log.serving = run.serving.trace_parent
    return run.serving


def probe_token(tokenizer: Tokenizer, vocab_size: int) -> int:
    """The token to try a chain with: the one that texts begin with, where there is one. Pure."""
    start = tokenizer.bos_id
    return start if start is not None and 0 <= start < vocab_size else 0
