"""A real Docker engine, once for all tests of this package, and providers that use it."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import pytest
from pydantic import SecretStr

from myelin.plugin import (
    Attempt,
    BootSpec,
    LaunchKey,
    Lease,
    LeaseState,
    LogLine,
    Need,
    NodeId,
    ProviderContext,
    RunId,
)
from myelin_provider_docker.provider import DockerProvider
from myelin_provider_docker.section import DockerSection
from myelin_testkit import tiny_worker
from myelin_testkit.docker_engine import Engine, root_file_system, why_not

IMAGE = "myelin-test-base:1"
TINY = ("python", "/tiny_worker.py")
RUN_SECRET = "planted-run-secret-0123456789abcdef"
HUB_TOKEN = "hf_planted_token_fedcba9876543210"


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if why := why_not():
        if os.environ.get("CI"):
            pytest.fail(f"the Docker tests must run in CI, and this machine {why}")
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("docker")
    with Engine(folder / "engine") as running:
        archive = folder / "base.tar"
        root_file_system(archive, files=[(Path(str(tiny_worker.__file__)), "/tiny_worker.py")])
        client = docker.APIClient(base_url=running.url, version="auto")
        repository, _, tag = IMAGE.partition(":")
        client.import_image_from_file(
            str(archive), repository=repository, tag=tag, changes=["ENV PATH=/usr/local/bin:/bin", "USER 10001:10001"]
        )
        client.close()
        archive.unlink()
        yield running


@dataclass
class Rig:
    """The engine, providers that talk to it, and what tests do again and again."""

    engine: Engine
    client: Any
    made: list[DockerProvider] = field(default_factory=list)
    run: RunId = field(default_factory=lambda: RunId(f"run-{secrets.token_hex(4)}"))

    def section(self, **changes: object) -> DockerSection:
        values: dict[str, object] = {"host": self.engine.url, "image": IMAGE, "grace_s": 2.0, "cache": ""}
        return DockerSection.model_validate(values | changes)

    def provider(
        self,
        *,
        run: str = "",
        command: tuple[str, ...] = TINY,
        files: tuple[Path, ...] = (),
        nodes: int = 1,
        **changes: object,
    ) -> DockerProvider:
        """A provider; it is closed at the end."""
        context = ProviderContext(RunId(run or self.run), self.section(**changes), nodes, files)
        self.made.append(DockerProvider(context, command=command, environment={}))
        return self.made[-1]

    def key(self, node: int = 0, attempt: int = 1) -> LaunchKey:
        return LaunchKey(self.run, NodeId(f"stage-{node}"), Attempt(attempt))

    async def launch(self, provider: DockerProvider, node: int = 0, attempt: int = 1, transport: str = "grpc") -> Lease:
        key = self.key(node, attempt)
        environment = {"HF_TOKEN": SecretStr(HUB_TOKEN)}
        boot = BootSpec(key.run, key.node, key.attempt, SecretStr(RUN_SECRET), transport, environment=environment)
        offers = await provider.offers(Need(key.node, 1 << 20, "cpu"))
        return await provider.launch(offers[0], boot, key=key)

    async def wait(
        self, provider: DockerProvider, lease: Lease, done: Callable[[Lease], bool] | None = None, seconds: float = 90
    ) -> Lease:
        """The lease once it is as asked; else once it has left its start behind."""
        deadline, now = time.monotonic() + seconds, lease
        while time.monotonic() < deadline:
            now = next((each for each in await provider.leases() if each.id == lease.id), now)
            if done(now) if done is not None else now.state is not LeaseState.STARTING:
                return now
            await asyncio.sleep(0.02)
        raise AssertionError(f"it did not come to that: {now}")

    async def running(self, provider: DockerProvider, node: int = 0, attempt: int = 1) -> Lease:
        """A node that listens."""
        lease = await self.wait(provider, await self.launch(provider, node, attempt))
        assert lease.state is LeaseState.RUNNING, lease
        return lease

    async def exited(self, provider: DockerProvider, lease: Lease) -> str:
        """Why it ended."""
        return (await self.wait(provider, lease, lambda now: now.state is LeaseState.EXITED)).exit_reason

    async def log(self, provider: DockerProvider, lease: Lease) -> list[LogLine]:
        """All that a node wrote that has ended."""
        async with asyncio.timeout(60):
            return [line async for line in provider.logs(lease.id)]

    async def log_text(self, provider: DockerProvider, lease: Lease) -> str:
        return "\n".join(f"{line.stream}: {line.text}" for line in await self.log(provider, lease))

    def containers(self) -> set[str]:
        """Names of all containers, in any state."""
        return {each["Names"][0] for each in self.client.containers(all=True)}


@pytest.fixture
async def rig(engine: Engine) -> AsyncIterator[Rig]:
    client = docker.APIClient(base_url=engine.url, version="auto")
    rig = Rig(engine, client)
    yield rig
    for provider in rig.made:
        await provider.close()
    for container in client.containers(all=True):
        client.remove_container(container["Id"], force=True, v=True)
    client.close()
