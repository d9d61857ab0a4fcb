"""One node: a child process, what it writes, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import cast

from myelin.plugin import Endpoint, LaunchKey, Lease, LeaseId, LeaseState, LogBuffer, LogLine, parse_announcement
from myelin_provider_process.exits import exit_reason
from myelin_provider_process.lines import LineSplitter
from myelin_provider_process.machine import memory_kills

_STREAMS = {1: "stdout", 2: "stderr"}
_PIPE_GRACE_S = 1.0
"""How long output is awaited after the process ended: something that it started may hold its pipes open."""


class ProcessNode(asyncio.SubprocessProtocol):
    """A started process. Made by :func:`start_node`."""

    def __init__(self, key: LaunchKey, offer: str, log_lines: int) -> None:
        self.key = key
        self.offer = offer
        self.log = LogBuffer(log_lines)
        self.endpoint: Endpoint | None = None
        self._splitters = {number: LineSplitter() for number in _STREAMS}
        self._open_pipes = set(_STREAMS)
        self._exited = asyncio.Event()
        self._silent = asyncio.Event()
        self._ended = asyncio.Event()
        self._kills_before = memory_kills() or 0
        self._stopping = False
        self._exit_reason = ""

    @property
    def id(self) -> LeaseId:
        """The process id, with the key, since the system uses process ids again."""
        return LeaseId(f"{self._transport.get_pid()}.{self.key}")

    @property
    def lease(self) -> Lease:
        """How it is now."""
        state = LeaseState.STARTING if self.endpoint is None else LeaseState.RUNNING
        if self._ended.is_set():
            state = LeaseState.EXITED
        return Lease(self.id, self.key, state, self.offer, self.endpoint, exit_reason=self._exit_reason)

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, kill it and what it started after ``grace_s`` seconds, and return once it is gone."""
        self._stopping = True
        self._stdin.close()
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._exited.wait()
        except TimeoutError:
            self._note(f"it did not end within {grace_s:g} s of being asked to, and is killed")
            self._signal(signal.SIGKILL, group=True)
        await self._ended.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The process runs. Called by the event loop, as all that follow."""
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._watching = asyncio.create_task(self._watch(), name=f"watch {self.key}")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """It wrote something."""
        self._take(fd, self._splitters[fd].feed(data))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """It has closed a pipe, or the last process that had it open has."""
        if fd in _STREAMS:
            self._take(fd, self._splitters[fd].finish())
            self._open_pipes.discard(fd)
            if not self._open_pipes:
                self._silent.set()

    def process_exited(self) -> None:
        """It has ended; its output may still come."""
        self._exited.set()

    def tell(self, line: bytes) -> None:
        """Write to its standard input, which stays open; of a process that has ended, nothing."""
        if not self._stdin.is_closing():
            self._stdin.write(line)

    @property
    def _stdin(self) -> asyncio.WriteTransport:
        return cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))

    def _signal(self, number: signal.Signals, *, group: bool = False) -> None:
        if self._transport.get_returncode() is not None:
            return  # its id may belong to something else by now
        try:
            if group:
                os.killpg(self._transport.get_pid(), number)  # it leads a session, and so a group, of its own
            else:
                self._transport.send_signal(number)
        except ProcessLookupError:
            pass

    async def _watch(self) -> None:
        """Wait for the end, the output's included, and say why it came."""
        await self._exited.wait()
        try:
            async with asyncio.timeout(_PIPE_GRACE_S):
                await self._silent.wait()
        except TimeoutError:
            self._note("something that it started still holds its output open")
        status = self._transport.get_returncode()
        kills = (memory_kills() or 0) - self._kills_before
        reason = exit_reason(status or 0, self.log.last("stderr"), memory_kills=kills)
        self._exit_reason = "was released" if self._stopping else reason
        self._note(f"it {self._exit_reason}")
        self._transport.close()
        self.log.end()
        self._ended.set()

    def _take(self, fd: int, lines: Sequence[str]) -> None:
        for line in lines:
            endpoint = parse_announcement(line) if fd == 1 else None
            if endpoint is not None:
                self.endpoint = endpoint
            else:
                self.log.append(LogLine(_STREAMS[fd], line, time.time()))

    def _note(self, text: str) -> None:
        self.log.append(LogLine("provider", text, time.time()))


async def start_node(
    command: Sequence[str],
    environment: Mapping[str, str],
    boot_line: bytes,
    key: LaunchKey,
    offer: str,
    log_lines: int,
) -> ProcessNode:
    """Start a process and give it its boot line.

    It gets a session of its own, so that Ctrl-C in a terminal reaches us alone and we decide in which order nodes end.

    Raises:
        OSError: The command can't be run.
    """
    _, node = await asyncio.get_running_loop().subprocess_exec(
        lambda: ProcessNode(key, offer, log_lines),
        *command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,
    )
    node.tell(boot_line)
    return node
