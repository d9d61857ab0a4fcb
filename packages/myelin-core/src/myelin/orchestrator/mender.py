"""Mending a pipeline that serves: what :mod:`myelin.orchestrator.recovery` decides is done here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from myelin.errors import EngineError, MyelinError, NodeError
from myelin.orchestrator.background import fresh
from myelin.orchestrator.chain import Chain
from myelin.orchestrator.events import NodeState
from myelin.orchestrator.head_edge import HeadEdge
from myelin.orchestrator.node_life import NodeLife
from myelin.orchestrator.nodes import NodeAttempt
from myelin.orchestrator.pipeline import Pipeline
from myelin.orchestrator.recovery import Budget, History, cause, only_tells_of_a_break
from myelin.orchestrator.request import RunRequest
from myelin.orchestrator.story import Story
from myelin.orchestrator.watch import NodeWatch, Trouble
from myelin.telemetry import attributes

NEWS_S = 0.4
"""Where an edge broke, the end of a node is the likely cause and the better explanation: so long it may lag behind."""


class Mender:
    """Follows a pipeline's troubles and mends it, as often as the request allows; otherwise the pipeline fails.

    Args:
        request: The run's.
        chain, life, watch: The nodes.
        trouble: What is wrong.
        pipeline: Paused and resumed, or failed.
        story: Told of each recovery.
        probe_token: Which token to push through the mended chain.
    """

    def __init__(
        self,
        request: RunRequest,
        chain: Chain,
        life: NodeLife,
        watch: NodeWatch,
        trouble: Trouble,
        pipeline: Pipeline,
        story: Story,
        probe_token: int,
    ) -> None:
        self._chain = chain
        self._life = life
        self._watch = watch
        self._trouble = trouble
        self._pipeline = pipeline
        self._story = story
        self._probe_token = probe_token
        self._recover = request.recover
        self._budget = Budget(request.recover_attempts, request.recover_window_s)
        self._history = History()
        self._clock: Callable[[], float] = asyncio.get_running_loop().time

    async def run(self) -> None:
        """Mend until cancelled, or until that can't be done: the pipeline fails then."""
        while True:
            error = await self._trouble.wait()
            if not self._recover or not self._allowed():
                why = await self._explained(error)
                self._tell_losses()
                self._pipeline.fail(_too_often(why, self._budget) if self._recover else fresh(why))
                return
            try:
                await self._mend(error)
            except MyelinError as failure:
                self._pipeline.fail(failure)
                return

    async def _mend(self, error: MyelinError) -> None:
        """One recovery, of any number of rounds.

        Raises:
            MyelinError: It could not be done, or was not allowed any further.
        """
        began, before = self._clock(), self._attempts()
        self._pipeline.pause()
        with self._story.recovery() as span:
            self._watch.begin()
            await self._chain.check()
            why = self._worst(error)
            self._strike()
            try:
                edge = await self._chain.join(self._probe_token, self._allowed)
            except MyelinError as failure:
                raise _not_mended(why, failure) from None
            now = self._attempts()
            replaced = [attempt for attempt, old in zip(now, before, strict=True) if attempt is not old]
            span.set_attributes(
                {
                    attributes.EPOCH: self._chain.epoch,
                    attributes.REPLACED: [str(attempt.lease.key) for attempt in replaced],
                    attributes.UNDER_WAY: self._pipeline.under_way,
                }
            )
        self._watch.end()
        self._pipeline.recoveries += 1
        self.serve(edge)
        for attempt in replaced:
            self._life.tell(attempt, NodeState.REPLACED, seconds=self._clock() - began)

    def serve(self, edge: HeadEdge) -> None:
        """The chain is joined: the pipeline serves (again) by ``edge``, and what was tried before is forgotten."""
        attempts = self._attempts()
        for node, attempt in zip(self._chain.nodes, attempts, strict=True):
            node.tries, node.former, attempt.redialled = 0, None, False
            self._life.tell(attempt, NodeState.SERVING)
        stages = [attempt.status for attempt in attempts if attempt.status is not None]
        self._pipeline.resume(edge, stages, [attempt.reached for attempt in attempts])

    def _attempts(self) -> list[NodeAttempt]:
        return [node.live for node in self._chain.nodes]

    def _allowed(self) -> bool:
        """Whether another round is; it counts from now on."""
        history = self._history.began(self._clock(), self._budget)
        if history is not None:
            self._history = history
        return history is not None

    async def _explained(self, error: MyelinError) -> MyelinError:
        """Why, as well as can be known soon."""
        if only_tells_of_a_break(error):
            await asyncio.sleep(NEWS_S)
        return self._worst(error)

    def _worst(self, error: MyelinError) -> MyelinError:
        """A node's loss explains more than what it broke."""
        losses = (node.attempt.error for node in self._chain.nodes if node.attempt is not None)
        return next((loss for loss in losses if loss is not None), error)

    def _tell_losses(self) -> None:
        for attempt in self._attempts():
            if attempt.error is not None:
                self._life.tell(attempt, NodeState.LOST, cause(attempt.error, attempt.lease.key.node))

    def _strike(self) -> None:
        """Where an engine died, it may have been of a request."""
        for attempt in self._attempts():
            if attempt.error is not None and attempt.reached.engine_dead:
                self._pipeline.strike(
                    EngineError(attempt.error.message, attempt.error.hint, reason=attempt.error.reason)
                )
                return


def _not_mended(why: MyelinError, failure: MyelinError) -> MyelinError:
    """The error of a recovery that failed: what was lost, and why it was not replaced."""
    if failure.message in why.message:
        return fresh(why)
    told = NodeError(
        f"{why.message}; it could not be mended: {failure.message}", failure.hint or why.hint, reason=why.reason
    )
    for note in (*getattr(why, "__notes__", ()), *getattr(failure, "__notes__", ())):
        told.add_note(note)
    return told


def _too_often(why: MyelinError, budget: Budget) -> MyelinError:
    """The error of a pipeline that is lost again and again."""
    told = NodeError(
        f"{why.message}; it is not mended: that was tried {budget.rounds} times within {budget.window_s:g} s",
        "find out what ends the nodes; runtime.recover_attempts allows more",
        reason=why.reason,
    )
    for note in getattr(why, "__notes__", ()):
        told.add_note(note)
    return told
