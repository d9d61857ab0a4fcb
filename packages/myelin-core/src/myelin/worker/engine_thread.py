"""The one thread that owns a worker's engine: jobs go in by a queue, results come back to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

_Job = tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], None] | None, Callable[[BaseException], None]]


class EngineThread:
    """Runs jobs one after another, in the order of :meth:`post`.

    The thread is a daemon: an engine that hangs never keeps the process alive. Jobs that wait when :meth:`stop` is
    called still run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="myelin-engine", daemon=True)
        self._thread.start()

    def post(
        self,
        job: Callable[..., Result],
        arguments: tuple[Any, ...],
        done: Callable[[Result], None] | None,
        failed: Callable[[BaseException], None],
    ) -> None:
        """Run ``job(*arguments)`` on the thread, then ``done(result)`` or ``failed(error)`` on the event loop.

        Without ``done`` a job that succeeds wakes nobody: it has seen to its result itself.
        """
        self._jobs.put((job, arguments, done, failed))

    async def call(self, job: Callable[..., Result], *arguments: Any) -> Result:
        """Run ``job`` on the thread and wait for what it returns or raises. A cancelled wait does not stop the job."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def done(result: Result) -> None:
            if not future.done():
                future.set_result(result)

        def failed(error: BaseException) -> None:
            if not future.done():
                # A future refuses StopIteration, and a thread's SystemExit must not end the loop.
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        self.post(job, arguments, done, failed)
        return await future

    def notify(self, callback: Callable[..., object], *arguments: object) -> None:
        """Run ``callback(*arguments)`` on the event loop. For jobs, on the thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)

    def stop(self) -> None:
        """End the thread once the jobs before are done; returns at once. Twice is fine."""
        self._jobs.put(None)

    def _run(self) -> None:
        notify = self._loop.call_soon_threadsafe
        jobs = self._jobs
        while (item := jobs.get()) is not None:
            job, arguments, done, failed = item
            try:
                result = job(*arguments)
            except BaseException as error:
                report: Callable[[Any], None] | None = failed
                answer: Any = error
            else:
                report, answer = done, result
            if report is not None:
                try:
                    notify(report, answer)
                except RuntimeError:  # The loop is closed: nobody waits any more.
                    return
            # Hold no batch, and no error with its frames, while waiting for the next job.
            del item, job, arguments, done, failed, report, answer
            result = None
