"""The provider passes the suite that anyone's provider does, against the fake service."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psutil
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
    """Machines and their workers outlive the provider object, and a new one lists them."""

    features = frozenset({Feature.RECOVERY, Feature.DIALLED, Feature.UNREADABLE_LISTING, Feature.FAILING_LAUNCH})
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
        """As for anyone; the old object says of a machine that another has released that it vanished."""
        old = bench.provider()
        lease = await bench.launch(old)
        running = await bench.until(old, lease.id, LeaseState.RUNNING)
        new = bench.provider()
        assert await bench.until(new, lease.id, LeaseState.RUNNING) == running
        assert (await bench.launch(new)).id == lease.id
        assert await bench.until(new, lease.id, LeaseState.RUNNING) == running
        workers = [process for process in self.fake.live()[0].machine.processes() if is_worker(process)]
        assert len(workers) == 1, "the second launch follows the worker of the first"
        await new.release(lease.id)
        assert await bench.listed(new, lease.id) is None
        vanished = await bench.until(old, lease.id, LeaseState.EXITED)
        assert "vanished" in vanished.exit_reason
        await old.release(lease.id)
        assert await bench.listed(old, lease.id) is None


def is_worker(process: psutil.Process) -> bool:
    try:
        return tiny_worker.__file__ in process.cmdline()
    except psutil.Error:
        return False
