"""Our side of the bridge: calls, each with a deadline, to the process that speaks with Ray.

The process is started with the first call, and anew where it has ended; see :mod:`myelin_provider_ray.bridge` for why
there is one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from myelin.plugin import ProviderError
from myelin_provider_ray.endings import one_line

COMMAND = (sys.executable, "-m", "myelin_provider_ray.bridge")
CLOSE_S = 15.0
_KEPT_LINES = 20
_PIPES_S = 1.0
_LONGEST_ANSWER = 1 << 26


class Calls(Protocol):
    """Whatever has the bridge's calls done: a :class:`Driver`, or tests."""

    async def call(self, name: str, /, *, timeout_s: float = 0.0, **arguments: Any) -> Any:
        """See :meth:`Driver.call`."""

    async def close(self) -> None:
        """See :meth:`Driver.close`."""


class Driver:
    """The bridge's process.

    Args:
        connect: Arguments of :func:`myelin_provider_ray.bridge.connect`.
        connect_s: How long joining the cluster may take.
        call_s: How long any other call may take, unless it says otherwise.
        command: What to run (tests).
    """

    def __init__(
        self, connect: Mapping[str, Any], connect_s: float, call_s: float, command: Sequence[str] = COMMAND
    ) -> None:
        self._connect = connect
        self._connect_s = connect_s
        self._call_s = call_s
        self._command = tuple(command)
        self._starting = asyncio.Lock()
        self._link: _Link | None = None

    async def call(self, name: str, /, *, timeout_s: float = 0.0, **arguments: Any) -> Any:
        """Have the bridge do ``name``.

        Raises:
            ProviderError: There is no such cluster, it doesn't answer in time, or it says no. Whether something was
                done is unknown.
        """
        link = await self._connected()
        return await within(timeout_s or self._call_s, link.ask(name, arguments), "did not answer")

    async def close(self) -> None:
        """Leave the cluster. What runs there goes on. Twice is fine."""
        async with self._starting:
            link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _connected(self) -> _Link:
        async with self._starting:
            if self._link is not None and self._link.open:
                return self._link
            if self._link is not None:
                await self._link.close()
            # Statistics of use are the cluster's owner's to send, not ours.
            environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TQDM": "0", **os.environ, "PYTHONUNBUFFERED": "1"}
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                limit=_LONGEST_ANSWER,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us; we leave the cluster in order
            )
            link = _Link(process)
            try:
                await within(self._connect_s, link.ask("connect", self._connect), "did not let us in")
            except BaseException:
                await link.close(0.0)
                raise
            self._link = link
            return link


class _Link:
    """One process, and the calls that are under way in it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._listen())]

    @property
    def open(self) -> bool:
        """It can be asked."""
        return not self._tasks[0].done()

    async def ask(self, call: str, arguments: Mapping[str, Any]) -> Any:
        """Send a request and wait for its answer."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        request = {"id": number, "call": call, "with": arguments}
        assert self._process.stdin is not None
        try:
            if not self.open:
                raise self._ended()
            self._process.stdin.write(json.dumps(request, separators=(",", ":")).encode() + b"\n")
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def close(self, patience_s: float | None = None) -> None:
        """End its input, which ends it; kill it where that takes longer than ``patience_s`` (:data:`CLOSE_S`)."""
        patience_s = CLOSE_S if patience_s is None else patience_s
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._process.wait()
        finally:  # also where we are cancelled: then it isn't given the time to end by itself
            if self._process.returncode is None:
                self._process.kill()
            await self._gone()

    async def _gone(self) -> None:
        """Wait for its end and that of its pipes: only then is nothing of it left in the event loop."""
        await self._process.wait()
        # A child of its own could hold a pipe open.
        _, late = await asyncio.wait(self._tasks, timeout=_PIPES_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                document = json.loads(line)
                answer = self._waiting.get(document["id"])
                if answer is None or answer.done():
                    continue  # whoever asked waits no more
                if "error" in document:
                    answer.set_exception(refusal(*document["error"]))
                else:
                    answer.set_result(document["answer"])
        finally:
            await asyncio.wait({self._tasks[1]}, timeout=0.2)
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(self._ended())

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            if text := line.decode(errors="replace").strip():
                self._said.append(text)

    def _ended(self) -> ProviderError:
        said = f": {one_line(self._said[-1])}" if self._said else ""
        return ProviderError(
            f"the process that speaks with Ray has ended{said}",
            "see whether the cluster's head is well (`ray status`)",
            reason="ray-ended",
        )


def refusal(kind: str, text: str) -> ProviderError:
    """What an exception in the bridge means for people. Pure."""
    told = one_line(text)
    if kind in ("ImportError", "ModuleNotFoundError"):
        return ProviderError(f"Ray can't be used: {told}", "pip install myelin-provider-ray", reason="no-ray")
    if kind == "ConnectionError":
        return ProviderError(
            f"there is no Ray cluster: {told}",
            "start one with `ray start --head`, name one with ray.address, or have one for this run: ray.address=local",
            reason="no-cluster",
        )
    if kind == "TimeoutError":
        return ProviderError(f"the Ray cluster is too slow: {told}", "see `ray status`", reason="ray-timeout")
    return ProviderError(f"Ray refused: {kind}: {told}", "see `ray status`", reason="ray-refused")


async def within(seconds: float, call: Awaitable[Any], what: str) -> Any:
    """The outcome of a call.

    Raises:
        ProviderError: It took longer than that.
    """
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError:
        raise ProviderError(
            f"the Ray cluster {what} within {seconds:g} s",
            "see whether its head is well (`ray status`), and ray.address",
            reason="ray-timeout",
        ) from None
