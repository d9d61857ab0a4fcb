"""One node: a rented machine on its way to a worker that listens, the worker's output, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import asyncssh

from myelin.plugin import (
    BootSpec,
    Endpoint,
    LaunchKey,
    Lease,
    LeaseId,
    LeaseState,
    LogBuffer,
    LogLine,
    ProviderError,
    boot_line,
    parse_announcement,
)
from myelin_provider_vastai.api import Api
from myelin_provider_vastai.instances import Instance, Stand, Verdict, judge, mapped_address, ssh_addresses
from myelin_provider_vastai.inventory import Inventory
from myelin_provider_vastai.scripts import boot_command, setup_command
from myelin_provider_vastai.section import VastaiSection
from myelin_provider_vastai.ssh import HostKeyChanged, HostKeys, Identity, connect

STOP_GRACE_S = 3.0
"""How long a worker whose channel was closed may take; the machine goes after that whatever it does."""
SSH_RETRY_S = 2.0
DRAIN_S = 1.0
"""How long a node that has ended gets for its last lines to arrive."""


class NodeFailed(Exception):
    """It can't become a node. The reason is for people."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """What the nodes of one provider share."""

    api: Api
    inventory: Inventory
    identity: Identity
    host_keys: HostKeys
    section: VastaiSection
    version: str


