"""One run, from its first phase to its last: what there is of it, and what its phases use."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import SecretStr

from myelin.cluster.executor import Executor
from myelin.cluster.provider import Provider, ProviderContext
from myelin.errors import MyelinError
from myelin.orchestrator.background import Background, fresh, unless
from myelin.orchestrator.chain import Chain
from myelin.orchestrator.edges import Edges
from myelin.orchestrator.events import Observer
from myelin.orchestrator.mender import Mender
from myelin.orchestrator.node_life import NodeLife
from myelin.orchestrator.nodes import Node, NodeAttempt, Step
from myelin.orchestrator.pipeline import Pipeline
from myelin.orchestrator.planning import OpenedModel, Planning
from myelin.orchestrator.request import RunRequest
from myelin.orchestrator.run_telemetry import RunTelemetry, model_name
from myelin.orchestrator.story import Serving, Story
from myelin.orchestrator.watch import Loss, NodeWatch, Trouble
from myelin.telemetry.requests import RequestLog
from myelin.telemetry.tracing import ORCHESTRATOR_SERVICE, configure_tracing
from myelin.transport.contract import Endpoint, Transport
from myelin.wire import control_pb2 as pb

if TYPE_CHECKING:
    from myelin.cluster.ledger import RunBook
    from myelin.model.tokenizer import Tokenizer
    from myelin.plugins.registry import Registry

T = TypeVar("T")


class Run:
    """What a run consists of; each phase adds to it, and its end takes it apart. The event loop owns it.

    Args:
        request: What was asked.
        registry: Where its plugins come from.
        observer: Told what happens.
    """

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
        self.tokenizing: asyncio.Task[Tokenizer] | None = None

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

    def make_pipeline(self, plan: Planning, tokenizer: Tokenizer) -> Pipeline:
        """The pipeline that the caller gets; it has no edge to its head yet."""
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
        return pipeline

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

    @property
    def attempts(self) -> list[NodeAttempt]:
        """Whatever embodies the nodes now."""
        return [node.attempt for node in self.nodes if node.attempt is not None]

    @property
    def tokenizer(self) -> asyncio.Task[Tokenizer]:
        """The tokenizer on its way."""
        assert self.tokenizing is not None
        return self.tokenizing

    async def wait_for_tokenizer(self) -> Tokenizer:
        """The tokenizer, once it is built."""
        return await self.tokenizer

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
