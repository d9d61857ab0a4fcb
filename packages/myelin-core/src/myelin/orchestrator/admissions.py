"""The requests that are under way: they outlive the edge to the head, and the epochs.

Each has a mailbox, from which its client takes what comes, and which keeps the tokens that were put into it: those are
what a new epoch's admission begins with.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace

from myelin.errors import MyelinError, WireError
from myelin.orchestrator.background import fresh
from myelin.orchestrator.head_edge import Event, HeadEdge
from myelin.orchestrator.recovery import STRIKES, Order, admission, first_admission
from myelin.values import SamplingParams, SequenceId
from myelin.wire.requests import Finished, NewToken


class Mailbox:
    """One request from its submission to its end, and what comes for it, in order.

    Attributes:
        order: What was asked for.
        sent: The tokens that were put in: its client has them, or will.
        finished: Whether its end, or an error, was put in.
        strikes: At how many faults of an engine it was under way.
        on_again: Told each time that it is submitted again.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.sent: list[int] = []
        self.finished = False
        self.strikes = 0
        self.on_again: Callable[[], None] = lambda: None
        self._before = 0
        self._events: asyncio.Queue[Event | MyelinError] = asyncio.Queue()

    def admitted(self) -> None:
        """It is submitted (again): what the head counts begins anew."""
        self._before = len(self.sent)
        self.on_again()

    def put(self, event: Event | MyelinError) -> None:
        """Deliver; after an end or an error nothing more comes.

        Raises:
            WireError: A token isn't the next one: nothing is ever repeated, or left out.
        """
        if self.finished:
            return
        if isinstance(event, NewToken):
            due = len(self.order.prompt) + len(self.sent)
            if event.position != due:
                raise WireError(f"a token for position {event.position} came where {due} was due")
            self.sent.append(event.token)
        else:
            self.finished = True
            if isinstance(event, Finished):
                event = replace(event, generated=self._before + event.generated)
        self._events.put_nowait(event)

    async def get(self) -> Event:
        """The next event.

        Raises:
            MyelinError: The request can't go on.
        """
        event = await self._events.get()
        if isinstance(event, MyelinError):
            raise fresh(event)
        return event


class Admissions:
    """Submits requests to the head while there is an edge to it, and holds them while there is none.

    Args:
        max_context: Positions of a sequence.

    Attributes:
        submitted: How many requests there were.
        lost: Why nothing is taken any more, once that is so.
    """

    def __init__(self, max_context: int) -> None:
        self.submitted = 0
        self.lost: MyelinError | None = None
        self._max_context = max_context
        self._ids = itertools.count(1)
        self._edge: HeadEdge | None = None
        self._under_way: dict[SequenceId, Mailbox] = {}
        self._interrupted: list[Mailbox] = []

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return sum(not mailbox.finished for mailbox in self._under_way.values())

    @property
    def paused(self) -> bool:
        """Whether there is no edge to the head now."""
        return self._edge is None

    def new(self, prompt: tuple[int, ...], *, max_tokens: int, sampling: SamplingParams, ignore_end: bool) -> Mailbox:
        """A request that nobody has submitted yet."""
        return Mailbox(Order(SequenceId(next(self._ids)), prompt, max_tokens, sampling, ignore_end))

    def submit(
        self, prompt: tuple[int, ...], *, max_tokens: int, sampling: SamplingParams, ignore_end: bool
    ) -> Mailbox:
        """Take a request on. Where there is no edge to the head now, it waits for the next one.

        Raises:
            MyelinError: The pipeline is lost.
            WireError: A number is out of range.
        """
        if self.lost is not None:
            raise fresh(self.lost)
        mailbox = self.new(prompt, max_tokens=max_tokens, sampling=sampling, ignore_end=ignore_end)
        if self._edge is not None:
            self._edge.admit(first_admission(mailbox.order), mailbox.put)
        self._under_way[mailbox.order.sequence] = mailbox
        self.submitted += 1
        return mailbox

    def forget(self, mailbox: Mailbox) -> None:
        """Nobody wants more of it: cancel it at the head if it has not ended there."""
        self._under_way.pop(mailbox.order.sequence, None)
        if not mailbox.finished:
            mailbox.finished = True
            if self._edge is not None:
                self._edge.cancel(mailbox.order.sequence)

    def pause(self) -> None:
        """The edge to the head is of no use any more; nothing that still comes on it counts."""
        if self._edge is not None:
            self._edge.retire()
            self._edge = None
            self._interrupted = [mailbox for mailbox in self._under_way.values() if not mailbox.finished]

    def strike(self, error: MyelinError) -> None:
        """An engine died of what was under way at the last pause: what has been there too often ends with ``error``."""
        for mailbox in self._interrupted:
            mailbox.strikes += 1
            if mailbox.strikes >= STRIKES:
                mailbox.put(error)

    def resume(self, edge: HeadEdge) -> None:
        """Submit everything that is under way, in the order in which it came, on a new edge."""
        self._edge = edge
        for mailbox in list(self._under_way.values()):
            if mailbox.finished:
                continue
            what = admission(mailbox.order, mailbox.sent, self._max_context)
            if isinstance(what, Finished):
                mailbox.put(what)
            else:
                mailbox.admitted()
                edge.admit(what, mailbox.put)

    def fail(self, error: MyelinError) -> None:
        """The pipeline is lost: everybody who waits is told at once. The first reason counts."""
        if self.lost is None:
            self.lost = error
        for mailbox in self._under_way.values():
            mailbox.put(self.lost)
