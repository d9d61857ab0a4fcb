"""The real server and page over a run that is told, not run: every state of the page within a moment."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pydantic import SecretStr

from myelin.orchestrator.events import NodeEvent, NodeLog, NodeState, PhaseEvent, ProgressEvent
from myelin.orchestrator.pipeline import StageStatus
from myelin.serve.dashboard.feed import Feed
from myelin.serve.http.address import listen
from myelin.serve.http.health import Health
from myelin.serve.request_book import RequestBook, RequestState
from myelin.telemetry.phases import Phase
from myelin.values import Attempt, NodeId


class Stages:
    """A pipeline that has only figures."""

    def __init__(self, count: int) -> None:
        layers = [(i * 10, (i + 1) * 10) for i in range(count)]
        self.stages = tuple(
            StageStatus(
                i, layers[i], NodeId(f"stage-{i}"), "process", "cpu", 40_000_000, 40_000_000, 52_000_000, 9_000_000,
                180_000_000, 190_000_000, 1, 0.8,
            )
            for i in range(count)
        )  # fmt: skip
        self.began = time.monotonic()

    async def status(self) -> tuple[StageStatus, ...]:
        passed = time.monotonic() - self.began
        return tuple(
            replace(s, steps=int(passed * 55), rows=int(passed * 110), busy_seconds=passed * (0.62 - 0.17 * s.index))
            for s in self.stages
        )


@dataclass
class Scripted:
    """The page's other side, to be told things from a test's thread."""

    url: str
    feed: Feed
    health: Health
    book: RequestBook
    loop: asyncio.AbstractEventLoop

    def tell(self, *what: Callable[[], object]) -> None:
        """Do this in the loop, and show it."""

        async def all_of_it() -> None:
            for each in what:
                each()
            self.feed.tick()

        asyncio.run_coroutine_threadsafe(all_of_it(), self.loop).result(60)

    def phase(self, phase: str, state: str, seconds: float = 0.0, detail: str = "") -> None:
        event = PhaseEvent(phase, state, seconds, detail)
        self.tell(lambda: self.feed.phase(event), lambda: self.health.phase(event))

    def node(self, node: int, state: NodeState, attempt: int = 1, detail: str = "", seconds: float = 0.0) -> None:
        event = NodeEvent(NodeId(f"stage-{node}"), node, Attempt(attempt), state, detail, seconds)
        self.tell(lambda: self.feed.node(event), lambda: self.health.node(event))

    def progress(self, node: int, phase: str, done: int, total: int) -> None:
        self.tell(lambda: self.feed.progress(ProgressEvent(NodeId(f"stage-{node}"), node, phase, done, total)))

    def log(self, node: int, text: str, stream: str = "stderr") -> None:
        self.tell(lambda: self.feed.log(NodeLog(NodeId(f"stage-{node}"), stream, text)))

    def until_loading(self, stages: int = 3, pace: float = 0.0) -> None:
        """A bootstrap up to the loading of the stages."""
        for phase in list(Phase)[:8]:
            self.phase(phase, "started")
            time.sleep(pace / 2)
            self.phase(phase, "done", pace / 2)
        self.phase(Phase.PROVIDER_START, "started")
        for node in range(stages):
            self.node(node, NodeState.STARTING, detail="2 cores, 22.1 GB free")
        time.sleep(pace * 4)
        for node in range(stages):
            self.node(node, NodeState.ANNOUNCED, detail=f"127.0.0.1:4100{node}")
            line = json.dumps({"event": "listening", "level": "info", "address": f"127.0.0.1:4100{node}", "pid": 4242})
            self.log(node, line)
            time.sleep(pace)
        self.phase(Phase.PROVIDER_START, "done", pace * 7)
        for node in range(stages):
            self.node(node, NodeState.READY)
        self.phase(Phase.STAGE_PROVISION, "started")
        for node in range(stages):
            self.node(node, NodeState.LOADING)
            self.progress(node, "open", 0, 0)
            time.sleep(pace)
            self.progress(node, "fetch", 12_000_000 * (node + 1), 40_000_000)
            self.log(node, '{"event": "slow disk", "level": "warning", "seconds": 1.25}')

    def until_serving(self, stages: int = 3, pace: float = 0.0) -> None:
        """A bootstrap up to its end."""
        self.until_loading(stages, pace)
        for node in range(stages):
            self.progress(node, "load", 20_000_000, 52_000_000)
            time.sleep(pace * 2)
            self.node(node, NodeState.LOADED)
        self.phase(Phase.STAGE_PROVISION, "done", pace * 7)
        self.phase(Phase.PIPELINE_PROBE, "started")
        time.sleep(pace)
        self.phase(Phase.PIPELINE_PROBE, "done", pace)
        self.phase(Phase.SERVING, "started")
        for node in range(stages):
            self.node(node, NodeState.SERVING)
        pipeline = Stages(stages)
        self.tell(lambda: self.feed.serving(pipeline, bootstrap_s=pace * 20, max_context=4096, places=4))

    def answer(self, tokens: int, pace: float = 0.0, label: str = "r", end: bool = True) -> None:
        """A request, with so many tokens."""
        tales = []
        self.tell(lambda: tales.append(self.book.arrived("prompt-rpc", label)))
        (tale,) = tales
        self.tell(lambda: tale.begin(24, 64))
        time.sleep(pace * 2)
        for _ in range(tokens):
            time.sleep(pace)
            self.tell(tale.token)
        if end:
            self.tell(lambda: tale.end(RequestState.DONE, "stop"))


@contextmanager
def scripted_page(token: str = "", port: int = 0) -> Iterator[Scripted]:
    """A page of a run that hasn't begun."""
    ready = threading.Event()
    found: list[Scripted] = []
    stop: list[asyncio.Event] = []

    async def serve() -> None:
        from myelin.cli.page import Figures, make_app
        from myelin.serve.http.server import HttpServer

        book = RequestBook()
        feed, health = Feed(book), Health()
        feed.facts(
            id="run-demo", model="hf:bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q4_K_M.gguf",
            provider="process", stages=3, version="0.1.0", state="starting",
        )  # fmt: skip
        listening = listen(f"127.0.0.1:{port}", SecretStr(token) if token else None)
        server = HttpServer(listening, lambda: make_app(feed, Figures(feed), health, listening, with_page=True))
        tasks = [asyncio.create_task(feed.run()), asyncio.create_task(server.run())]
        ended = asyncio.Event()
        stop.append(ended)
        found.append(Scripted(listening.url, feed, health, book, asyncio.get_running_loop()))
        ready.set()
        await ended.wait()
        feed.close()
        await server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(60)
    (scripted,) = found
    try:
        yield scripted
    finally:
        scripted.loop.call_soon_threadsafe(stop[0].set)
        thread.join(60)
        assert not thread.is_alive(), "the server did not end in time"
