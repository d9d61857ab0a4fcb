"""The provider: nodes as containers of one Docker daemon.

**Restart.** Containers outlive the provider object and its process; their labels say whose they are. A new object for
the same run lists them and may go on with them (:meth:`DockerProvider.leases`). A node whose orchestrator stays away
ends by itself, and its container stays, stopped, until it is released: it tells why it ended.

**Secrets.** The boot line goes through the container's attached standard input. What anybody on the daemon can see of a
container (its environment, arguments, labels, log) holds none.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from myelin.plugin import (
    BootSpec,
    Endpoint,
    LaunchKey,
    Lease,
    LeaseId,
    LeaseState,
    LogLine,
    Need,
    Offer,
    ProviderContext,
    ProviderError,
    boot_line,
)
from myelin_provider_docker.containers import boot_inside, node_cores, plan_container
from myelin_provider_docker.daemon import Daemon, Stop, reaches_containers
from myelin_provider_docker.labels import OF_ANY_RUN, key_of, of_run
from myelin_provider_docker.section import DockerSection
from myelin_provider_docker.standing import endpoint_of, exit_reason, is_over, last_told, lease_id, lease_of

T = TypeVar("T")

OFFER = "docker"
"""The id of the only offer: the daemon's machine."""
THREADS = 16
LATE_S = 2.0
"""How long after it answers again a daemon may still carry out what it was asked before."""
LOST_S = 60.0
_WITHOUT_ANSWER = ("daemon-timeout", "daemon-unreachable")
"""Reasons after which it isn't known what the daemon has done, or will yet do."""


