"""Tasks that are owned, blocking work that may be abandoned, and work that nothing interrupts."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from myelin.orchestrator.background import Background, all_of, in_thread, uninterrupted


async def test_a_set_of_tasks_is_closed_as_a_whole_and_tells_of_failures() -> None:
    failures: list[BaseException] = []
    background = Background(failures.append)

    async def fails() -> None:
        raise KeyError("oops")

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            background.start(asyncio.sleep(100), "started while closing")

    stuck = background.start(stubborn(), "stubborn")
    background.start(fails(), "fails")
    await asyncio.sleep(0.01)
    assert [type(error) for error in failures] == [KeyError]
    async with asyncio.timeout(60):
        await background.close()
    assert stuck.cancelled()
    await background.close()


async def test_all_of_gives_results_in_order_and_the_first_failure_as_it_is() -> None:
    async def after(seconds: float, value: int) -> int:
        await asyncio.sleep(seconds)
        if value < 0:
            raise ValueError(value)
        return value

    assert await all_of(after(0.02 / (n + 1), n) for n in range(3)) == [0, 1, 2]
    began = time.monotonic()
    with pytest.raises(ValueError, match="-1"):
        await all_of([after(0.01, -1), after(30, 1)])
    assert time.monotonic() - began < 10


async def test_blocking_work_is_abandoned_with_its_caller() -> None:
    let_go = threading.Event()
    assert await in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)
    task = asyncio.create_task(in_thread(lambda: let_go.wait(30)))
    await asyncio.sleep(0.01)
    task.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 10
    let_go.set()
    await asyncio.sleep(0.02)  # its late answer is dropped


async def test_an_answer_for_a_loop_that_has_ended_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, complaints = threading.Event(), list[object]()
    monkeypatch.setattr(threading, "excepthook", complaints.append)

    def elsewhere() -> None:
        async def leave() -> None:
            task = asyncio.ensure_future(in_thread(lambda: let_go.wait(30)))
            await asyncio.sleep(0.01)
            task.cancel()

        asyncio.run(leave())

    await asyncio.to_thread(elsewhere)
    let_go.set()
    for thread in threading.enumerate():
        if thread.name == "myelin-blocking":
            await asyncio.to_thread(thread.join, 60)
            assert not thread.is_alive()
    assert complaints == []


async def test_uninterrupted_work_ends_although_its_caller_is_cancelled() -> None:
    hurry, ended = asyncio.Event(), []

    async def work() -> None:
        await hurry.wait()
        await asyncio.sleep(0.02)
        ended.append(True)

    task = asyncio.create_task(uninterrupted(work, hurry))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_uninterrupted_work_that_is_cancelled_itself_is_done_again_once() -> None:
    hurry, begun = asyncio.Event(), []

    async def work() -> None:
        begun.append(asyncio.current_task())
        await asyncio.sleep(0.05)

    task = asyncio.create_task(uninterrupted(work, hurry))
    await asyncio.sleep(0.01)
    begun[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(begun) == 2
    assert begun[1].done()
    assert not begun[1].cancelled()


async def test_uninterrupted_work_may_fail() -> None:
    async def work() -> None:
        raise ValueError("it failed")

    with pytest.raises(ValueError, match="it failed"):
        await uninterrupted(work, asyncio.Event())
