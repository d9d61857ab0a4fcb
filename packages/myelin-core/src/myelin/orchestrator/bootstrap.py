"""From a request to a pipeline that serves, phase by phase, and back to nothing.

:func:`running` is the story; each method of :class:`_Run` is one phase of it. Whatever happens, in whichever phase,
what was started is released before :func:`running` is left.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from opentelemetry.util.types import AttributeValue
from pydantic import SecretStr

from myelin.cluster.executor import Executor
from myelin.cluster.provider import Offer, Provider, ProviderContext
from myelin.cluster.spec import NodeSpec
from myelin.errors import MyelinError, NodeError, PlanError, PluginError, ProviderError
from myelin.model.shard import plan_shard
from myelin.orchestrator.accounts import agree_on_price, make_executor, open_book
from myelin.orchestrator.background import Background, fresh, in_thread, uninterrupted, unless
from myelin.orchestrator.chain import Chain
from myelin.orchestrator.deadlines import within
from myelin.orchestrator.edges import Edges
from myelin.orchestrator.events import NodeState, Observer, ProgressEvent, Silent
from myelin.orchestrator.machines import Planner, read_offers
from myelin.orchestrator.mender import Mender
from myelin.orchestrator.node_life import NodeLife
from myelin.orchestrator.nodes import Node, NodeAttempt, Step
from myelin.orchestrator.orders import handed_on, node_environment, provision_message
from myelin.orchestrator.pipeline import Pipeline
from myelin.orchestrator.planning import (
    OpenedModel,
    PlannedRun,
    Planning,
    abandonable,
    engine_of,
    make_tokenizer,
    named_plugins,
    open_model,
    plan_run,
    planner_of,
)
from myelin.orchestrator.request import RunRequest
from myelin.orchestrator.run_telemetry import RunTelemetry, model_name
from myelin.orchestrator.story import Serving, Story
from myelin.orchestrator.traced_provider import TracedProvider
from myelin.orchestrator.watch import Loss, NodeWatch, Trouble
from myelin.telemetry import attributes
from myelin.telemetry.phases import Phase
from myelin.telemetry.requests import RequestLog
from myelin.telemetry.tracing import ORCHESTRATOR_SERVICE, configure_tracing, traceparent
from myelin.transport.contract import ORCHESTRATOR, Endpoint, PeerIdentity, Transport, TransportOptions
from myelin.values import Attempt
from myelin.wire import control_pb2 as pb

if TYPE_CHECKING:
    from myelin.cluster.ledger import RunBook
    from myelin.cluster.provider import LaunchKey, Provider
    from myelin.model.tokenizer import Tokenizer
    from myelin.orchestrator.control import NodeControl
    from myelin.plugins.registry import Registry

T = TypeVar("T")

CLOSE_TIMEOUT_S = 2.0

_SILENT = Silent()


async def planned(request: RunRequest, registry: Registry, observer: Observer = _SILENT) -> PlannedRun:
    """What ``request`` comes to: the model's facts, the engine, the plan, the tokenizer. Starts nothing.

    Raises:
        ModelError, PlanError, EngineError, PluginError: It can't be run as asked.
    """
    run = _Run(request, registry, observer)
    try:
        with run.story.phase(Phase.CONFIG):
            registry.require(named_plugins(request))
        plan = await run.plan(must_fit=False)
        tokenizer = await run.tokenizer
        return PlannedRun(
            plan.request, plan.model, plan.options, plan.engine, plan.plan, tokenizer, placement=plan.placement
        )
    finally:
        await run.close()


@asynccontextmanager
async def running(request: RunRequest, registry: Registry, observer: Observer = _SILENT) -> AsyncIterator[Pipeline]:
    """A pipeline that serves ``request``'s model, for as long as the block lasts.

    On exit, whatever happens, every node is released. A cancellation (SIGINT) in any phase ends the run in good order,
    within deadlines; another one makes it skip every courtesy.

    Raises:
        MyelinError: It could not be brought up, or (only where nothing else went wrong) not be taken down.
    """
    run = _Run(request, registry, observer)
    failure: BaseException | None = None
    try:
        pipeline = await run.bring_up()
        serving = run.serve(pipeline)
        try:
            yield pipeline
        finally:
            serving.end(pipeline.requests, pipeline.error)
    except BaseException as error:
        failure = error
        raise
    finally:
        await run.bring_down(failure)


class _Run:
    """One run, from its first phase to its last."""

    def __init__(self, request: RunRequest, registry: Registry, observer: Observer) -> None:
        self.request = request
        self.registry = registry
        self.telemetry = RunTelemetry(request, observer)
        self.observer = observer
        self.background = Background(self.background_failed)
        self.loss = Loss()
        self.trouble = Trouble()
        self.hurry = asyncio.Event()
        self.began = time.perf_counter()
        self.story = Story(configure_tracing(ORCHESTRATOR_SERVICE, ()), observer, request.run, time.time_ns())
        self.secret = request.secret or SecretStr(secrets.token_urlsafe(32))
        self.nodes: tuple[Node, ...] = ()
        self.transport: Transport | None = None
        self.book: RunBook | MyelinError | None = None
        self.provider: Provider | None = None
        self.provider_problem: MyelinError | None = None
        self.executor: Executor | None = None
        self.same_host = False
        self.watch: NodeWatch | None = None
        self.life: NodeLife | None = None
        self.edges: Edges | None = None
        self.chain: Chain | None = None
        self.mender: Mender | None = None
        self.mending: asyncio.Task[None] | None = None
        self.pipeline: Pipeline | None = None
        self.serving: Serving | None = None
        self._tokenizer: asyncio.Task[Tokenizer] | None = None

    async def bring_up(self) -> Pipeline:
        """All phases up to serving, in order."""
        await self.open_telemetry()
        plan = await self.plan()
        await self.open_book()
        self.open_transport()
        self.watch_membership()
        self.open_provider(plan)
        await self.specify_nodes(plan)
        provisions = self.plan_shards(plan)
        self.gather_tools(provisions)
        await self.start_nodes()
        await self.reach_nodes()
        await self.acknowledge_nodes()
        await self.provision_stages(provisions)
        await self.confirm_weights()
        pipeline = await self.probe_pipeline(plan)
        pipeline.bootstrap_seconds = time.perf_counter() - self.began
        return pipeline

    # The phases.

    async def open_telemetry(self) -> None:
        """config, telemetry: what there is to record them with is made in them, so their begin is told after."""
        request = self.request
        began_ns = request.began_ns or time.time_ns()
        self.registry.require(named_plugins(request))
        configured_ns = time.time_ns()
        self.telemetry.open(self.registry, self.secret)
        self.observer = self.telemetry.observer
        self.story = Story(self.telemetry.tracing, self.observer, request.run, began_ns)
        self.telemetry.begin(self.story.root)
        self.story.root.set_attributes(
            {
                attributes.MODEL: request.model_uri,
                attributes.STAGES: request.stages,
                attributes.PROVIDER: request.provider,
            }
        )
        self.story.past(Phase.CONFIG, began_ns, configured_ns)
        with self.story.phase(Phase.TELEMETRY, start_ns=configured_ns) as span:
            span.set_attributes(await self.telemetry.preflight(traceparent(span)))

    async def plan(self, *, must_fit: bool = True) -> Planning:
        """run_plan: the model's header, the engine, which node holds what, by what the provider offers. The tokenizer
        is begun, too.

        Args:
            must_fit: Otherwise a model that fits nothing of what is offered is planned all the same, with a note.
        """
        request = self.request
        with self.story.phase(Phase.RUN_PLAN, {attributes.MODEL: request.model_uri}) as span:
            model = await self.open_model()
            engine = engine_of(request, model, self.registry)
            offers = await self.read_offers(model, planner_of(request, model, self.registry), engine.name)
            packed = bool(getattr(self.provider, "packed", False))
            try:
                planning = plan_run(request, model, self.registry, engine, offers, packed=packed)
            except PlanError as error:
                if must_fit or error.reason != "too-little-memory":
                    raise
                planning = plan_run(request, model, self.registry, engine)
                notes = (*planning.plan.notes, f"{request.provider} could not start it now: {error.message}")
                planning = replace(planning, plan=replace(planning.plan, notes=notes))
            span.set_attributes(
                {
                    attributes.MODEL_ARCHITECTURE: model.facts.architecture,
                    attributes.MODEL_BYTES: model.facts.total_bytes,
                    attributes.ENGINE: planning.engine.name,
                    attributes.PLANNER: planning.plan.planner,
                    attributes.STAGES: len(planning.plan.stages),
                    attributes.MAX_CONTEXT: planning.options.max_context,
                }
            )
        self._tokenizer = self.background.start(
            in_thread(lambda: make_tokenizer(request, model.facts)), "build the tokenizer"
        )
        return planning

    async def open_book(self) -> None:
        """Part of run_plan: the ledger; what an earlier orchestrator of this run has left there is ours now."""
        self.book = book = await in_thread(lambda: open_book(self.request, self.secret))
        if book is not None and not isinstance(book, MyelinError) and book.inherited:
            self.secret = book.record.secret
            self.request = replace(self.request, secret=self.secret)
            self.telemetry.redactor.learn([self.secret.get_secret_value()])

    async def open_model(self) -> OpenedModel:
        """Open the model and read its header in a thread; what is fetched for it is shown."""
        source = self.registry.model_source(self.request.model_uri, self.request.source_options)
        loop, abandoned = asyncio.get_running_loop(), False

        def show(done: int, total: int) -> None:
            event = ProgressEvent(ORCHESTRATOR, -1, "fetch", done, total)
            loop.call_soon_threadsafe(self.observer.progress, event)

        try:
            return await in_thread(lambda: open_model(source, abandonable(show, lambda: abandoned)))
        finally:
            abandoned = True

    async def read_offers(self, model: OpenedModel, plan: Planner, engine: str) -> tuple[Offer, ...]:
        """What the provider could start; none where that can't be known now. Its own phase tells of what is wrong
        with it."""
        try:
            async with asyncio.timeout(self.request.startup_timeout_s):
                return await read_offers(self.make_provider(model), engine, plan, self.request.stages)
        except (ProviderError, PluginError, TimeoutError):
            return ()

    def make_provider(self, model: OpenedModel) -> Provider:
        """The provider, made once.

        Raises:
            MyelinError: It can't be; as often as it is asked for.
        """
        if self.provider_problem is not None:
            raise fresh(self.provider_problem)
        if self.provider is None:
            request = self.request
            context = ProviderContext(request.run, request.provider_section, request.stages, model.files)
            try:
                self.provider = self.registry.provider(request.provider, context)
            except MyelinError as error:
                self.provider_problem = error
                raise
        return self.provider

    def open_transport(self) -> None:
        """transport: how nodes are reached."""
        with self.story.phase(Phase.TRANSPORT, {attributes.TRANSPORT: self.request.transport}):
            identity = PeerIdentity(self.request.run, ORCHESTRATOR, Attempt(1))
            self.transport = self.registry.transport(
                self.request.transport, TransportOptions(identity=identity, secret=self.secret)
            )

    def watch_membership(self) -> None:
        """membership: who is alive. A node is while its control stream is, which the transport tests by itself."""
        with self.story.phase(Phase.MEMBERSHIP, {attributes.MEMBERSHIP_KIND: "control-stream"}):
            self.background.start(self.follow_losses(), "follow losses")

    def open_provider(self, plan: Planning) -> None:
        """provisioner: who starts nodes."""
        request = self.request
        with self.story.phase(Phase.PROVISIONER, {attributes.PROVIDER: request.provider}):
            provider = self.make_provider(plan.model)
            self.same_host = bool(getattr(provider, "same_host", False))
            asked = TracedProvider(provider, self.story.tracing) if self.story.tracing.recording else provider
            self.executor, self.book = make_executor(request, asked, self.book)
            self.telemetry.watch_spend(self.executor)

    async def specify_nodes(self, plan: Planning) -> None:
        """node_spec: what each node must be, and is told; and what that costs, before anything is started."""
        with self.story.phase(Phase.NODE_SPEC, {attributes.STAGES: len(plan.plan.stages)}):
            variables = handed_on(os.environ) | self.telemetry.node_variables(os.environ)
            environment = node_environment(self.request, variables, same_host=self.same_host)
            self.nodes = tuple(
                Node(
                    NodeSpec(
                        run=self.request.run,
                        node=stage.node,
                        memory_bytes=stage.memory_bytes,
                        engine=plan.engine.name,
                        transport=self.request.transport,
                        secret=self.secret,
                        environment=environment,
                        offer=plan.offer_of(stage.node),
                    ),
                    stage,
                )
                for stage in plan.plan.stages
            )
            await self.agree_on_price()

    def plan_shards(self, plan: Planning) -> tuple[pb.Provision, ...]:
        """stage_shard_plan: what each node is going to load; the end tokens follow once the tokenizer is there."""
        total = sum(stage.weight_bytes for stage in plan.plan.stages)
        with self.story.phase(Phase.STAGE_SHARD_PLAN, {attributes.WEIGHT_BYTES: total}):
            for stage in plan.plan.stages:
                shard = plan_shard(plan.facts, plan.parameters, stage.slice)
                fields: dict[str, AttributeValue] = {
                    attributes.STAGE: stage.index,
                    attributes.SHARD_RANGES: len(shard.ranges),
                    attributes.SHARD_BYTES: shard.range_bytes,
                    attributes.SHARD_TENSORS: shard.tensors,
                    attributes.SHARD_FRACTION: shard.fraction,
                }
                with self.story.node(Phase.STAGE_SHARD_PLAN, stage.node, None, fields):
                    pass
            return tuple(
                provision_message(plan, index, same_host=self.same_host) for index in range(len(plan.plan.stages))
            )

    async def agree_on_price(self) -> None:
        """Part of node_spec: before anything that costs money is started."""
        assert self.provider is not None
        assert self.executor is not None
        specs = [node.spec for node in self.nodes]
        await self.unless_lost(agree_on_price(self.request, self.provider, self.executor, specs))

    def gather_tools(self, provisions: tuple[pb.Provision, ...]) -> None:
        """What brings nodes up, now and whenever one is replaced."""
        assert self.transport is not None
        assert self.executor is not None
        request, story, background = self.request, self.story, self.background
        redact = self.telemetry.redactor.text
        self.watch = NodeWatch(self.executor, background, self.observer, request.log_dir, redact)
        self.life = NodeLife(
            request,
            story,
            self.observer,
            self.executor,
            self.transport,
            self.watch,
            background,
            self.trouble,
            provisions,
            self.follow_telemetry,
        )
        self.edges = Edges(request, story, self.transport, background, self.trouble)
        self.chain = Chain(self.nodes, self.life, self.edges, self.trouble)

    async def start_nodes(self) -> None:
        """provider_start: all nodes at once, until each has announced where it listens."""
        assert self.watch is not None
        with self.story.phase(Phase.PROVIDER_START, {attributes.PROVIDER: self.request.provider}):
            self.watch.begin()
            await self.pass_barrier(Step.ANNOUNCED)

    async def reach_nodes(self) -> None:
        """node_runtime_ready: every node is dialled, and is the one that was meant."""
        with self.story.phase(Phase.NODE_RUNTIME_READY):
            await self.pass_barrier(Step.REACHED)

    async def acknowledge_nodes(self) -> None:
        """runtime_ready_ack: the barrier. Every node has answered, for the attempt that was meant."""
        with self.story.phase(Phase.RUNTIME_READY_ACK):
            await self.pass_barrier(Step.ACKNOWLEDGED)

    async def provision_stages(self, provisions: tuple[pb.Provision, ...]) -> None:
        """stage_provision: every node loads its own layers, and shows how far it is."""
        with self.story.phase(Phase.STAGE_PROVISION):
            end_tokens = sorted((await self.unless_lost(self.wait_for_tokenizer())).end_ids)
            for message in provisions:
                message.end_tokens.extend(end_tokens)
            await self.pass_barrier(Step.LOADED)

    async def confirm_weights(self) -> None:
        """weights_loaded: the barrier. Every stage is loaded, and what each one holds is known."""
        with self.story.phase(Phase.WEIGHTS_LOADED):
            await self.pass_barrier(Step.CONFIRMED)

    async def probe_pipeline(self, plan: Planning) -> Pipeline:
        """pipeline_probe: the edges are opened, and one token goes through the whole chain and back."""
        assert self.chain is not None
        assert self.life is not None
        assert self.watch is not None
        tokenizer, rounds = await self.tokenizer, iter(range(self.request.max_attempts - 1))
        with self.story.phase(Phase.PIPELINE_PROBE) as span:
            token = probe_token(tokenizer, plan.parameters.vocab_size)
            edge = await self.unless_lost(self.chain.join(token, lambda: next(rounds, None) is not None))
            span.set_attribute(attributes.EPOCH, self.chain.epoch)
        pipeline = self.pipeline = Pipeline(
            request=self.request,
            plan=plan.plan,
            facts=plan.facts,
            parameters=plan.parameters,
            tokenizer=tokenizer,
            options=plan.options,
            tracer=self.story.tracing.tracer,
            requests=self.request_log(),
            metrics=self.telemetry.metrics,
            logbook=self.telemetry.logbook,
        )
        if self.executor is not None:
            pipeline.spend = self.executor.spend
        self.mender = Mender(self.request, self.chain, self.life, self.watch, self.trouble, pipeline, self.story, token)
        self.mender.serve(edge)
        return pipeline

    def serve(self, pipeline: Pipeline) -> Serving:
        """serving: the caller has the pipeline. The control streams alone tell of losses from now on."""
        if self.watch is not None:
            self.watch.end()
        if self.mender is not None:
            self.mending = self.background.start(self.mender.run(), "mend the pipeline")
        self.serving = self.story.begin_serving()
        pipeline.trace_parent = self.serving.trace_parent
        if pipeline.request_log is not None:
            pipeline.request_log.serving = self.serving.trace_parent
        return self.serving

    async def bring_down(self, failure: BaseException | None) -> None:
        """shutdown, provider_stop: shielded from cancellation, each within its deadline.

        Raises:
            MyelinError: Nodes could not be released, and nothing had gone wrong before.
        """
        # What the caller did while the pipeline served (its own errors, an interrupt) is no failure of the run.
        problem = failure
        if self.serving is not None and self.pipeline is not None:
            problem = self.pipeline.error
        try:
            await uninterrupted(self.end_everything, self.hurry)
        except BaseException as error:
            problem = problem or error
            if failure is None or not isinstance(error, Exception):
                raise
            failure.add_note(f"while ending: {error}")
        finally:
            self.story.end(problem)
            await self.telemetry.close()  # it waits for collectors, within its own bound

    async def end_everything(self) -> None:
        """Nodes are asked to end, then released; then our own streams, tasks and plugins are closed."""
        if self.mending is not None:
            self.mending.cancel()
            await asyncio.gather(self.mending, return_exceptions=True)
        if self.watch is not None:
            self.watch.end()
        try:
            if self.executor is not None and self.attempts:
                with self.story.phase(Phase.SHUTDOWN):
                    await self.say_goodbye()
        finally:
            try:
                if self.executor is not None and self.watch is not None:
                    with self.story.phase(Phase.PROVIDER_STOP, {attributes.PROVIDER: self.request.provider}):
                        await self.executor.release_all()
                    if self.life is not None:
                        for attempt in self.attempts:
                            self.life.tell(attempt, NodeState.RELEASED)
            finally:
                await self.close()

    async def say_goodbye(self) -> None:
        """Ask all nodes at once to end by themselves; go on when they have, or are too slow, or we are in a hurry."""
        reached = [(attempt.lease.key, attempt.control) for attempt in self.attempts if attempt.control is not None]
        for _, control in reached:
            control.expect_the_end()
        farewells = [asyncio.create_task(self.shut_down(key, control)) for key, control in reached]
        everybody = asyncio.gather(*farewells, return_exceptions=True)
        hurry = asyncio.ensure_future(self.hurry.wait())
        waiting: set[asyncio.Future[Any]] = {everybody, hurry}
        try:
            await asyncio.wait(waiting, timeout=self.request.stop_grace_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        await self.telemetry.say_goodbye()
        await self.close_streams()  # a node that ends waits a moment for streams that are open to it

    async def shut_down(self, key: LaunchKey, control: NodeControl) -> None:
        """Ask one node to end by itself."""
        with self.story.node(Phase.SHUTDOWN, key.node, key.attempt) as span:
            span.set_attribute(attributes.GOODBYE, await control.shut_down("the run is over"))

    async def close_streams(self) -> None:
        """Close our streams, all at once. Bounded: nothing of it matters to anybody else. Twice is fine."""
        closing = [attempt.control.close() for attempt in self.attempts if attempt.control is not None]
        if self.pipeline is not None:
            self.pipeline.close(NodeError("the run is over", reason="run-over"))
        if self.edges is not None:
            closing.append(self.edges.close())
        await within(CLOSE_TIMEOUT_S, asyncio.gather(*closing, return_exceptions=True))

    async def close(self) -> None:
        """Close all that is ours."""
        await self.close_streams()
        await self.background.close()
        if self.transport is not None:
            await within(CLOSE_TIMEOUT_S, self.transport.close())
        if self.executor is not None:
            await within(CLOSE_TIMEOUT_S, self.executor.close())
        elif self.provider is not None:
            await within(CLOSE_TIMEOUT_S, self.provider.close())
        if self.executor is None and self.book is not None and not isinstance(self.book, MyelinError):
            book, self.book = self.book, None
            await in_thread(lambda: book.close(ended=not book.inherited))

    # What the phases use.

    @property
    def attempts(self) -> list[NodeAttempt]:
        """Whatever embodies the nodes now."""
        return [node.attempt for node in self.nodes if node.attempt is not None]

    @property
    def tokenizer(self) -> asyncio.Task[Tokenizer]:
        """The tokenizer on its way."""
        assert self._tokenizer is not None
        return self._tokenizer

    async def unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """``work``'s result, unless the run can't go on.

        Raises:
            MyelinError: It can't, or what ``work`` raised.
        """
        return await unless(work, self.loss.wait())

    async def pass_barrier(self, step: Step) -> None:
        """All nodes are as far as ``step``, at the same time.

        Raises:
            MyelinError: One of them can't be brought that far, or the run can't go on.
        """
        assert self.chain is not None
        await self.unless_lost(self.chain.pass_barrier(step))

    def background_failed(self, error: BaseException) -> None:
        """A task of ours raised, and that ends the run; anything but a :class:`MyelinError` is a mistake of ours."""
        if not isinstance(error, MyelinError):
            mistake = MyelinError(
                f"a mistake in Myelin: {type(error).__name__}: {error}", "please report it", reason="internal"
            )
            mistake.__cause__ = error
            error = mistake
        self.loss.report(error)

    async def follow_losses(self) -> None:
        """What the run can't do without, its pipeline can't either."""
        error = await self.loss.wait()
        if self.pipeline is not None:
            self.pipeline.fail(error)

    def follow_telemetry(self, attempt: NodeAttempt, endpoint: Endpoint) -> None:
        """A node was dialled: hear what it tells of itself, too."""
        assert self.transport is not None
        key = attempt.lease.key
        following = self.telemetry.follow(self.transport, endpoint, key.node, key.attempt)
        self.background.start(following, f"telemetry of {key}")

    def request_log(self) -> RequestLog | None:
        """What records requests, where anybody wants to know of them."""
        if not self.story.tracing.recording and self.telemetry.metrics is None:
            return None
        return RequestLog(
            self.story.tracing.tracer,
            self.telemetry.metrics,
            model_name(self.request.model_uri),
            str(self.request.run),
            announce=self.telemetry.announce,
            own_traces=self.request.live,
        )

    async def wait_for_tokenizer(self) -> Tokenizer:
        """The tokenizer, once it is built."""
        return await self.tokenizer


def probe_token(tokenizer: Tokenizer, vocab_size: int) -> int:
    """The token to try a chain with: the one that texts begin with, where there is one. Pure."""
    start = tokenizer.bos_id
    return start if start is not None and 0 <= start < vocab_size else 0
