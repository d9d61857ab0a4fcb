"""All nodes of a run together: the barriers that they pass, and the edges that join them into a chain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from myelin.errors import MyelinError
from myelin.orchestrator.background import all_of, unless
from myelin.orchestrator.edges import Edges, probe
from myelin.orchestrator.head_edge import HeadEdge
from myelin.orchestrator.node_life import LOSS_NEWS_S, NodeLife
from myelin.orchestrator.nodes import Node, Step
from myelin.orchestrator.recovery import next_epoch, only_tells_of_a_break, worth_another_round
from myelin.orchestrator.watch import Trouble
from myelin.values import Epoch

CHECK_S = 6.0
"""How long a node may take to say that it is there: longer than the transport needs to notice that it isn't."""


class Chain:
    """The nodes of a run in the order of their stages.

    Args:
        nodes: Them.
        life: Takes each from step to step.
        edges: Join them.
        trouble: What is wrong with the epoch.

    Attributes:
        epoch: The newest epoch; 0 before the first.
    """

    def __init__(self, nodes: Sequence[Node], life: NodeLife, edges: Edges, trouble: Trouble) -> None:
        self.nodes = tuple(nodes)
        self.epoch = Epoch(0)
        self._life = life
        self._edges = edges
        self._trouble = trouble

    async def pass_barrier(self, step: Step) -> None:
        """Return once all nodes are as far as ``step`` at the same time.

        A node that is lost while it waits for the others begins again, without them.

        Raises:
            MyelinError: One of them can't be brought that far.
        """
        everybody = asyncio.Event()

        async def come(node: Node) -> None:
            while not everybody.is_set():
                await self._life.bring(node, step)
                if all(each.stands(step) for each in self.nodes):
                    everybody.set()
                elif node.attempt is not None:
                    await _either(everybody.wait(), node.attempt.lost.wait())

        await all_of(come(node) for node in self.nodes)

    async def check(self) -> None:
        """Ask all nodes whether they are there; those that don't answer are lost from now on."""
        attempts = [node.attempt for node in self.nodes if node.attempt is not None and node.attempt.error is None]
        await all_of(self._life.check(attempt, CHECK_S) for attempt in attempts)

    async def join(self, probe_token: int, may_try_again: Callable[[], bool]) -> HeadEdge:
        """Have all nodes there and loaded, open the edges with a new epoch, and push a token through.

        Where something is lost meanwhile, it is replaced, and joined with the next epoch.

        Args:
            may_try_again: Asked before each further round.

        Returns:
            The edge to the head.

        Raises:
            MyelinError: It can't be done.
        """
        while True:
            await self.pass_barrier(Step.CONFIRMED)
            self.epoch = next_epoch(self.epoch, (node.live.reached.welcome.epoch for node in self.nodes))
            self._trouble.begin(self.epoch)
            try:
                return await unless(
                    self._open(probe_token),
                    self._trouble.wait(),
                    linger=only_tells_of_a_break,
                    linger_s=LOSS_NEWS_S,
                )
            except MyelinError as error:
                trouble = self._trouble.error is not None
                self._trouble.report(error)
                if not worth_another_round(error, trouble=trouble) or not may_try_again():
                    raise
            await self.check()

    async def _open(self, probe_token: int) -> HeadEdge:
        edge = await self._edges.open(self.nodes, self.epoch)
        await probe(edge, probe_token)
        return edge


async def _either(*work: object) -> None:
    """Return when one of the waits does."""
    tasks = [asyncio.ensure_future(each) for each in work]  # type: ignore[call-overload]  # all are coroutines
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
