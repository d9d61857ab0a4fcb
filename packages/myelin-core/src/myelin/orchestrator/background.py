"""Tasks that live as long as a run, owned by it and ended with it; and blocking work that may be abandoned."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextvars import copy_context
from typing import Any, TypeVar

from myelin.errors import MyelinError

T = TypeVar("T")


class Background:
    """A set of tasks that is closed as a whole: none outlives :meth:`close`.

    Args:
        on_failure: Told at once of what a task raised; nobody else may be waiting for it.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run ``work`` until it ends or the set is closed."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended; twice is fine."""
        while self._tasks:
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # gathering what has ended may not yield (Python 3.13), and callbacks must run


def fresh(error: MyelinError) -> MyelinError:
    """A copy of ``error`` to raise in another task: one exception object must not be raised twice."""
    copy = type(error)(error.message, error.hint, reason=error.reason)
    for note in getattr(error, "__notes__", ()):
        copy.add_note(note)
    return copy


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once and return what they give, in order. The first failure cancels the others and is raised as it
    is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    return [task.result() for task in tasks]


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def unless(
    work: Coroutine[Any, Any, T],
    trouble: Coroutine[Any, Any, MyelinError],
    *,
    linger: Callable[[BaseException | None], bool] = lambda error: False,
    linger_s: float = 0.0,
) -> T:
    """``work``'s result; where ``trouble`` returns meanwhile, ``work`` is cancelled and the trouble is raised.

    Args:
        linger: Asked of what ``work`` raised: whether the trouble may know better, a moment later.
        linger_s: That moment.

    Raises:
        MyelinError: The trouble, or what ``work`` raised.
    """
    doing, losing = asyncio.create_task(work), asyncio.create_task(trouble)
    try:
        await asyncio.wait({doing, losing}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done() and not doing.cancelled() and linger(doing.exception()):
            await asyncio.wait({losing}, timeout=linger_s)
        if losing.done() and not (doing.done() and not doing.cancelled() and doing.exception() is None):
            raise fresh(losing.result())
        return await doing
    finally:
        for task in (doing, losing):
            task.cancel()
        await asyncio.gather(doing, losing, return_exceptions=True)


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking ``work`` in a thread of its own that nobody waits for when the caller is cancelled, nor at exit.

    (``asyncio.to_thread`` would hold the end of the loop until a download is through.)
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]  # without an error there is a result, possibly None by type
        elif isinstance(error, StopIteration):
            done.set_exception(RuntimeError("blocking work raised StopIteration"))
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            pass  # the loop has ended: nobody wants the answer any more

    threading.Thread(target=copy_context().run, args=(run,), name="myelin-blocking", daemon=True).start()
    return await done


async def uninterrupted(work: Callable[[], Coroutine[Any, Any, None]], hurry: asyncio.Event) -> None:
    """Do ``work`` to its end even where the waiting task is cancelled.

    Each cancellation sets ``hurry``, so that the work can skip what it would like to wait for, and is raised again once
    the work has ended. Where somebody cancels the work itself (a loop that is being torn down cancels everything), it
    is begun once more, in a hurry: it must be fit to be done twice.
    """
    interrupted: asyncio.CancelledError | None = None
    task = asyncio.create_task(work())
    again = True
    while True:
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            interrupted = error
            hurry.set()
            if task.cancelled():
                if not again:
                    break
                again, task = False, asyncio.create_task(work())
        except Exception as error:
            if interrupted is None:
                raise
            interrupted.add_note(f"while ending: {error}")
            break
        else:
            break
    if interrupted is not None:
        raise interrupted