class DockerProvider:
    """See :class:`myelin.plugin.Provider`.

    Args:
        context: The run, its model's files, and the section ``docker``.
        command: What to run in place of ``python -m myelin worker --boot-stdin`` (tests).
        environment: Where ``DOCKER_HOST`` is looked up.
    """

    def __init__(
        self, context: ProviderContext, *, command: Sequence[str] = (), environment: Mapping[str, str] = os.environ
    ) -> None:
        section = context.section
        self._section = section if isinstance(section, DockerSection) else DockerSection.model_validate({})
        self._context = context
        self._command = tuple(command)
        self._daemon = Daemon(self._section, environment)
        self._threads: ThreadPoolExecutor | None = None
        self._machine: dict[str, Any] | None = None
        self._starting: dict[LaunchKey, _Start] = {}
        self._releasing: dict[LeaseId, asyncio.Task[None]] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._reasons: dict[str, str] = {}
        self._doubtful: dict[LaunchKey, asyncio.Task[None]] = {}
        self._followers: set[Stop] = set()

    @property
    def found_by(self) -> Mapping[str, str]:
        """The daemon: another shell may name another one."""
        return {"host": self._daemon.host}

    async def offers(self, need: Need) -> Sequence[Offer]:
        """The daemon's machine, unless it was excluded or lacks the memory."""
        machine = await self._information()
        total, cores = int(machine.get("MemTotal") or 0), int(machine.get("NCPU") or 1)
        memory = min(self._section.memory_limit or total, total)
        if OFFER in need.exclude or need.memory_bytes > memory:
            return ()
        name = str(machine.get("Name") or self._daemon.host)
        limit = f", {memory / 1e9:.1f} GB for each node" if memory < total else ""
        description = f"{name}: {cores} core{'s' if cores > 1 else ''}, {total / 1e9:.1f} GB{limit}"
        details = {
            "daemon": self._daemon.host,
            "version": str(machine.get("ServerVersion", "")),
            "image": self._section.image_name,
            "gpus": self._section.gpus or "none",
            "gpu_runtime": "nvidia" if "nvidia" in (machine.get("Runtimes") or {}) else "none",
        }
        return (Offer(OFFER, "docker", description, memory, details=details),)

    async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
        """See :meth:`myelin.plugin.Provider.launch`. A node that has ended since is returned as such.

        Raises:
            ProviderError: It could not be started. Reasons: ``daemon-unreachable``, ``daemon-permission``,
                ``daemon-timeout``, ``image-missing``, ``no-gpu``, ``mount-missing``, ``port-taken``,
                ``remote-loopback``, ``refused``.
        """
        while (start := self._starting.get(key)) is not None and start.ending is not None:
            await asyncio.wait({start.ending})
        if start is None:
            start = self._starting[key] = _Start(asyncio.create_task(self._start(offer, boot, key), name=f"run {key}"))
        start.waiting += 1
        try:
            # Shielded: a thread can't be interrupted, and what it is about to create could be lost sight of.
            return (await asyncio.shield(start.task))[0]
        except asyncio.CancelledError:
            if start.waiting == 1:
                start.ending = asyncio.create_task(self._abandon(start, key), name=f"abandon {key}")
                await asyncio.shield(start.ending)
            raise
        finally:
            start.waiting -= 1
            if not start.waiting and start.ending is None:
                self._starting.pop(key, None)

    async def leases(self) -> Sequence[Lease]:
        """See :meth:`myelin.plugin.Provider.leases`: the containers with this run's label."""
        return await self._in_thread(lambda: self._leases(of_run(self._context.run)))

    async def all_leases(self) -> Sequence[Lease]:
        """The leases of every run that this daemon has containers of; :meth:`release` takes any of them.

        Raises:
            ProviderError: The listing can't be read.
        """
        return await self._in_thread(lambda: self._leases(OF_ANY_RUN))

    async def release(self, lease: LeaseId) -> None:
        """See :meth:`myelin.plugin.Provider.release`. Goes on by itself where it is cancelled.

        Containers that aren't Myelin's are never touched.
        """
        if lease not in self._releasing:
            task = self._releasing[lease] = asyncio.create_task(self._release(lease), name=f"release {lease}")
            task.add_done_callback(lambda done: self._released(lease, done))
        await asyncio.shield(self._releasing[lease])

    async def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        """See :meth:`myelin.plugin.Provider.logs`. Lines are cut at 16 KiB, where the daemon does."""
        found = await self._in_thread(lambda: self._ours(lease))
        if not found:
            return
        loop, stop = asyncio.get_running_loop(), Stop()
        lines: asyncio.Queue[LogLine | ProviderError | None] = asyncio.Queue()

        def tell(line: LogLine | ProviderError | None) -> None:
            with suppress(RuntimeError):  # the loop has gone, and with it whoever read
                loop.call_soon_threadsafe(lines.put_nowait, line)

        def follow() -> None:
            end: ProviderError | None = None
            try:
                self._daemon.follow(found, tell, stop)
            except ProviderError as error:
                end = error
            tell(end)

        # A thread of its own: it blocks for as long as the node lives, and must not keep the process from ending.
        threading.Thread(target=follow, name=f"myelin-docker-log-{lease}", daemon=True).start()
        self._followers.add(stop)
        try:
            while (line := await lines.get()) is not None:
                if isinstance(line, ProviderError):
                    raise line
                yield line
        finally:
            self._followers.discard(stop)
            stop.tell()

    async def close(self) -> None:
        """Wait for what is under way, and free connections and threads. Containers go on."""
        endings = [start.ending for start in self._starting.values() if start.ending is not None]
        doubts = tuple(self._doubtful.values())
        await asyncio.gather(*self._releasing.values(), *endings, *doubts, return_exceptions=True)
        for stop in tuple(self._followers):
            stop.tell()
        await asyncio.to_thread(self._daemon.close)
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="myelin-docker")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _information(self) -> dict[str, Any]:
        if self._machine is None:
            self._machine = await self._in_thread(self._daemon.information)
        return self._machine

    async def _start(self, offer: Offer, boot: BootSpec, key: LaunchKey) -> tuple[Lease, bool]:
        """The lease, and whether its container is new."""
        section, machine = self._section, await self._information()
        if not self._daemon.local and section.network != "host" and section.publish_address.startswith("127."):
            raise ProviderError(
                f"nodes of the Docker daemon at {self._daemon.host} could not be reached from here",
                "--set docker.publish_address=ADDRESS of its machine, in a network that you trust",
                reason="remote-loopback",
            )
        plan = plan_container(
            key,
            offer.id,
            section,
            files=self._context.model_files,
            cores=node_cores(int(machine.get("NCPU") or 1), self._context.nodes, section.cpus),
            command=self._command,
        )
        line = boot_line(boot_inside(boot, section))
        if doubt := self._doubtful.pop(key, None):
            await asyncio.wait({doubt})
        try:
            container, made = await self._in_thread(lambda: self._daemon.start(plan, line))
        except ProviderError as error:
            if error.reason in _WITHOUT_ANSWER:
                self._doubtful[key] = asyncio.create_task(self._settle(key, plan.name), name=f"settle {key}")
            raise
        lease = Lease(lease_id(container), key, LeaseState.STARTING, offer.id)
        if made:
            return lease, True
        found = await self._in_thread(lambda: self._leases({"id": [container]}))
        return (found[0] if found else lease), False

    async def _settle(self, key: LaunchKey, name: str) -> None:
        """Remove what the daemon makes late of a launch that has failed without an answer.

        A daemon that hangs may still carry out what it was asked, once it goes on; the container then has no input, and
        is never started. We look for it until the daemon has answered for a while, or is taken for lost.
        """
        loop = asyncio.get_running_loop()
        given_up, answered_since = loop.time() + LOST_S, 0.0
        while key in self._doubtful and loop.time() < given_up:
            try:
                if await self._in_thread(lambda: self._daemon.remove_unstarted(name)):
                    break
                answered_since = answered_since or loop.time()
                if loop.time() - answered_since > LATE_S:
                    break
            except ProviderError:
                answered_since = 0.0
            await asyncio.sleep(0.2)
        self._doubtful.pop(key, None)

    async def _abandon(self, start: _Start, key: LaunchKey) -> None:
        """End a start that nobody waits for any more; a node that an earlier one has started stays."""
        try:
            with suppress(ProviderError):
                lease, made = await start.task
                if made:
                    await self._in_thread(lambda: self._daemon.remove(lease.id))
        finally:
            self._starting.pop(key, None)

    def _leases(self, filters: Mapping[str, list[str]]) -> tuple[Lease, ...]:
        """The leases of the containers that the filters let through. In a thread."""
        leases = (self._lease(summary) for summary in self._daemon.listed(filters))
        return tuple(lease for lease in leases if lease is not None)

    def _lease(self, summary: Mapping[str, Any]) -> Lease | None:
        container = str(summary["Id"])
        key = key_of(summary.get("Labels"))
        if key is None:
            return None
        if key in self._doubtful and summary.get("State") == "created":
            return None  # the late fruit of a launch that has failed; it is being removed
        if is_over(summary):
            return lease_of(summary, None, self._why(container, summary))
        if container not in self._endpoints and summary.get("State") == "running":
            announced = self._daemon.announced(container)
            endpoint = announced and endpoint_of(
                summary,
                announced,
                daemon_host=self._daemon.reached_at,
                inside_first=reaches_containers(self._daemon, self._machine or self._daemon.information()),
            )
            if endpoint is not None:
                self._endpoints[container] = endpoint
        return lease_of(summary, self._endpoints.get(container), "")

    def _why(self, container: str, summary: Mapping[str, Any]) -> str:
        """Why a container ended. It doesn't change, so that it is found out once."""
        if container not in self._reasons:
            found = self._daemon.inspected(container)
            if found is None or found["State"]["Status"] == "removing":
                return "is being removed"
            limit = int(found.get("HostConfig", {}).get("Memory") or 0)
            last = last_told(self._daemon.last_errors(container))
            self._reasons[container] = exit_reason(found["State"], limit, last)
        return self._reasons[container]

    def _ours(self, lease: LeaseId) -> str:
        """The id of a lease's container; empty where there is none, or it isn't Myelin's. In a thread."""
        found = self._daemon.inspected(lease)
        if found is None or lease_id(found["Id"]) != lease or key_of(found["Config"].get("Labels")) is None:
            return ""
        return str(found["Id"])

    async def _release(self, lease: LeaseId) -> None:
        container = await self._in_thread(lambda: self._ours(lease))
        if container:
            await self._in_thread(lambda: self._daemon.remove(container, grace_s=self._section.grace_s))
            self._endpoints.pop(container, None)
            self._reasons.pop(container, None)

    def _released(self, lease: LeaseId, task: asyncio.Task[None]) -> None:
        self._releasing.pop(lease, None)
        if not task.cancelled():
            task.exception()  # whoever waits is told; where nobody does, the next listing shows what is left


class _Start:
    """A launch that is under way, how many calls wait for it, and its end where they have all left."""

    def __init__(self, task: asyncio.Task[tuple[Lease, bool]]) -> None:
        self.task = task
        self.waiting = 0
        self.ending: asyncio.Task[None] | None = None
