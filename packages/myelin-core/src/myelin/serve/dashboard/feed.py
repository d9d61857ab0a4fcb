"""The feed: an observer that turns what happens into what the page shows, a few times a second at most.

An observer's call only notes the event; :meth:`Feed.run` works them off. Of log lines, only as many are kept between
two ticks as a page could show; the others are counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from myelin.errors import MyelinError
from myelin.orchestrator.events import NodeEvent, NodeLog, PhaseEvent, ProgressEvent
from myelin.serve.dashboard.figures import Counted, request_row, sample, stage_facts, stage_figures
from myelin.serve.dashboard.reducer import LogLines, NodeFacts, RequestNow, RunFacts, Sampled, StageFacts, reduce
from myelin.serve.dashboard.state import RINGS, Increment, Row, Snapshot, Value, difference
from myelin.serve.request_book import RequestBook, RequestTale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from myelin.orchestrator.pipeline import StageStatus

TICK_S = 0.2
SAMPLE_EVERY_S = 1.0
MEASURE_EVERY_S = 2.0
MEASURE_TIMEOUT_S = 5.0
LINES_A_TICK = 400
"""Lines of logs that are shown of one tick; the latest ones."""

MAX_LINE = 1000
"""Characters of a line that are kept."""

MAX_PENDING = 20_000
"""Events that may wait for a tick; more are dropped, oldest first. Never reached unless the loop stood still."""


class Watched(Protocol):
    """What the feed asks of a live pipeline."""

    @property
    def stages(self) -> Sequence[StageStatus]:
        """As they were when they had loaded."""

    async def status(self) -> Sequence[StageStatus]:
        """The stages as they are now."""


class Feed:
    """What the page shows of one run. The event loop owns it.

    Args:
        book: The requests.
        tick_s: Seconds between two changes of what is shown.
        clock: Unix seconds.
    """

    def __init__(self, book: RequestBook, *, tick_s: float = TICK_S, clock: Callable[[], float] = time.time) -> None:
        self.snapshot = Snapshot()
        self._book = book
        self._tick_s = tick_s
        self._clock = clock
        self._pending: deque[tuple[float, object]] = deque(maxlen=MAX_PENDING)
        self._lines: deque[Row] = deque(maxlen=LINES_A_TICK)
        self._lines_seen = 0
        self._counted = Counted(time.monotonic(), 0)
        self._pipeline: Watched | None = None
        self._more: Callable[[], Iterable[object]] = tuple
        self._measured: tuple[float, Sequence[StageStatus]] = (time.monotonic(), ())
        self._changed = asyncio.Event()
        self._closed = False
        self._last: tuple[int, Increment] | None = None
        book.listen(self._request)

    # What happens.

    def phase(self, event: PhaseEvent) -> None:
        """A phase began or ended."""
        self._pending.append((self._clock(), event))

    def node(self, event: NodeEvent) -> None:
        """A node came into another state."""
        self._pending.append((self._clock(), event))

    def progress(self, event: ProgressEvent) -> None:
        """A node got further with its stage."""
        self._pending.append((self._clock(), event))

    def log(self, event: NodeLog) -> None:
        """A node wrote a line."""
        self._lines_seen += 1
        self._lines.append(
            {"t": self._clock(), "node": str(event.node), "stream": event.stream, "text": event.text[:MAX_LINE]}
        )

    def facts(self, **values: Value) -> None:
        """Something is known of the run: values of its row (see :mod:`myelin.serve.dashboard.reducer`)."""
        self._pending.append((self._clock(), RunFacts(values)))

    def serving(self, pipeline: Watched, more: Callable[[], Iterable[object]] = tuple, **values: Value) -> None:
        """There is a pipeline: what it is made of is shown, and how busy it is from now on.

        Args:
            pipeline: It.
            more: Asked at each measurement for more events (see :mod:`myelin.serve.dashboard.reducer`).
            values: Of the run's row.
        """
        self.facts(**values)
        self._pipeline = pipeline
        self._more = more
        self._measured = (time.monotonic(), ())
        self._describe(pipeline.stages)

    def _describe(self, stages: Sequence[StageStatus]) -> None:
        now = self._clock()
        for stage in stages:
            known = stage_facts(stage)
            self._pending.append((now, StageFacts(stage.index, known)))
            self._pending.append((now, NodeFacts(str(stage.node), {"stage": stage.index})))

    def _request(self, tale: RequestTale) -> None:
        now = self._clock()
        self._pending.append((now, RequestNow(request_row(tale, now))))

    # What is shown.

    async def run(self) -> None:
        """Work off what happens, until cancelled."""
        sampled = time.monotonic()
        measuring: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(self._tick_s)
                now = time.monotonic()
                if now - sampled >= SAMPLE_EVERY_S:
                    sampled = now
                    self._sample(now)
                if now - self._measured[0] >= MEASURE_EVERY_S and (measuring is None or measuring.done()):
                    measuring = asyncio.create_task(self._measure())
                self.tick()
        finally:
            if measuring is not None:
                measuring.cancel()
                await asyncio.gather(measuring, return_exceptions=True)

    def tick(self) -> None:
        """Show what has happened up to now."""
        snapshot = self.snapshot
        while self._pending:
            now, event = self._pending.popleft()
            snapshot = reduce(event, snapshot, now)
        if self._lines_seen:
            lines = LogLines(tuple(self._lines), self._lines_seen - len(self._lines))
            self._lines.clear()
            self._lines_seen = 0
            snapshot = reduce(lines, snapshot, self._clock())
        if snapshot is not self.snapshot:
            self.snapshot = snapshot
            self._changed.set()
            self._changed = asyncio.Event()

    def _sample(self, now: float) -> None:
        book = self._book
        running = sum(1 for tale in book.open.values() if tale.began)
        waiting = len(book.open) - running
        counted = Counted(now, book.tokens)
        moment = self._clock()
        self._pending.append((moment, Sampled(sample(self._counted, counted, running, waiting))))
        counts: dict[str, Value] = {state.value: count for state, count in book.ended.items()}
        counts.update(running=running, waiting=waiting, tokens=book.tokens, prompt_tokens=book.prompt_tokens)
        shown = self.snapshot.row("run", "run")
        if any(shown.get(key) != value for key, value in counts.items()):
            self._pending.append((moment, RunFacts(counts)))
        self._counted = counted
        for tale in list(book.open.values())[: RINGS["samples"] // 10]:
            row = self.snapshot.row("requests", str(tale.number))
            if row.get("tokens") != tale.tokens:
                self._pending.append((moment, RequestNow(request_row(tale, moment))))

    async def _measure(self) -> None:
        """Ask the stages how busy they were. What can't be asked is shown as it was."""
        began, before = self._measured
        now = time.monotonic()
        self._measured = (now, before)
        if self._pipeline is None:
            return
        with suppress(MyelinError, TimeoutError):
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                stages = tuple(await self._pipeline.status())
            self._measured = (now, stages)
            moment = self._clock()
            self._pending.extend((moment, event) for event in self._more())
            if before:
                for stage, figures in zip(stages, stage_figures(before, stages, now - began), strict=True):
                    self._pending.append((moment, StageFacts(stage.index, {**stage_facts(stage), **figures})))

    # Who looks.

    async def watch(self) -> AsyncIterator[Snapshot | Increment]:
        """A snapshot, then increments as there are any, until the feed is closed.

        However slowly they are taken, nothing piles up: an increment is made when it is asked for, from what the taker
        has to what there is by then.
        """
        shown = self.snapshot
        yield shown
        while True:
            if self.snapshot is shown:
                if self._closed:
                    return
                await self._changed.wait()
                continue
            before, shown = shown, self.snapshot
            yield self._increment(before, shown)

    def _increment(self, before: Snapshot, after: Snapshot) -> Increment:
        """Most watchers are at the same place: the last increment is kept for the next one who needs it."""
        if self._last is None or self._last[0] != before.version or self._last[1].version != after.version:
            self._last = (before.version, difference(before, after))
        return self._last[1]

    def close(self) -> None:
        """Nothing more happens: whoever looks gets the rest, and an end."""
        self.tick()
        self._closed = True
        self._changed.set()

    @property
    def status(self) -> Mapping[str, Value]:
        """The run's row."""
        return self.snapshot.row("run", "run")