class RentedNode:
    """A machine that is rented for a launch key. The event loop owns it.

    Args:
        instance: The machine's number.
        port: The port inside on which its worker shall listen.
        price: Dollars an hour, as offered.
        on_failed: Told when it fails by itself.
        on_forward: Told of a node that is reached by an SSH forward alone.
        on_back: Told when it is logged in to again, after its connection was lost.
    """

    def __init__(
        self,
        key: LaunchKey,
        offer: str,
        instance: int,
        port: int,
        price: float,
        boot: BootSpec,
        shop: Workshop,
        *,
        on_failed: Callable[[RentedNode], None],
        on_forward: Callable[[RentedNode, int], None],
        on_back: Callable[[RentedNode], None],
    ) -> None:
        self.key = key
        self.offer = offer
        self.instance = instance
        self.price = price
        self.log = LogBuffer()
        self.connection: asyncssh.SSHClientConnection | None = None
        self._port = port
        self._boot = boot
        self._shop = shop
        self._on_failed = on_failed
        self._on_forward = on_forward
        self._on_back = on_back
        self._forward_port = 0
        """Where a forward to it ends on our side; 0 where there is none."""
        self._heard = {"stdout": 0, "stderr": 0}
        """How many lines of its worker have come."""
        self._began = time.monotonic()
        self._endpoint: Endpoint | None = None
        self._exit_reason = ""
        self._stopping = False
        self._announced = asyncio.Event()
        self._life = asyncio.create_task(self._live(), name=f"node {key}")

    @property
    def id(self) -> LeaseId:
        """The machine's number."""
        return LeaseId(str(self.instance))

    @property
    def lease(self) -> Lease:
        """How it is now."""
        state = LeaseState.STARTING if self._endpoint is None else LeaseState.RUNNING
        if self._exit_reason:
            state = LeaseState.EXITED
        endpoint = self._endpoint
        return Lease(self.id, self.key, state, self.offer, endpoint, self.price, self._exit_reason)

    @property
    def elapsed_s(self) -> float:
        """Since it was rented."""
        return time.monotonic() - self._began

    def fail(self, reason: str) -> None:
        """It has ended by itself, or can't begin. The first reason counts."""
        if self._exit_reason or self._stopping:
            return
        self._exit_reason = reason
        self.note(reason)
        self._on_failed(self)
        if asyncio.current_task() is not self._life:
            self._life.cancel()

    def look(self, instance: Instance | None) -> None:
        """A listing came: see whether the machine still can be, or become, a node."""
        if self._exit_reason or self._stopping:
            return
        if instance is not None and instance.price > 0:
            self.price = instance.price
        verdict = self._judge(instance)
        if verdict.stand is Stand.FAILED:
            self.fail(verdict.reason)

    async def stop(self) -> None:
        """Let go of the machine, on which its worker goes on for a while. Whoever asked may destroy it afterwards."""
        self._stopping = True
        self._life.cancel()
        await asyncio.wait({self._life})
        self.log.end()

    def note(self, text: str) -> None:
        """Say something of our own in its log."""
        self.log.append(LogLine("provider", text, time.time()))

    def _judge(self, instance: Instance | None) -> Verdict:
        was_seen = self.instance in self._shop.inventory.seen
        timeout_s = self._shop.section.ready_timeout_s
        return judge(instance, elapsed_s=self.elapsed_s, timeout_s=timeout_s, was_seen=was_seen)

    async def _live(self) -> None:
        """From a rented machine to the end of its worker."""
        try:
            await self._run()
        except NodeFailed as error:
            self.fail(str(error))
        except ProviderError as error:
            self.fail(error.message)
        finally:
            try:
                await self._let_go()
            finally:
                self.log.end()

    async def _run(self) -> None:
        await self._running()
        await self._attach_key()
        line = boot_line(replace(self._boot, bind=f"{self._shop.section.node_bind}:{self._port}"))
        while True:
            self.connection = await self._log_in(await self._running())
            try:
                status = await self._session(self.connection, line)
            except (OSError, asyncssh.Error) as error:
                self.note(f"its SSH session broke ({type(error).__name__})")
                status = None
            if status is not None:
                raise NodeFailed(self._last_words(status))
            # The worker lives on without us; what ended may be the machine, though.
            await self._let_go()
            if reason := await self._machine_failure():
                raise NodeFailed(reason)
            self.note("the SSH connection to its machine was lost: logging in again")
            line = b"\n"  # whatever has begun is followed, and nothing begun again

    async def _session(self, connection: asyncssh.SSHClientConnection, line: bytes) -> int | None:
        """Start the worker, or find it again, and follow it to its end; its exit status, None where we were cut off."""
        section = self._shop.section
        setup = setup_command(section.setup, section.python, self._boot.engine, self._shop.version)
        seen = (self._heard["stdout"], self._heard["stderr"])
        command = boot_command(section.python, setup, section.dead_man_s, seen)
        process = await connection.create_process(command, encoding=None)
        # The secrets of the boot line go through the channel's standard input and nowhere else.
        process.stdin.write(line)
        if self._endpoint is not None:
            if self._forward_port:
                await self._forward(self._forward_port)
            self._on_back(self)
        readers = {
            asyncio.create_task(self._read(process.stdout, "stdout")),
            asyncio.create_task(self._read(process.stderr, "stderr")),
        }
        closed = asyncio.create_task(process.wait_closed())
        heard = asyncio.create_task(self._announced.wait())
        try:
            left_s = max(0.0, section.ready_timeout_s - self.elapsed_s)
            done, _ = await asyncio.wait({closed, heard}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise NodeFailed(f"its worker did not listen within {section.ready_timeout_s:g} s")
            if heard in done and self._endpoint is None:
                self._endpoint = await self._reachable()
                self.note(f"its worker is reached at {', '.join(self._endpoint.candidates)}")
            await closed
            await asyncio.wait(readers, timeout=DRAIN_S)
            return process.exit_status
        finally:
            for task in (*readers, closed, heard):
                task.cancel()
            await asyncio.gather(*readers, closed, heard, return_exceptions=True)

    async def _running(self) -> Instance:
        """The machine, once it runs; what a listing that can't be read has, we don't know, and wait."""
        told = ""
        while True:
            instance = None
            with suppress(ProviderError):
                listing = await self._shop.inventory.listing(max_age_s=self._shop.section.poll_s / 2)
                instance = listing.get(self.instance)
                verdict = self._judge(instance)
                if verdict.stand is Stand.FAILED:
                    raise NodeFailed(verdict.reason)
                if instance is not None and verdict.stand is Stand.RUNS and ssh_addresses(instance):
                    return instance
                if verdict.reason != told:
                    told = verdict.reason
                    self.note(told)
            if self.elapsed_s > self._shop.section.ready_timeout_s:
                raise NodeFailed(f"it did not run within {self._shop.section.ready_timeout_s:g} s")
            await asyncio.sleep(self._shop.section.poll_s)

    async def _attach_key(self) -> None:
        """Explicitly, since the account's keys don't always reach a machine; what matters is whether SSH lets us in."""
        try:
            await self._shop.api.attach_key(self.instance, self._shop.identity.public)
        except ProviderError as error:
            self.note(f"the SSH key could not be attached: {error.message}")

    async def _log_in(self, instance: Instance) -> asyncssh.SSHClientConnection:
        """An SSH connection, by the first address that answers; tried until the deadline, with addresses renewed."""
        section = self._shop.section
        deadline = time.monotonic() + section.ssh_timeout_s
        problem = "no address"
        told = ""
        current: Instance | None = instance
        while True:
            for address in ssh_addresses(current) if current is not None else ():
                try:
                    connection = await connect(
                        address, section.ssh_user, self._shop.identity, self._shop.host_keys, self.instance
                    )
                except HostKeyChanged:
                    raise
                except (OSError, asyncssh.Error) as error:
                    problem = f"{address[0]}:{address[1]}: {type(error).__name__}"
                else:
                    self.note(f"SSH answers at {address[0]}:{address[1]}")
                    return connection
            if problem != told:
                told = problem
                self.note(f"SSH does not let us in yet ({problem})")
            if time.monotonic() > deadline:
                raise NodeFailed(f"its machine runs, but SSH was not ready in {section.ssh_timeout_s:g} s ({problem})")
            await asyncio.sleep(min(SSH_RETRY_S, section.poll_s))
            with suppress(ProviderError):
                listing = await self._shop.inventory.listing(max_age_s=section.poll_s)
                current = listing.get(self.instance)
                verdict = self._judge(current)
                if verdict.stand is Stand.FAILED:
                    raise NodeFailed(verdict.reason)

    async def _read(self, stream: asyncssh.SSHReader[bytes], name: str) -> None:
        """Take lines until the stream ends; the announcement among them makes the node reachable."""
        while True:
            try:
                raw = await stream.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                raw = error.partial
                if not raw:
                    return
            except asyncio.LimitOverrunError as error:
                raw = await stream.readexactly(error.consumed)
            self._heard[name] += raw.endswith(b"\n")
            line = raw.decode(errors="replace").rstrip("\r\n")
            if name == "stdout" and parse_announcement(line) is not None:
                self._announced.set()
            else:
                self.log.append(LogLine(name, line, time.time()))

    async def _reachable(self) -> Endpoint:
        """Where the worker is reached: the public address and the mapped port, or else a forward through SSH."""
        instance = await self._running()
        mapped = mapped_address(instance, self._port)
        if mapped is not None:
            return Endpoint((f"{mapped[0]}:{mapped[1]}",))
        self._forward_port = await self._forward(0)
        self.note("no port of it is mapped to the outside: it is reached through SSH, which is slower")
        self._on_forward(self, self._forward_port)
        return Endpoint((f"127.0.0.1:{self._forward_port}",))

    async def _forward(self, port: int) -> int:
        """Have a port of ours carried to its worker's; 0 takes a free one, which is returned."""
        assert self.connection is not None
        bind = self._shop.section.node_bind
        inside = "127.0.0.1" if bind in ("0.0.0.0", "::") else bind
        listener = await self.connection.forward_local_port("127.0.0.1", port, inside, self._port)
        return listener.get_port()

    async def _machine_failure(self) -> str:
        """Why its machine can't be a node any more, where a listing says so; empty where it may still be."""
        with suppress(ProviderError, TimeoutError):
            async with asyncio.timeout(10):
                verdict = self._judge((await self._shop.inventory.listing()).get(self.instance))
                if verdict.stand is Stand.FAILED:
                    return verdict.reason
        return ""

    def _last_words(self, status: int) -> str:
        last = self.log.last("stderr")
        return f"its worker ended (status {status})" + (f": {last[:300]}" if status and last else "")

    async def _let_go(self) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        connection.close()
        with suppress(TimeoutError, OSError, asyncssh.Error):
            async with asyncio.timeout(STOP_GRACE_S):
                await connection.wait_closed()
