"""Running a command's coroutine: signals cancel it, and a second one ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from myelin.cli.interrupts import remembered
from myelin.cli.output import tell

Result = TypeVar("Result")


class Interrupted(KeyboardInterrupt):
    """A signal ended the command in good order; ``signal`` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


def run_to_end(main: Coroutine[Any, Any, Result], *, intercept: Callable[[int], bool] = lambda number: False) -> Result:
    """Run ``main`` until it is done.

    The first SIGINT or SIGTERM cancels it, so that everything it holds is released; the second one kills this process
    (the nodes notice that and end themselves).

    Args:
        intercept: Asked about each signal before; True means that it was dealt with, and nothing is cancelled.

    Raises:
        Interrupted: A signal ended it.
    """
    received: list[int] = []

    async def supervised() -> Result:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if received:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            elif not intercept(number):
                received.append(number)
                tell("Stopping; once more to stop at once")
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        if unheard := remembered():  # it came while we could not listen, and went unheard
            on_signal(unheard)
        try:
            return await main
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(supervised())
    except asyncio.CancelledError:
        raise Interrupted(received[0] if received else signal.SIGINT) from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
