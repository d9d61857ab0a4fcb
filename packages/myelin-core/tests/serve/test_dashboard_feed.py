"""The feed: what happens is noted at once, shown in ticks, and never piles up for anybody."""

from __future__ import annotations

import asyncio
import time

from myelin.orchestrator.events import NodeLog, PhaseEvent
from myelin.serve.dashboard.exposition import exposition
from myelin.serve.dashboard.feed import LINES_A_TICK, Feed
from myelin.serve.dashboard.state import Increment, Snapshot, apply
from myelin.serve.request_book import RequestBook, RequestState
from myelin.values import NodeId


async def test_a_watcher_that_is_slow_gets_one_increment_for_all_that_it_missed() -> None:
    feed = Feed(RequestBook())
    watching = feed.watch()
    first = await anext(watching)
    assert isinstance(first, Snapshot)
    for number in range(50):
        feed.facts(tokens=number)
        feed.tick()
    increment = await anext(watching)
    assert isinstance(increment, Increment)
    assert apply(first.tables, first.rings, increment).row("run", "run") == {"tokens": 49}
    feed.close()
    assert [each async for each in watching] == []


async def test_a_watcher_sleeps_until_something_changes() -> None:
    feed = Feed(RequestBook(), tick_s=0.01)
    running = asyncio.create_task(feed.run())
    watching = feed.watch()
    await anext(watching)
    coming = asyncio.ensure_future(anext(watching))
    await asyncio.sleep(0.05)
    assert not coming.done()
    feed.phase(PhaseEvent("serving", "started"))
    increment = await asyncio.wait_for(coming, 60)
    assert isinstance(increment, Increment)
    assert increment.rows["run"]["run"]["state"] == "serving"  # type: ignore[index]  # there is one
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_flood_of_lines_costs_little_and_is_counted() -> None:
    feed = Feed(RequestBook())
    line = NodeLog(NodeId("stage-0"), "stderr", "x" * 5000)
    began = time.thread_time()
    for _ in range(10_000):
        feed.log(line)
    feed.tick()
    assert time.thread_time() - began < 1.0
    assert len(feed.snapshot.rings["logs"]) == LINES_A_TICK
    assert feed.snapshot.row("run", "run")["lines_dropped"] == 10_000 - LINES_A_TICK
    assert all(len(str(row["text"])) == 1000 for row in feed.snapshot.rings["logs"])


async def test_requests_are_shown_from_their_arrival_to_their_end() -> None:
    book = RequestBook()
    feed = Feed(book)
    tale = book.arrived("prompt-rpc", "mine")
    feed.tick()
    assert feed.snapshot.row("requests", "1")["state"] == "waiting"
    tale.begin(5, 8)
    tale.token()
    tale.token()
    tale.end(RequestState.DONE, "stop")
    tale.end(RequestState.CANCELLED)
    feed.tick()
    row = feed.snapshot.row("requests", "1")
    assert (row["state"], row["outcome"], row["tokens"], row["label"]) == ("done", "stop", 2, "mine")
    assert book.tokens == 2
    assert book.prompt_tokens == 5
    assert not book.open
    assert len(feed.snapshot.rings["answers"]) == 1


async def test_the_exposition_is_what_prometheus_reads() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    feed = Feed(RequestBook())
    feed.facts(state="serving", recoveries=2, done=3)
    feed.tick()
    text = exposition(feed.snapshot).decode()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["myelin_recoveries_total",] == 2
    assert samples["myelin_requests_ended_total", "done"] == 3
    assert samples["myelin_run_state", "serving"] == 1
    assert samples["myelin_run_state", "lost"] == 0
