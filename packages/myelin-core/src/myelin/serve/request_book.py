"""Which requests there are: waiting, running, ended; told by whoever takes them in, for whoever shows or counts them.

A token costs one addition here. Everything else (rates, latencies) is for readers to make of the counts, as seldom as
they like.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from enum import StrEnum


class RequestState(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    """Whoever asked has gone away."""
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Nothing more comes."""
        return self not in (RequestState.WAITING, RequestState.RUNNING)


class RequestTale:
    """What is known of one request. Times are Unix seconds; 0 where it hasn't come to that.

    Attributes:
        number: Its own in this process, from 1.
        source: Through what it came: ``prompt-rpc``, ``chat``, ``prompt``.
        label: Its sender's own name for it; empty where there is none.
        state: See there.
        prompt_tokens, max_tokens: Known once it runs.
        tokens: New ones so far.
        arrived, began, first, ended: When it came, began to run, had its first token, ended.
        outcome: Why it ended: ``stop``, ``length``, or an error's reason.
        detail: For people, where it failed.
    """

    __slots__ = (
        "_tell",
        "arrived",
        "began",
        "detail",
        "ended",
        "first",
        "label",
        "max_tokens",
        "number",
        "outcome",
        "prompt_tokens",
        "source",
        "state",
        "tokens",
    )

    def __init__(self, number: int, source: str, label: str, tell: Callable[[RequestTale], None]) -> None:
        self.number = number
        self.source = source
        self.label = label
        self.state = RequestState.WAITING
        self.prompt_tokens = 0
        self.max_tokens = 0
        self.tokens = 0
        self.arrived = time.time()
        self.began = 0.0
        self.first = 0.0
        self.ended = 0.0
        self.outcome = ""
        self.detail = ""
        self._tell = tell

    def begin(self, prompt_tokens: int, max_tokens: int) -> None:
        """It is given to the pipeline."""
        self.state = RequestState.RUNNING
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.began = time.time()
        self._tell(self)

    def token(self) -> None:
        """A new token came."""
        self.tokens += 1
        if self.tokens == 1:
            self.first = time.time()
            self._tell(self)

    def end(self, state: RequestState, outcome: str = "", detail: str = "") -> None:
        """It has ended; the first time counts."""
        if self.state.ended:
            return
        self.state = state
        self.outcome = outcome
        self.detail = detail
        self.ended = time.time()
        self._tell(self)


class RequestBook:
    """All requests of this process. The event loop owns it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, RequestTale] = {}
        self._listeners: list[Callable[[RequestTale], None]] = []
        self._ended = dict.fromkeys((state for state in RequestState if state.ended), 0)
        self._tokens_of_ended = 0
        self._prompt_tokens_of_ended = 0

    def listen(self, listener: Callable[[RequestTale], None]) -> None:
        """Have ``listener`` told of each request: when it comes, begins, has its first token, and ends."""
        self._listeners.append(listener)

    def arrived(self, source: str, label: str = "") -> RequestTale:
        """A request has come."""
        tale = RequestTale(next(self._numbers), source, label[:80], self._tell)
        self._open[tale.number] = tale
        self._tell(tale)
        return tale

    def _tell(self, tale: RequestTale) -> None:
        if tale.state.ended and self._open.pop(tale.number, None) is not None:
            self._ended[tale.state] += 1
            self._tokens_of_ended += tale.tokens
            self._prompt_tokens_of_ended += tale.prompt_tokens
        for listener in self._listeners:
            listener(tale)

    @property
    def open(self) -> Mapping[int, RequestTale]:
        """Those that have not ended, by number, in the order in which they came."""
        return self._open

    @property
    def ended(self) -> Mapping[RequestState, int]:
        """How many ended, and how."""
        return self._ended

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return self._tokens_of_ended + sum(tale.tokens for tale in self._open.values())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts of all requests that began."""
        return self._prompt_tokens_of_ended + sum(tale.prompt_tokens for tale in self._open.values())
