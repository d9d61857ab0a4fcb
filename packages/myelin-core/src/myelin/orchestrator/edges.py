"""Joining the stages of a chain: edges between them, the edge to the head, and the token that proves them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from myelin.errors import MyelinError
from myelin.orchestrator.background import Background, all_of
from myelin.orchestrator.deadlines import deadline, within
from myelin.orchestrator.head_edge import Event, HeadEdge
from myelin.orchestrator.nodes import Node, narrowed
from myelin.orchestrator.request import RunRequest
from myelin.orchestrator.story import Story
from myelin.orchestrator.watch import Trouble
from myelin.telemetry.phases import Phase
from myelin.transport.contract import EDGE_PROTOCOL, Transport
from myelin.values import Epoch, SequenceId
from myelin.wire.record import RecordFlags
from myelin.wire.requests import Finished, Submit

EDGES_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 2.0
PROBE_SEQUENCE = SequenceId(0)
"""Requests are numbered from 1."""


class Edges:
    """Opens all edges with a new epoch, as often as is needed.

    Args:
        request: The run's.
        story: Where spans go.
        transport: How the head is reached.
        background: Owns the tasks.
        trouble: Told when the edge to the head ends.
    """

    def __init__(
        self,
        request: RunRequest,
        story: Story,
        transport: Transport,
        background: Background,
        trouble: Trouble,
    ) -> None:
        self._request = request
        self._story = story
        self._transport = transport
        self._background = background
        self._trouble = trouble
        self._open: HeadEdge | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self, nodes: Sequence[Node], epoch: Epoch) -> HeadEdge:
        """Have every node dial its neighbour, then dial the head ourselves. The edge before is closed.

        Raises:
            NodeError: A node could not, or they took too long (reason ``edges-timeout``).
            TransportError: The head could not be dialled.
        """
        self.drop()
        what = f"the edges between the nodes did not open within {EDGES_TIMEOUT_S:g} s"
        async with deadline(EDGES_TIMEOUT_S, what, "edges-timeout"):
            await all_of(self._open_from(nodes, index, epoch) for index in range(len(nodes)))
            head = nodes[0]
            endpoint = narrowed(head.live.endpoint, self._request.endpoint_mask)
            stream = await self._transport.connect(endpoint, EDGE_PROTOCOL, expect=head.spec.node)
        edge = self._open = HeadEdge(stream, epoch)
        self._serving = self._background.start(edge.serve(self._trouble.of(epoch)), f"edge to the head, epoch {epoch}")
        return edge

    async def _open_from(self, nodes: Sequence[Node], index: int, epoch: Epoch) -> None:
        """Have one node dial the next one, and the tail the head; a lone stage dials nobody."""
        node, following = nodes[index], nodes[(index + 1) % len(nodes)]
        key = node.live.lease.key
        with self._story.node(Phase.PIPELINE_PROBE, key.node, key.attempt):
            if following is node:
                await node.live.reached.open_edges(epoch, None, None)
            else:
                endpoint = narrowed(following.live.endpoint, self._request.endpoint_mask)
                await node.live.reached.open_edges(epoch, following.spec.node, endpoint)

    def drop(self) -> None:
        """The edge to the head, if there is one, is of no use any more; it is closed behind us."""
        edge, self._open = self._open, None
        if edge is not None:
            edge.retire()
            if self._serving is not None:
                self._serving.cancel()
            self._background.start(within(CLOSE_TIMEOUT_S, edge.close()), "close the edge to the head")

    async def close(self) -> None:
        """Close the edge to the head."""
        edge, self._open = self._open, None
        if edge is not None:
            edge.retire()
            await edge.close()


async def probe(edge: HeadEdge, token: int) -> None:
    """Push one token through the whole chain and back.

    Raises:
        MyelinError: It did not come through; in time (reason ``probe-timeout``), or at all.
    """
    events: asyncio.Queue[Event | MyelinError] = asyncio.Queue()
    edge.admit(Submit(PROBE_SEQUENCE, (token,), max_tokens=1, ignore_end=True), events.put_nowait, RecordFlags.PROBE)
    what = f"no token came through the chain of stages within {PROBE_TIMEOUT_S:g} s"
    async with deadline(PROBE_TIMEOUT_S, what, "probe-timeout"):
        while not isinstance(event := await events.get(), Finished):
            if isinstance(event, MyelinError):
                raise event
