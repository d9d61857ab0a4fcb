"""The actor: it starts a worker on its node of the cluster, keeps what that writes, and ends it.

The worker is a process of its own, ``python -m myelin worker --boot-stdin``, a child of the actor's, and not a thread
of it: a crash in a kernel or a kill for want of memory then leaves somebody who can tell of it; the worker's event
loop, threads and signals are not Ray's; and it is the same program that every other provider starts.

The worker's standard input stays open as long as the actor lives, and the kernel ends it with the actor. An actor that
nobody cares for any more (its orchestrator is dead, and its worker has noticed and ended) gives its place on the
cluster back by itself.

All of it is plain Python, which Ray needn't be installed for, but for leaving the cluster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from myelin.plugin import CORES_VARIABLE, PARENT_VARIABLE, boot_line, parse_announcement, read_boot_line
from myelin_provider_ray.environment import node_environment

MAX_LINE_BYTES = 16_384
_VMSTAT = Path("/proc/vmstat")
_DRAIN_S = 1.0
_NOTED_S = 10.0
"""How long the end of a worker may take to be noted, its last output included; it is noted in a moment."""


class WorkerHost:
    """One worker. Its methods return at once, but for :meth:`stop`.

    Args:
        command: What to run; empty is the worker, with this very interpreter.
        cores: How many threads it computes with.
        log_lines: How many lines of its output are kept.
        boot_s: How long it waits for its boot line before it gives up its place, whoever looks meanwhile.
        linger_s: How long an ended worker's place is kept when nobody looks.
        leave: Gives the place up; None does what Ray needs.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        cores: int = 1,
        log_lines: int = 2000,
        boot_s: float = 120.0,
        linger_s: float = 600.0,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self._command = tuple(command) or (sys.executable, "-m", "myelin", "worker", "--boot-stdin")
        self._cores = cores
        self._process: subprocess.Popen[bytes] | None = None
        self._failure = ""
        self._kept: deque[tuple[str, str, float]] = deque(maxlen=log_lines)
        self._written = 0
        self._endpoint: tuple[str, ...] = ()
        self._kills_before = 0
        self._kills = 0
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._seen = time.monotonic()
        self._since = time.time()
        self._node, self._leave = ("", leave) if leave is not None else _place()
        threading.Thread(target=self._watch_patience, args=(boot_s, linger_s), daemon=True).start()

    def boot(self, line: bytes, bind: str = "") -> None:
        """Start the worker and give it its boot line. Once: another call does nothing.

        Args:
            line: A boot line, whose address to listen on is replaced.
            bind: The address to listen on, with any free port; empty is that of this node in the cluster.
        """
        with self._lock:
            if self._process is not None or self._failure:
                return
            host = bind or _node_address()
            spec = replace(read_boot_line(line), bind=f"[{host}]:0" if ":" in host else f"{host}:0")
            additions = {PARENT_VARIABLE: str(os.getpid()), CORES_VARIABLE: str(self._cores)}
            self._kills_before = memory_kills()
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=node_environment(os.environ, additions),
                    start_new_session=True,
                )
            except OSError as error:
                self._failure = f"{self._command[0]}: {error.strerror or error}"
                self._ended.set()
                return
            process = self._process
            assert process.stdin is not None
            with suppress(OSError):  # it has ended already: that is found out below
                process.stdin.write(boot_line(spec))
                process.stdin.flush()
        threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def look(self) -> dict[str, Any]:
        """How the worker is.

        Returns:
            ``booted``; ``endpoint``, a list that is empty before it has announced itself; ``ended``; and of one that
            has: ``status`` (None where it couldn't be started, which ``failure`` explains), ``last``, the last line on
            its standard error, and ``kills``, how often this machine has killed for memory meanwhile.
        """
        self._seen = time.monotonic()
        with self._lock:
            process, ended = self._process, self._ended.is_set()
            last = next((text for stream, text, _ in reversed(self._kept) if stream == "stderr" and text.strip()), "")
            return {
                "booted": process is not None or bool(self._failure),
                "endpoint": list(self._endpoint),
                "ended": ended,
                "status": process.returncode if ended and process is not None else None,
                "failure": self._failure,
                "last": last,
                "kills": self._kills,
            }

    def lines(self, after: int) -> dict[str, Any]:
        """What it has written from line ``after`` on, as far as it is kept.

        Returns:
            ``node``, the id of this node, and ``since``, when the actor began; ``lines`` as ``[stream, text, time]``;
            ``first``, the number of the first of them; ``next``; ``ended``, which says that there won't be more.
        """
        self._seen = time.monotonic()
        with self._lock:
            ended = self._ended.is_set()
            first = max(after, self._written - len(self._kept))
            kept = list(self._kept)[len(self._kept) - (self._written - first) :] if first < self._written else []
            lines = [list(line) for line in kept]
            place = {"node": self._node, "since": self._since}
            return place | {"lines": lines, "first": first, "next": self._written, "ended": ended}

    def stop(self, grace_s: float) -> None:
        """Ask the worker to end, kill it and all that it started after ``grace_s`` seconds; returns once it is gone."""
        with self._lock:
            process = self._process
            self._failure = self._failure or "it was stopped before it was started"
        if process is None:
            self._ended.set()  # should whoever stopped it not come to remove it, the next one must not wait for it
            return
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._ended.wait(2 * _DRAIN_S + _NOTED_S)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Read all that the worker writes, and wait for its end."""
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=self._read, args=(name, pipe), daemon=True)
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        for reader in readers:
            reader.start()
        process.wait()
        for reader in readers:
            reader.join(_DRAIN_S)  # something that it started may hold its output open
        with self._lock:
            self._kills = memory_kills() - self._kills_before
            self._seen = time.monotonic()
            self._ended.set()

    def _read(self, stream: str, pipe: IO[bytes]) -> None:
        while raw := pipe.readline(MAX_LINE_BYTES):
            text = raw.decode(errors="replace").rstrip("\r\n")
            endpoint = parse_announcement(text) if stream == "stdout" else None
            with self._lock:
                if endpoint is not None:
                    self._endpoint = endpoint.candidates
                else:
                    self._kept.append((stream, text, time.time()))
                    self._written += 1
        pipe.close()

    def _watch_patience(self, boot_s: float, linger_s: float) -> None:
        began = time.monotonic()
        pause = max(0.05, min(1.0, boot_s / 10, linger_s / 10))
        while True:
            time.sleep(pause)
            now = time.monotonic()
            waits = self._process is None and not self._ended.is_set()
            if now - began > boot_s if waits else self._ended.is_set() and now - self._seen > linger_s:
                self._leave()
                return


def memory_kills(vmstat: Path = _VMSTAT) -> int:
    """How often this machine's kernel has killed a process for memory since it started; 0 where it doesn't tell."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _place() -> tuple[str, Callable[[], None]]:
    """The id of this node, and what removes the actor's own placement group, and the actor with it. The group must be
    asked for here: Ray knows it on the actor's main thread alone."""
    import ray

    group = ray.util.get_current_placement_group()

    def leave() -> None:
        if group is not None:
            ray.util.remove_placement_group(group)
        time.sleep(5)
        os._exit(0)

    return ray.get_runtime_context().get_node_id(), leave
