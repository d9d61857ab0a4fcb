"""The life of one node: launch → announced → dialled → acknowledged → loaded → confirmed.

:meth:`NodeLife.bring` takes a node as far as a step, from wherever it is; where an attempt is lost on the way, another
one begins from the start, as often as the request allows. The bootstrap's phases and a later recovery both use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from opentelemetry.util.types import AttributeValue

from myelin.cluster.executor import Executor
from myelin.cluster.provider import Lease
from myelin.errors import MyelinError, NodeError
from myelin.orchestrator.background import Background, fresh, unless
from myelin.orchestrator.control import NodeControl, dial
from myelin.orchestrator.deadlines import deadline, within
from myelin.orchestrator.events import NodeEvent, NodeState, Observer, ProgressEvent
from myelin.orchestrator.nodes import Node, NodeAttempt, Step, narrowed, stage_status
from myelin.orchestrator.recovery import Remedy, cause, only_tells_of_a_break, remedy
from myelin.orchestrator.request import RunRequest
from myelin.orchestrator.story import Story
from myelin.orchestrator.watch import NodeWatch, Trouble
from myelin.telemetry import attributes
from myelin.telemetry.phases import Phase
from myelin.transport.contract import Endpoint, Transport
from myelin.wire import control_pb2 as pb

T = TypeVar("T")

LOSS_NEWS_S = 1.0
"""How long after the break of a stream its reason may become known."""
REDIAL_S = 2.0
"""How long a node whose control stream broke has to answer a new one."""
CLOSE_TIMEOUT_S = 2.0


class NodeLife:
    """Takes nodes from step to step.

    Args:
        request: The run's.
        story, observer: Told of everything.
        executor: Launches and replaces nodes.
        transport: How they are reached.
        watch: Follows their leases and output.
        background: Owns the tasks.
        trouble: Told of nodes that are lost, and of epochs that fail.
        provisions: What each stage's node is told to load.
        on_dialled: Told of each control stream that was opened, and where to.
    """

    def __init__(
        self,
        request: RunRequest,
        story: Story,
        observer: Observer,
        executor: Executor,
        transport: Transport,
        watch: NodeWatch,
        background: Background,
        trouble: Trouble,
        provisions: Sequence[pb.Provision],
        on_dialled: Callable[[NodeAttempt, Endpoint], None] = lambda attempt, endpoint: None,
    ) -> None:
        self._request = request
        self._story = story
        self._observer = observer
        self._executor = executor
        self._transport = transport
        self._watch = watch
        self._background = background
        self._trouble = trouble
        self._provisions = tuple(provisions)
        self._on_dialled = on_dialled
        self._steps: dict[Step, Callable[[NodeAttempt], Coroutine[Any, Any, None]]] = {
            Step.ANNOUNCED: self._announced,
            Step.REACHED: self._reach,
            Step.ACKNOWLEDGED: self._acknowledge,
            Step.LOADED: self._provision,
            Step.CONFIRMED: self._confirm,
        }

    async def bring(self, node: Node, until: Step) -> None:
        """Take a node as far as ``until``, with another attempt where one is lost.

        Raises:
            MyelinError: It can't be done, by :func:`~myelin.orchestrator.recovery.remedy`.
        """
        while not node.stands(until):
            attempt = node.attempt
            try:
                if attempt is None:
                    await self._start(node)
                elif attempt.error is not None:
                    raise fresh(attempt.error)
                else:
                    step = Step(attempt.step + 1)
                    await self._unless_lost(attempt, self._steps[step](attempt))
                    attempt.step = step
            except MyelinError as error:
                await self._remedy(node, error)

    async def check(self, attempt: NodeAttempt, seconds: float) -> None:
        """Whether an attempt still answers; it is lost where it doesn't, within ``seconds``."""
        what = f"{attempt.lease.key.node} did not answer within {seconds:g} s"
        try:
            async with deadline(seconds, what, "node-lost"):
                await self._unless_lost(attempt, _ignored(attempt.reached.acknowledge()))
        except MyelinError as error:
            attempt.lose(error)

    def tell(self, attempt: NodeAttempt, state: NodeState, detail: str = "", seconds: float = 0.0) -> None:
        """Tell the observer of an attempt."""
        key = attempt.lease.key
        self._observer.node(NodeEvent(key.node, attempt.stage.index, key.attempt, state, detail, seconds))

    # What to do where a step failed.

    async def _remedy(self, node: Node, error: MyelinError) -> None:
        """Redial, let go for another attempt, or give up.

        Raises:
            MyelinError: Given up; why.
        """
        attempt = node.attempt
        if attempt is None:
            raise error  # it could not even be launched, and the executor has tried again already
        what = remedy(
            error.reason,
            reached=attempt.step >= Step.REACHED,
            redialled=attempt.redialled,
            tries=node.tries,
            limit=self._request.max_attempts,
            engine_dead=attempt.control is not None and attempt.control.engine_dead,
        )
        if what is Remedy.REDIAL:
            attempt.redialled = True
            attempt.lose(error)
            if await self._redial(attempt):
                return
            what = remedy(
                error.reason, reached=True, redialled=True, tries=node.tries, limit=self._request.max_attempts
            )
        attempt.lose(error)
        self.tell(attempt, NodeState.LOST, cause(error, node.spec.node))
        if what is Remedy.GIVE_UP:
            raise _given_up(error, node)
        self._let_go(attempt)
        node.former, node.attempt = attempt, None

    def _let_go(self, attempt: NodeAttempt) -> None:
        """Nothing that it still does matters to us."""
        self._watch.dropped(attempt)
        if attempt.control is not None:
            attempt.control.expect_the_end()
            self._background.start(within(CLOSE_TIMEOUT_S, attempt.control.close()), f"leave {attempt.lease.key}")

    async def _redial(self, attempt: NodeAttempt) -> bool:
        """Whether a node whose control stream broke answers on a new one."""
        broken = attempt.control
        try:
            async with asyncio.timeout(REDIAL_S):
                control = await self._dial(attempt)
                await control.greet()
        except (MyelinError, TimeoutError):
            return False
        if broken is not None:
            self._background.start(within(CLOSE_TIMEOUT_S, broken.close()), f"close the stream to {attempt.lease.key}")
        attempt.found(control)
        return True

    async def _unless_lost(self, attempt: NodeAttempt, work: Coroutine[Any, Any, T]) -> T:
        """``work``'s result; where the attempt is lost meanwhile, its loss is raised."""

        async def loss() -> MyelinError:
            await attempt.lost.wait()
            assert attempt.error is not None
            return attempt.error

        return await unless(work, loss(), linger=only_tells_of_a_break, linger_s=LOSS_NEWS_S)

    # The steps.

    async def _start(self, node: Node) -> None:
        """provider_start: launch it (or find it where an earlier orchestrator left it)."""
        with self._story.node(Phase.PROVIDER_START, node.spec.node, None) as span:
            lease = await self._lease(node)
            ready_by = asyncio.get_running_loop().time() + self._request.startup_timeout_s
            attempt = node.attempt = NodeAttempt(lease, node.stage, ready_by, self._trouble.report)
            node.tries += 1
            span.set_attributes(
                {attributes.ATTEMPT: lease.key.attempt, attributes.LEASE: lease.id, attributes.OFFER: lease.offer}
            )
            self._watch.launched(attempt)
            self.tell(attempt, NodeState.STARTING, lease.offer)
            await self._unless_lost(attempt, self._announced(attempt))
            attempt.step = Step.ANNOUNCED
            span.set_attribute(attributes.ENDPOINT, list(attempt.endpoint.candidates))

    async def _lease(self, node: Node) -> Lease:
        former = node.former
        if former is not None:
            why = former.error.message if former.error is not None else "it was lost"
            return await self._executor.replace(node.spec, former.lease, why)
        if self._request.secret is not None and node.tries == 0:
            lease = await self._executor.adopt(node.spec)
            if lease is not None:
                return lease
        return await self._executor.launch(node.spec)

    async def _announced(self, attempt: NodeAttempt) -> None:
        """provider_start, its second half: it says where it listens."""
        async with self._startup_deadline(attempt, "has not announced where it listens"):
            await attempt.announced.wait()
        self.tell(attempt, NodeState.ANNOUNCED, ", ".join(attempt.endpoint.candidates))

    async def _reach(self, attempt: NodeAttempt) -> None:
        """node_runtime_ready: dial it, and hear that it is the one that was meant."""
        key = attempt.lease.key
        with self._story.node(Phase.NODE_RUNTIME_READY, key.node, key.attempt) as span:
            async with self._startup_deadline(attempt, "could not be reached"):
                control = attempt.control = await self._dial(attempt)
                welcome = await control.greet()
            span.set_attribute(attributes.PROCESS_ID, welcome.process_id)

    async def _dial(self, attempt: NodeAttempt) -> NodeControl:
        """A new control stream, served from now on."""
        key = attempt.lease.key
        endpoint = narrowed(attempt.endpoint, self._request.endpoint_mask)
        control = await dial(self._transport, endpoint, key.run, key.node, key.attempt)

        async def serve() -> None:
            def lost(error: NodeError) -> None:
                if attempt.control is control:
                    self._watch.control_lost(attempt, error)

            await control.serve(lost, lambda epoch, error: self._trouble.report(error, epoch))

        self._background.start(serve(), f"control of {key}")
        self._on_dialled(attempt, endpoint)
        return control

    async def _acknowledge(self, attempt: NodeAttempt) -> None:
        """runtime_ready_ack: it answers, for the attempt that was meant."""
        key = attempt.lease.key
        with self._story.node(Phase.RUNTIME_READY_ACK, key.node, key.attempt) as span:
            async with self._startup_deadline(attempt, "has not acknowledged that it is ready"):
                asked = await attempt.reached.acknowledge()
            span.set_attribute(attributes.RESENDS, asked - 1)
        self.tell(attempt, NodeState.READY)

    async def _provision(self, attempt: NodeAttempt) -> None:
        """stage_provision: it loads its own layers and shows how far it is; one that has them says so at once."""
        key, stage, message = attempt.lease.key, attempt.stage, self._provisions[attempt.stage.index]
        fields: dict[str, AttributeValue] = {
            attributes.STAGE: stage.index,
            attributes.FIRST_LAYER: stage.slice.first_layer,
            attributes.END_LAYER: stage.slice.end_layer,
            attributes.ENGINE: message.engine,
        }

        def show(phase: str, done: int, total: int) -> None:
            self._observer.progress(ProgressEvent(key.node, stage.index, phase, done, total))

        with self._story.node(Phase.STAGE_PROVISION, key.node, key.attempt, fields) as span:
            self.tell(attempt, NodeState.LOADING)
            loaded = await attempt.reached.provision(message, show, self._request.load_stall_s)
            attempt.loaded = loaded
            span.set_attributes(
                {
                    attributes.WEIGHT_BYTES: loaded.weight_bytes,
                    attributes.KV_BYTES: loaded.kv_bytes,
                    attributes.FETCHED_BYTES: loaded.fetched_bytes,
                    attributes.LOAD_SECONDS: loaded.seconds,
                    attributes.THREADS: loaded.threads,
                    attributes.RESENDS: loaded.resends,
                }
            )

    async def _confirm(self, attempt: NodeAttempt) -> None:
        """weights_loaded: what it holds is known."""
        key, engine = attempt.lease.key, self._provisions[attempt.stage.index].engine
        with self._story.node(Phase.WEIGHTS_LOADED, key.node, key.attempt) as span:
            status = await attempt.reached.status()
            attempt.status = stage_status(attempt, self._request.provider, engine, status)
            span.set_attribute(attributes.WEIGHT_BYTES, attempt.status.weight_bytes)
        self.tell(attempt, NodeState.LOADED)

    @asynccontextmanager
    async def _startup_deadline(self, attempt: NodeAttempt, what: str) -> AsyncIterator[None]:
        """Within ``startup_timeout_s`` of its launch, a node must be ready."""
        left = attempt.ready_by - asyncio.get_running_loop().time()
        allowed = self._request.startup_timeout_s
        async with deadline(left, f"{attempt.lease.key.node} {what} within {allowed:g} s", "startup-timeout"):
            yield


async def _ignored(work: Coroutine[Any, Any, object]) -> None:
    await work


def _given_up(error: MyelinError, node: Node) -> MyelinError:
    """The error for a node that is given up: the last attempt's, and how many there were."""
    if node.tries < 2:
        return error
    told = fresh(error)
    told.message = f"{error.message} (attempt {node.tries} of {node.tries})"
    told.args = (told.message,)
    return told
