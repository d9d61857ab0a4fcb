"""The intents of one run: each noted before anything is started on its account, and kept in the run's book."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from myelin.cluster.intents import Intent, IntentState, Spend, spend
from myelin.errors import MyelinError
from myelin.values import Attempt, NodeId

_log = logging.getLogger("myelin.cluster")


class Book(Protocol):
    """Where intents are kept (:class:`myelin.cluster.ledger.RunBook`). Blocking; called in a thread."""

    def intents(self) -> tuple[Intent, ...]:
        """What had been started before this executor."""

    def put(self, intent: Intent) -> None:
        """Keep an intent, new or changed; it is kept when this returns."""

    def close(self, *, ended: bool) -> None:
        """No more comes; ``ended`` says that nothing is left of the run."""


class Journal:
    """Every start of one run, in the order in which they were meant. The event loop owns it.

    Args:
        book: Where intents are kept; None keeps them in memory only.
        clock: Unix seconds.
    """

    def __init__(self, book: Book | None, clock: Callable[[], float]) -> None:
        self._book = book
        self._writer = ThreadPoolExecutor(1, "myelin-book") if book is not None else None
        """One thread, so that what is noted later is also kept later."""
        self._clock = clock
        kept = book.intents() if book is not None else ()
        self._intents = {(intent.node, intent.attempt): intent for intent in kept}

    @property
    def intents(self) -> tuple[Intent, ...]:
        """All of them."""
        return tuple(self._intents.values())

    def get(self, node: NodeId, attempt: Attempt) -> Intent | None:
        """What is noted of one start; None where nothing is."""
        return self._intents.get((node, attempt))

    def open(self) -> list[Intent]:
        """The starts of which something may still be there."""
        return [intent for intent in self._intents.values() if intent.open]

    def paid(self) -> list[Intent]:
        """The starts that count against the cap: not those that are on their way out."""
        return [intent for intent in self.open() if intent.state is not IntentState.RELEASING]

    def leaving(self) -> set[NodeId]:
        """Nodes with a start that is on its way out."""
        return {intent.node for intent in self._intents.values() if intent.state is IntentState.RELEASING}

    def generation(self, node: NodeId) -> int:
        """The generation of the newest wish for a node; 0 where there was none."""
        return max((intent.generation for intent in self._intents.values() if intent.node == node), default=0)

    def spend(self) -> Spend:
        """What the run costs, by the prices of its offers."""
        return spend(self.intents, self._clock())

    async def note(self, intent: Intent, *, must: bool = False) -> None:
        """Keep an intent; it is on disk when this returns.

        Raises:
            MyelinError: It can't be kept, and must be, since something is to be started on its account. What has
                happened already is not undone by a full disk.
        """
        self._intents[intent.node, intent.attempt] = intent
        if self._book is None or self._writer is None:
            return
        try:
            await asyncio.wrap_future(self._writer.submit(self._book.put, intent))
        except MyelinError as error:
            if must:
                raise
            _log.warning("what became of %s is not noted: %s", intent.node, error)

    def note_now(self, intent: Intent) -> None:
        """As :meth:`note`, where we may not wait."""
        self._intents[intent.node, intent.attempt] = intent
        if self._book is not None and self._writer is not None:
            self._writer.submit(self._book.put, intent)

    async def close(self) -> None:
        """Let go of the book, which is told whether anything is left of the run. Twice is fine."""
        book, self._book = self._book, None
        if book is None or self._writer is None:
            return
        try:
            await asyncio.wrap_future(self._writer.submit(book.close, ended=not self.open()))
        except MyelinError as error:
            _log.warning("the end of the run was not noted: %s", error)
        finally:
            self._writer.shutdown(wait=False)
