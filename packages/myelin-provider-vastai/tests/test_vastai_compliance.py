"""The provider passes the suite that anyone's provider does, against the fake service."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from myelin.plugin import LeaseState, Provider, ProviderContext, RunId
from myelin_provider_vastai.provider import VastaiProvider
from myelin_testkit import tiny_worker
from myelin_testkit.fake_vastai import FakeVastai, Trouble, offer
from myelin_testkit.provider_compliance import Bench, Feature, ProviderCompliance


class _Endless(deque[str]):
    """Faults that don't run out."""

    def popleft(self) -> str:
        return self[0]


class TestVastaiProvider(ProviderCompliance):
    """Machines outlive the provider object and are listed by a new one; their workers end with the SSH connection."""

    features = frozenset({Feature.DIALLED, Feature.UNREADABLE_LISTING, Feature.FAILING_LAUNCH})
    launch_seconds: ClassVar[float] = 0.3
    fake: FakeVastai
    rig: Any

    @pytest.fixture(autouse=True)
    def service(self, fake: FakeVastai, rig: Any, tmp_path: Path) -> None:
        self.fake, self.rig = fake, rig
        fake.offers = [offer(number) for number in range(8)]
        self.python = tmp_path / "python"
        self.python.write_text(f"#!/bin/sh\nexec {sys.executable} {tiny_worker.__file__}\n")
        self.python.chmod(0o755)

    def make_provider(self, run: RunId) -> Provider:
        return VastaiProvider(ProviderContext(run, self.rig.section(python=str(self.python))))

    def failing_provider(self, run: RunId) -> Provider:
        self.fake.next_machines(Trouble(answer="no_such_ask-410"))
        return self.make_provider(run)

    def outside(self) -> Collection[object]:
        return {rented.id for rented in self.fake.live()}

    @contextmanager
    def unreadable(self, provider: Provider) -> Iterator[None]:
        before, self.fake.list_faults = self.fake.list_faults, _Endless(["deprecated"])
        try:
            yield
        finally:
            self.fake.list_faults = before

    async def test_a_new_object_finds_what_an_old_one_started(self, bench: Bench) -> None:
        """It finds the machine, not the worker's endpoint: launching the key again starts a worker on it."""
        old = bench.provider()
        lease = await bench.launch(old)
        await bench.until(old, lease.id, LeaseState.RUNNING)
        await old.close()
        new = bench.provider()
        (found,) = await new.leases()
        assert (found.id, found.key, found.offer) == (lease.id, lease.key, lease.offer)
        assert (await bench.launch(new)).id == lease.id
        await bench.until(new, lease.id, LeaseState.RUNNING)
        await new.release(lease.id)
        assert await bench.listed(new, lease.id) is None

    async def test_closing_touches_no_node(self, bench: Bench) -> None:
        """The machine stays rented; its worker, whose input ends, doesn't."""
        provider = bench.provider()
        lease = await bench.launch(provider)
        await bench.until(provider, lease.id, LeaseState.RUNNING)
        await provider.close()
        await provider.close()
        assert [str(rented.id) for rented in self.fake.live()] == [lease.id]
        machine, deadline = self.fake.live()[0].machine, time.monotonic() + 10

        def workers() -> list[str]:
            return [name for process in machine.processes() if "tiny_worker" in (name := " ".join(process.cmdline()))]

        while workers() and time.monotonic() < deadline:  # noqa: ASYNC110  (nobody tells us)
            await asyncio.sleep(0.02)
        assert workers() == []
