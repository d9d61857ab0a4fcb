"""One node: a child process, what it writes, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress

from myelin.plugin import (
    PARENT_VARIABLE,
    BootSpec,
    Endpoint,
    LaunchKey,
    Lease,
    LeaseId,
    LeaseState,
    LogBuffer,
    LogLine,
    boot_line,
    parse_announcement,
)


async def start_node(command: Sequence[str], boot: BootSpec, key: LaunchKey, offer: str, log_lines: int) -> Node:
    """Start a process and tell it who it is, on its standard input, which nobody else can read.

    If this is cancelled meanwhile, asyncio ends the process before it passes that on.

    Raises:
        OSError: The command can't be run.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MYELIN_")}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        limit=1 << 20,
        env=environment | {PARENT_VARIABLE: str(os.getpid())},  # a worker doesn't outlive this process
        start_new_session=True,  # Ctrl-C in a terminal is for Myelin, which then ends its nodes in order
    )
    assert process.stdin is not None
    process.stdin.write(boot_line(boot))  # and it stays open: at its end, the worker ends too
    return Node(process, key, offer, log_lines)


class Node:
    """A started process."""

    def __init__(self, process: Process, key: LaunchKey, offer: str, log_lines: int) -> None:
        self.key = key
        self.id = LeaseId(f"{process.pid}.{key}")
        self._process = process
        self._offer = offer
        self._endpoint: Endpoint | None = None
        self.log = LogBuffer(log_lines)
        self._ended = False
        self._watching = asyncio.create_task(self._watch())

    @property
    def lease(self) -> Lease:
        """How it is now."""
        state, reason = LeaseState.STARTING if self._endpoint is None else LeaseState.RUNNING, ""
        if self._ended:
            last = self.log.last("stderr")[:300] or "without a word"
            state, reason = LeaseState.EXITED, f"exited with status {self._process.returncode}: {last}"
        return Lease(self.id, self.key, state, self._offer, self._endpoint, exit_reason=reason)

    async def stop(self, grace_s: float) -> None:
        """End its input, which ends the worker; kill it where that takes too long. Returns once it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        _, late = await asyncio.wait({self._watching}, timeout=grace_s)
        if late:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # and what it may have started itself
        await asyncio.wait({self._watching})

    async def _watch(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        await asyncio.gather(self._read("stdout", self._process.stdout), self._read("stderr", self._process.stderr))
        await self._process.wait()
        self._ended = True
        self.log.end()

    async def _read(self, stream: str, pipe: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await pipe.readline()
            except ValueError:
                continue  # more than a megabyte without an end: it isn't kept
            if not line:
                return
            self._take(stream, line.decode(errors="replace").rstrip("\r\n"))

    def _take(self, stream: str, text: str) -> None:
        if stream == "stdout" and (endpoint := parse_announcement(text)):
            self._endpoint = endpoint
        else:
            self.log.append(LogLine(stream, text, time.time()))
