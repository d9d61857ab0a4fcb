"""The HTTP server and its live page beside a command's run: from before the first phase until after the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from myelin.orchestrator.events import Silent
from myelin.serve.request_book import RequestBook
from myelin.telemetry.phases import Phase

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from myelin.cli.composition import Root
    from myelin.orchestrator.events import NodeEvent, NodeLog, Observer, PhaseEvent, ProgressEvent
    from myelin.orchestrator.pipeline import Pipeline
    from myelin.orchestrator.request import RunRequest
    from myelin.serve.dashboard.feed import Feed
    from myelin.serve.http.address import Listening
    from myelin.serve.http.health import Health
    from myelin.serve.http.server import HttpServer
    from myelin.telemetry.metrics import Metrics


class Observers:
    """One observer that tells several."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def phase(self, event: PhaseEvent) -> None:
        """A phase began or ended."""
        for observer in self._observers:
            observer.phase(event)

    def node(self, event: NodeEvent) -> None:
        """A node came into another state."""
        for observer in self._observers:
            observer.node(event)

    def progress(self, event: ProgressEvent) -> None:
        """A node got further with its stage."""
        for observer in self._observers:
            observer.progress(event)

    def log(self, event: NodeLog) -> None:
        """A node wrote a line."""
        for observer in self._observers:
            observer.log(event)


CALM_S = 0.6
"""How long the web framework's import waits at most for the nodes to be on their way."""


class _Launch(Silent):
    """Knows when the nodes are on their way: what the orchestrator itself must do before that is done, and it waits."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    def phase(self, event: PhaseEvent) -> None:
        """A phase began or ended."""
        if event.phase == Phase.PROVIDER_START:
            self.begun.set()


class Spent(Protocol):
    """What the nodes cost."""

    @property
    def dollars_per_hour(self) -> float: ...

    @property
    def dollars(self) -> float: ...


class Figures:
    """The run's figures, for ``/metrics`` and for the page.

    Attributes:
        metrics: The telemetry's, once there is a pipeline.
        spend: Says what the nodes cost, where somebody knows.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.metrics: Metrics | None = None
        self.spend: Callable[[], Spent] | None = None

    def prometheus(self) -> bytes:
        """Everything, in Prometheus' text format."""
        from myelin.serve.dashboard.exposition import exposition

        told = self.metrics.prometheus() if self.metrics is not None else b""
        return told + exposition(self._feed.snapshot)

    def events(self) -> Iterator[object]:
        """What the nodes sampled last, and what they cost, as events for the page."""
        from myelin.serve.dashboard.figures import node_figures
        from myelin.serve.dashboard.reducer import RunFacts, StageFacts

        if self.spend is not None and ((spent := self.spend()).dollars_per_hour or spent.dollars):
            yield RunFacts({"dollars_per_hour": spent.dollars_per_hour, "dollars": spent.dollars})

        for node in self.metrics.nodes() if self.metrics is not None else ():
            if node.stage >= 0:
                yield StageFacts(node.stage, node_figures(node))


@dataclass(frozen=True, slots=True)
class Page:
    """What a command tells of its run; where there is no HTTP, nobody listens.

    Attributes:
        observer: For the run.
        book: For the requests.
        base_url: Where HTTP is answered; empty where it isn't.
    """

    observer: Observer
    book: RequestBook
    base_url: str = ""
    feed: Feed | None = None
    figures: Figures | None = None

    def serving(self, pipeline: Pipeline) -> None:
        """The pipeline is there."""
        if self.feed is not None and self.figures is not None:
            self.figures.metrics = pipeline.metrics
            self.figures.spend = pipeline.spend
            self.feed.serving(
                pipeline,
                self.figures.events,
                bootstrap_s=round(pipeline.bootstrap_seconds, 3),
                max_context=pipeline.options.max_context,
                places=pipeline.options.max_sequences,
            )


@contextmanager
def listener_of(root: Root, *, always: bool) -> Iterator[Listening | None]:
    """Listen where the settings say, before anything is started; None where no HTTP is wanted.

    Args:
        always: The command answers HTTP unless it is told not to; otherwise only with ``--dashboard``.

    Raises:
        ConfigError: The address is wrong, or needs a token.
        TransportError: It is in use.
    """
    settings = root.settings
    if not settings.serve.http or not (always or settings.runtime.dashboard):
        yield None
        return
    from myelin.serve.http.address import listen

    with closing(listen(settings.serve.http, settings.serve.token)) as listening:
        yield listening


@asynccontextmanager
async def live_page(
    root: Root, request: RunRequest, listening: Listening | None, display: Observer
) -> AsyncIterator[Page]:
    """HTTP for as long as the block lasts, which is best put around the whole run.

    Args:
        listening: From :func:`listener_of`.
        display: Is told of everything, too.
    """
    if listening is None:
        yield Page(display, RequestBook())
        return
    from myelin import __version__
    from myelin.cli.output import tell
    from myelin.serve.dashboard.feed import Feed
    from myelin.serve.http.health import Health
    from myelin.serve.http.server import HttpServer

    book = RequestBook()
    feed, health, launch = Feed(book), Health(), _Launch()
    feed.facts(
        id=str(request.run),
        model=request.model_uri,
        provider=request.provider,
        engine=request.engine,
        stages=request.stages,
        version=__version__,
        state="starting",
    )
    with_page = root.settings.runtime.dashboard is not False
    figures = Figures(feed)
    server = HttpServer(listening, lambda: make_app(feed, figures, health, listening, with_page=with_page))
    tasks = [asyncio.create_task(feed.run(), name="feed"), asyncio.create_task(_answer(server, launch), name="http")]
    for task in tasks:
        task.add_done_callback(_tell_of_failure)
    page = Page(Observers((display, feed, health, launch)), book, listening.url, feed, figures)
    tell(f"Dashboard on {listening.url}/dashboard" if with_page else f"Health and metrics on {listening.url}")
    try:
        yield page
    finally:
        await _farewell(feed, server, tasks)


async def _answer(server: HttpServer, launch: _Launch) -> None:
    """Answer HTTP. Importing the web framework takes half a second of a core, which mustn't be the nodes' half second;
    who asks before gets an answer after it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CALM_S):
            await launch.begun.wait()
    await server.run()


def _tell_of_failure(task: asyncio.Task[None]) -> None:
    """The run goes on without its page."""
    if not task.cancelled() and (error := task.exception()) is not None:
        from myelin.cli.output import tell

        tell(f"The live page has failed: {type(error).__name__}: {error}")


async def _farewell(feed: Feed, server: HttpServer, tasks: list[asyncio.Task[None]]) -> None:
    """Tell open pages of the end, and stop; bounded."""
    feed.close()
    await server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def make_app(feed: Feed, figures: Figures, health: Health, listening: Listening, *, with_page: bool) -> ASGIApp:
    """The application. Imports the web framework, which takes a while."""
    from myelin.serve.http.app import create_app
    from myelin.serve.http.guard import Access

    token = listening.token.get_secret_value() if listening.token is not None else ""
    access = Access.make(token, listening.host, listening.port)
    routers = []
    if with_page:
        from myelin.serve.dashboard.pages import dashboard_router

        routers.append(dashboard_router(feed, access))
    return create_app(access, health, figures.prometheus, routers)
