"""Following the nodes' leases, output and control streams: who has announced itself, and who is lost, with the best
reason that there is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from myelin.cluster.executor import Executor
from myelin.cluster.exits import exit_error
from myelin.cluster.intents import IntentState
from myelin.cluster.node_logs import NodeLogFile
from myelin.cluster.provider import Lease, LeaseState
from myelin.errors import MyelinError, NodeError
from myelin.orchestrator.background import Background, fresh
from myelin.orchestrator.events import NodeLog, Observer
from myelin.orchestrator.nodes import NodeAttempt
from myelin.values import Epoch, LeaseId

DRAIN_S = 0.3
"""How long a node that has exited gets for its last lines to arrive."""
EXIT_NEWS_S = 0.2
"""How long the news of an exit may lag behind the break of its streams."""


class Loss:
    """Whether the run has lost something that it can't do without. The first reason counts."""

    def __init__(self) -> None:
        self._error: MyelinError | None = None
        self._happened = asyncio.Event()

    @property
    def error(self) -> MyelinError | None:
        """The reason, once there is one."""
        return self._error

    def report(self, error: MyelinError) -> None:
        """Something is lost."""
        if self._error is None:
            self._error = error
            self._happened.set()

    async def wait(self) -> MyelinError:
        """Return once something is lost."""
        await self._happened.wait()
        assert self._error is not None
        return self._error


class NodeWatch:
    """Follows the leases and the output of all attempts and says which are lost.

    Args:
        executor: Lists leases, and gives their output.
        background: Owns the tasks.
        observer: Is shown the output.
        log_dir: Where the output is kept.
        redact: Takes secrets out of a line, before anybody sees it.
    """

    def __init__(
        self,
        executor: Executor,
        background: Background,
        observer: Observer,
        log_dir: Path | None,
        redact: Callable[[str], str],
    ) -> None:
        self._executor = executor
        self._background = background
        self._observer = observer
        self._log_dir = log_dir
        self._redact = redact
        self._attempts: dict[LeaseId, NodeAttempt] = {}
        self._logs: dict[LeaseId, asyncio.Task[None]] = {}
        self._reported: set[LeaseId] = set()
        self._polling: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Poll the leases until :meth:`end`. Twice is fine."""
        if self._polling is None or self._polling.done():
            self._polling = self._background.start(self._executor.watch(self._take), "watch leases")

    def end(self) -> None:
        """The control streams tell from now on."""
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None

    def launched(self, attempt: NodeAttempt) -> None:
        """An attempt has a lease: follow its output."""
        lease = attempt.lease
        self._attempts[lease.id] = attempt
        self._logs[lease.id] = self._background.start(self._follow(attempt), f"output of {lease.key}")
        self._note(attempt, lease)

    def dropped(self, attempt: NodeAttempt) -> None:
        """Another one takes its place: what becomes of it is nobody's loss."""
        self._attempts.pop(attempt.lease.id, None)

    def _take(self, leases: Sequence[Lease]) -> None:
        """A listing came. What it doesn't show any more may have been given back already, once it had ended."""
        listed = {lease.id: lease for lease in leases}
        for lease_id, attempt in list(self._attempts.items()):
            lease = listed.get(lease_id) or self._given_back(attempt)
            if lease is not None:
                self._note(attempt, lease)

    def _given_back(self, attempt: NodeAttempt) -> Lease | None:
        """The end of an attempt as the executor has noted it; None where it hasn't."""
        key = attempt.lease.key
        for intent in self._executor.intents:
            if (intent.node, intent.attempt) == (key.node, key.attempt):
                if intent.state in (IntentState.RELEASING, IntentState.RELEASED):
                    return replace(attempt.lease, state=LeaseState.EXITED, exit_reason=intent.failure)
                return None
        return None

    def _note(self, attempt: NodeAttempt, lease: Lease) -> None:
        attempt.lease = lease
        if lease.endpoint is not None:
            attempt.announced.set()
        if lease.state is LeaseState.EXITED and lease.id not in self._reported:
            self._reported.add(lease.id)
            self._background.start(self._report_exit(attempt, lease), f"exit of {lease.key}")

    async def _report_exit(self, attempt: NodeAttempt, lease: Lease) -> None:
        following = self._logs.get(lease.id)
        if following is not None:  # let its last lines arrive
            await asyncio.wait({following}, timeout=DRAIN_S)
        doing = "while it served" if attempt.loaded else "while it started"
        attempt.lose(exit_error(lease, tuple(attempt.last_lines), doing))

    def control_lost(self, attempt: NodeAttempt, error: NodeError) -> None:
        """A control stream ended unasked, or the node told that it can't go on: find out more, then report."""
        self._background.start(self._report_loss(attempt, error), f"loss of {attempt.lease.key}")

    async def _report_loss(self, attempt: NodeAttempt, error: NodeError) -> None:
        """An exit says more than a broken stream does; where the provider has none to tell soon, the stream's error
        counts."""
        control = attempt.control
        if error.reason == "node-lost":
            loop = asyncio.get_running_loop()
            until = loop.time() + EXIT_NEWS_S
            while (left := until - loop.time()) > 0:
                lease = await self._executor.lease(attempt.lease.id, timeout_s=left) or self._given_back(attempt)
                if lease is not None and lease.state is LeaseState.EXITED:
                    await self._report_exit(attempt, lease)
                    return
                await asyncio.sleep(EXIT_NEWS_S / 10)
        if attempt.control is control:  # nobody has found it again meanwhile
            attempt.lose(fresh(error))

    async def _follow(self, attempt: NodeAttempt) -> None:
        """Show, keep and remember what a node writes. That it can't be read is no reason to end anything."""
        lease = attempt.lease
        with suppress(MyelinError, OSError):
            file = self._log_file(attempt)
            try:
                async for line in self._executor.logs(lease.id):
                    text = self._redact(line.text)
                    if line.stream != "provider":
                        attempt.last_lines.append(text)
                    self._observer.log(NodeLog(lease.key.node, line.stream, text))
                    if file is not None:
                        file.write(f"{line.time:.3f} {line.stream} {text}\n")
                        file.flush()
            finally:
                if file is not None:
                    file.close()

    def _log_file(self, attempt: NodeAttempt) -> NodeLogFile | None:
        return NodeLogFile(self._log_dir, attempt.lease.key) if self._log_dir is not None else None


class Trouble:
    """What is wrong with the epoch that is open, or being opened. News of another epoch are no news."""

    def __init__(self) -> None:
        self.epoch = Epoch(0)
        self.error: MyelinError | None = None
        self._happened = asyncio.Event()

    def begin(self, epoch: Epoch) -> None:
        """A new epoch begins, and nothing is wrong with it."""
        self.epoch = epoch
        self.error = None
        self._happened = asyncio.Event()

    def report(self, error: MyelinError, epoch: Epoch | None = None) -> None:
        """Something is wrong: with one epoch or, a node being lost, with whichever there is. The first one counts."""
        if self.error is None and epoch in (None, self.epoch):
            self.error = error
            self._happened.set()

    def of(self, epoch: Epoch) -> Callable[[MyelinError], None]:
        """:meth:`report` for one epoch."""
        return lambda error: self.report(error, epoch)

    async def wait(self) -> MyelinError:
        """Return once something is wrong."""
        await self._happened.wait()
        assert self.error is not None
        return self.error
