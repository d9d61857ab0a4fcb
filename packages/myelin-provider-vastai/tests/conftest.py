"""A provider against the fake service."""

from __future__ import annotations

import asyncio
import getpass
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pydantic import SecretStr

from myelin.plugin import Attempt, BootSpec, LaunchKey, Lease, LeaseState, Need, NodeId, ProviderContext, RunId
from myelin_provider_vastai.asks import read_ask
from myelin_provider_vastai.labels import port_for, write_label
from myelin_provider_vastai.provider import VastaiProvider
from myelin_provider_vastai.section import VastaiSection
from myelin_testkit.fake_machine import sshd_path
from myelin_testkit.fake_vastai import FakeVastai, offer

RUN_SECRET = "planted-run-secret-fedcba9876543210"
HUB_TOKEN = "hf_planted_token_0123456789"


@dataclass
class Rig:
    """The fake, providers that talk to it, and what tests do again and again."""

    fake: FakeVastai
    identity: Path
    made: list[VastaiProvider] = field(default_factory=list)
    first_dial_s: str = "60"
    planted: tuple[str, ...] = (RUN_SECRET, HUB_TOKEN)
    run: RunId = field(default_factory=lambda: undisturbed_run())

    def section(self, **changes: object) -> VastaiSection:
        values: dict[str, object] = {
            "api_key": SecretStr(self.fake.api_key),
            "api_url": self.fake.url,
            "confirm_lease": False,
            "python": sys.executable,
            "setup": ":",
            "ssh_identity": self.identity,
            "ssh_user": getpass.getuser(),
            "node_bind": "127.0.0.1",
            "ready_timeout_s": 90.0,  # none of these is reached, unless a test sets it for that
            "ssh_timeout_s": 90.0,
            "destroy_timeout_s": 90.0,
            "poll_s": 0.05,
            "call_spacing": 0.011,
            "dead_man_s": 0.0,
        }
        return VastaiSection.model_validate(values | changes)

    def provider(self, *, run: str = "", **changes: object) -> VastaiProvider:
        """A provider; it is closed at the end, its machines left to the fake."""
        self.made.append(VastaiProvider(ProviderContext(RunId(run or self.run), self.section(**changes))))
        return self.made[-1]

    def key(self, node: int = 0, attempt: int = 1) -> LaunchKey:
        return LaunchKey(self.run, NodeId(f"stage-{node}"), Attempt(attempt))

    def boot(self, key: LaunchKey) -> BootSpec:
        environment = {"HF_TOKEN": SecretStr(HUB_TOKEN), "MYELIN_NODE_FIRST_DIAL_S": SecretStr(self.first_dial_s)}
        return BootSpec(key.run, key.node, key.attempt, SecretStr(RUN_SECRET), environment=environment)

    def need(self, node: int = 0, exclude: frozenset[str] = frozenset()) -> Need:
        return Need(NodeId(f"stage-{node}"), 1 << 30, "cpu", exclude)

    async def rent(self, provider: VastaiProvider, node: int = 0, attempt: int = 1) -> Lease:
        """Take the best offer."""
        key = self.key(node, attempt)
        offers = await provider.offers(self.need(node))
        return await provider.launch(offers[0], self.boot(key), key=key)

    async def wait(
        self, provider: VastaiProvider, lease: Lease, done: Callable[[Lease], bool] | None = None, seconds: float = 90
    ) -> Lease:
        """The lease once it is as asked; else once it runs."""
        deadline = time.monotonic() + seconds
        now = lease
        while time.monotonic() < deadline:
            now = next((each for each in await provider.leases() if each.id == lease.id), now)
            if done(now) if done is not None else now.state is not LeaseState.STARTING:
                return now
            await asyncio.sleep(0.02)
        raise AssertionError(f"{now}\n{await self.log_text(provider, lease)}")

    async def running(self, provider: VastaiProvider, node: int = 0) -> Lease:
        """A node that listens."""
        lease = await self.wait(provider, await self.rent(provider, node))
        assert lease.state is LeaseState.RUNNING, f"{lease}\n{await self.log_text(provider, lease)}"
        return lease

    async def exited(self, provider: VastaiProvider, lease: Lease) -> str:
        """Why it ended."""
        return (await self.wait(provider, lease, lambda now: now.state is LeaseState.EXITED)).exit_reason

    async def until(self, done: Callable[[], Awaitable[bool]], seconds: float = 60) -> None:
        """Return once ``done()``, or when the time is up: the test then says what is wrong."""
        deadline = time.monotonic() + seconds
        while not await done() and time.monotonic() < deadline:  # noqa: ASYNC110  (nobody tells us)
            await asyncio.sleep(0.05)

    async def says(self, provider: VastaiProvider, lease: Lease, text: str, times: int = 1) -> str:
        """Its log, once that has ``text`` so often, or the time is up."""

        async def told() -> bool:
            return (await self.log_text(provider, lease)).count(text) >= times

        await self.until(told)
        return await self.log_text(provider, lease)

    async def log_text(self, provider: VastaiProvider, lease: Lease) -> str:
        """What there is of its log now."""
        lines, text = provider.logs(lease.id), []
        while True:
            try:
                async with asyncio.timeout(0.2):
                    line = await anext(lines)
            except (TimeoutError, StopAsyncIteration):
                return "\n".join(text)
            text.append(f"{line.stream}: {line.text}")


def undisturbed_run() -> RunId:
    """A run whose workers each have a port of their own: the fake's machines share this one's loopback, with each other
    and with those of other tests."""
    while True:
        run = RunId(f"run-{secrets.token_hex(4)}")
        keys = [LaunchKey(run, NodeId(f"stage-{node}"), Attempt(attempt)) for node in range(4) for attempt in (1, 2)]
        asks = [ask for number in range(8) if (ask := read_ask(offer(number)))]
        ports = {port_for(write_label(key, ask.offer_id)) for key in keys for ask in asks}
        if len(ports) == len(keys) * len(asks) and all(map(nobody_listens, ports)):
            return run


def nobody_listens(port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@pytest.fixture(scope="session")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SSH key of our own."""
    path = tmp_path_factory.mktemp("ssh") / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeVastai]:
    if not sshd_path():
        pytest.skip("needs sshd: apt-get install openssh-server")
    with FakeVastai(tmp_path / "machines") as service:
        yield service


@pytest.fixture
async def rig(fake: FakeVastai, identity: Path) -> AsyncIterator[Rig]:
    rig = Rig(fake, identity)
    yield rig
    for provider in rig.made:
        await provider.close()
