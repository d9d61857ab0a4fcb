"""A worker process from its first instruction to its exit code.

Standard input is the parent's line to us: its first line says who we are, and its end that the parent is gone. Standard
output carries the announcement and nothing else; whatever a library prints goes to standard error, where the log is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from myelin.cluster.boot import MAX_BOOT_LINE_BYTES, announcement, die_with_parent, read_boot_line
from myelin.errors import MyelinError, WireError

if TYPE_CHECKING:
    from myelin.cluster.provider import BootSpec
    from myelin.transport.contract import Endpoint
    from myelin.worker.agent import NodePlugins
    from myelin.worker.control import Patience
    from myelin.worker.logs import WorkerLog

PARENT_GRACE_SECONDS = 5.0
"""How long a worker whose parent is gone may take to end in good order."""

FIRST_DIAL_VARIABLE = "MYELIN_NODE_FIRST_DIAL_S"
DEAD_MAN_VARIABLE = "MYELIN_NODE_DEAD_MAN_S"
"""Variables of a boot line's environment: how long a node waits to be dialled, and how long it lives without its
control stream (both in seconds, see :class:`~myelin.worker.control.Patience`)."""


async def run_worker(
    boot: BootSpec,
    registry: NodePlugins,
    *,
    on_listening: Callable[[Endpoint], None],
    parent_gone: asyncio.Event,
    stop_asked: asyncio.Event | None = None,
    log: WorkerLog | None = None,
) -> int:
    """Be the node that ``boot`` describes, until it is told to stop or has to.

    Args:
        boot: Who it is; variables of its environment count before the process's own.
        registry: Where transports, engines and sources come from.
        on_listening: Told where it listens, once it does.
        parent_gone: Set when the parent is gone; the node ends with exit code 1.
        stop_asked: Set when the node should end in good order, with exit code 0.
        log: Where it says what it does; standard error if None.

    Returns:
        The exit code: 0 where it was told to stop, otherwise 1.

    Raises:
        MyelinError: It could not begin: the address is in use, or a plugin can't be used.
    """
    from myelin.worker.agent import Agent
    from myelin.worker.telemetry import node_telemetry

    environment = {**os.environ, **{name: value.get_secret_value() for name, value in boot.environment.items()}}
    telemetry = node_telemetry(boot, environment)
    agent = Agent(boot, registry, log=log, telemetry=telemetry, patience=patience_from(environment))

    async def stop_when(event: asyncio.Event, reason: str, exit_code: int) -> None:
        await event.wait()
        agent.stop(reason, exit_code=exit_code)

    watches = [asyncio.create_task(stop_when(parent_gone, "the parent is gone", 1))]
    if stop_asked is not None:
        watches.append(asyncio.create_task(stop_when(stop_asked, "a signal asked for it", 0)))
    try:
        return await agent.run(on_listening)
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        if telemetry is not None:
            await asyncio.to_thread(telemetry.close)


def main_from_stdin(registry_factory: Callable[[], NodePlugins]) -> int:
    """Be the worker that the boot line on standard input describes.

    Args:
        registry_factory: Makes the plugin registry, once the boot line's environment holds.

    Returns:
        The process's exit code: 0 where it was told to stop, otherwise 1.
    """
    die_with_parent()
    line = _read_line(sys.stdin.fileno())
    parent = ParentWatch(sys.stdin.fileno())
    parent.start()
    try:
        boot = read_boot_line(line)
    except WireError as error:
        sys.stderr.write(f"Error: {error.message}\nHint: {error.hint}\n")
        return 1
    os.environ.update({name: value.get_secret_value() for name, value in boot.environment.items()})
    return main_with_boot(boot, registry_factory, parent=parent)


def main_with_boot(
    boot: BootSpec, registry_factory: Callable[[], NodePlugins], *, parent: ParentWatch | None = None
) -> int:
    """Be the worker that ``boot`` describes: also for one that is started by hand, whose parent nobody watches.

    SIGTERM and SIGINT stop it in good order.

    Returns:
        The process's exit code.
    """
    import logging

    from myelin.worker.logs import LibraryLogs, WorkerLog

    output = _take_output()
    log = WorkerLog({"node": str(boot.node), "attempt": int(boot.attempt)}, os.environ)
    handler = LibraryLogs(log)
    logging.getLogger().addHandler(handler)

    def announce(endpoint: Endpoint) -> None:
        # Whoever started us by hand may not read it.
        with contextlib.suppress(BrokenPipeError):
            os.write(output, f"{announcement(endpoint)}\n".encode())

    async def live() -> int:
        gone, asked = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        if parent is not None:
            parent.tell(lambda: loop.call_soon_threadsafe(gone.set))
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(number, asked.set)
            except NotImplementedError:  # Windows: no signals on its event loops
                signal.signal(number, lambda *_: loop.call_soon_threadsafe(asked.set))
        return await run_worker(
            boot, registry_factory(), on_listening=announce, parent_gone=gone, stop_asked=asked, log=log
        )

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(live())
    except MyelinError as error:
        log.error("failed", reason=error.reason, message=error.message, hint=error.hint)
        return 1
    except Exception as error:
        log.error("failed", error=error, reason="internal", message=f"{type(error).__name__}: {error}")
        return 1
    finally:
        logging.getLogger().removeHandler(handler)
        os.close(output)


class ParentWatch(threading.Thread):
    """Notices the end of standard input, and sees to it that the process ends then.

    A daemon thread that is blocked in ``read`` from the beginning, so that it works whatever the event loop is doing,
    and before there is one. It reads the descriptor itself: a buffered reader's lock, held by a daemon thread, would
    make the interpreter's exit fail.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        grace_s: float = PARENT_GRACE_SECONDS,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        super().__init__(name="myelin-parent-watch", daemon=True)
        self._descriptor = descriptor
        self._grace_s = grace_s
        self._leave = leave
        self._lock = threading.Lock()
        self._gone = False
        self._on_gone: Callable[[], object] | None = None

    def tell(self, on_gone: Callable[[], object]) -> None:
        """Call ``on_gone`` from the thread when the parent is gone, or at once where it is already."""
        with self._lock:
            self._on_gone = on_gone
            gone = self._gone
        if gone:
            on_gone()

    def run(self) -> None:
        """Wait for the end of input; then ask, wait, and leave."""
        try:
            while os.read(self._descriptor, 4096):
                pass  # nothing more is due on this channel
        except OSError:
            pass
        with self._lock:
            self._gone = True
            on_gone = self._on_gone
        if on_gone is not None:
            # A loop that is closed already is one that is ending.
            with contextlib.suppress(RuntimeError):
                on_gone()
        time.sleep(self._grace_s)
        self._leave(1)


def patience_from(environment: Mapping[str, str]) -> Patience:
    """How long a node stays up with nobody to serve, by its boot line's variables; anything odd leaves the default."""
    from myelin.worker.control import Patience

    default = Patience()

    def seconds(name: str, otherwise: float) -> float:
        try:
            value = float(environment.get(name, ""))
        except ValueError:
            return otherwise
        return value if 0.0 < value < float("inf") else otherwise

    return Patience(
        first_dial_s=seconds(FIRST_DIAL_VARIABLE, default.first_dial_s),
        dead_man_s=seconds(DEAD_MAN_VARIABLE, default.dead_man_s),
    )


def _read_line(descriptor: int) -> bytes:
    """The first line that comes, its newline included; what there is of it where input ends, or is too long."""
    line = bytearray()
    while b"\n" not in line and len(line) <= MAX_BOOT_LINE_BYTES:
        piece = os.read(descriptor, 65_536)
        if not piece:
            break
        line += piece
    return bytes(line[: line.index(b"\n") + 1]) if b"\n" in line else bytes(line)


def _take_output() -> int:
    """A descriptor of our own for standard output; whatever others write to it goes to standard error from now on."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    return output


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
