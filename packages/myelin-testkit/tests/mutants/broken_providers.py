"""Providers that break the contract in one point each. Not collected by itself: test_provider_suite.py runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import pytest

from myelin.plugin import BootSpec, Endpoint, LaunchKey, Lease, LeaseId, LogLine, Need, Offer, Provider, RunId
from myelin_testkit.memory_provider import Cloud, Fail, MemoryProvider
from myelin_testkit.provider_compliance import Feature, ProviderCompliance


class Broken(ProviderCompliance):
    """The suite on a variation of the in-memory provider."""

    features = frozenset(Feature)
    patience = 1.0
    launch_seconds = 0.04
    kind: ClassVar[type[MemoryProvider]] = MemoryProvider

    @pytest.fixture(autouse=True)
    def _cloud(self) -> None:
        self.cloud = Cloud()
        self.cloud.launch_seconds = 0.02

    def make_provider(self, run: RunId) -> Provider:
        return self.kind(run, self.cloud)

    def failing_provider(self, run: RunId) -> Provider:
        self.cloud.faults.next("launch", Fail(), Fail())
        return self.kind(run, self.cloud)

    @contextmanager
    def unreadable(self, provider: Provider) -> Iterator[None]:
        with self.cloud.faults.during("leases", Fail()):
            yield

    def outside(self) -> Collection[object]:
        return [task for task in asyncio.all_tasks() if task.get_name().startswith("node ")]


class TestSound(Broken):
    """Without a mistake."""

    patience = 60.0  # it needs none of it, however slow the machine is


class TestForgetsKeys(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
            return self.cloud.start(offer, boot, key).lease


class TestChecksKeysTooEarly(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
            if found := [machine for machine in self.cloud.running.values() if machine.key == key]:
                return found[0].lease
            await asyncio.sleep(0.01)
            return self.cloud.start(offer, boot, key).lease


class TestLeavesCancelledLaunches(Broken):
    launch_seconds = 0.4  # far from the time at which its node is started, and from that at which its launch returns

    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
            lease = await super().launch(offer, boot, key=key)
            await asyncio.sleep(10)
            return lease


class TestIsEmptyWhereUnknown(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def leases(self) -> Sequence[Lease]:
            try:
                return await super().leases()
            except Exception:
                return ()


class TestRaisesForeignErrors(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
            try:
                return await super().launch(offer, boot, key=key)
            except Exception as error:
                raise ConnectionError("409") from error


class TestTellsSecrets(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
            lease = await super().launch(offer, boot, key=key)
            machine = self.cloud.running[lease.id]
            machine.lines.append(LogLine("provider", f"started with {boot.secret.get_secret_value()}", 1.7e9))
            return lease


class TestDropsEndedNodes(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def leases(self) -> Sequence[Lease]:
            return [lease for lease in await super().leases() if lease.state != "exited"]


class TestStartsEndedOnesAgain(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
            for machine in list(self.cloud.running.values()):
                if machine.key == key and machine.task.done():
                    await self.cloud.remove(machine.id)
            return await super().launch(offer, boot, key=key)


class TestGivesNoReasons(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def leases(self) -> Sequence[Lease]:
            return [replace(lease, exit_reason="") for lease in await super().leases()]


class TestReleasesLazily(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def release(self, lease: LeaseId) -> None:
            if machine := self.cloud.running.pop(lease, None):
                asyncio.get_running_loop().call_later(0.3, machine.task.cancel)


class TestKnowsNoUnknownLease(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def release(self, lease: LeaseId) -> None:
            await self.cloud.remove(self.cloud.running[lease].id)


class TestNeverEndsLogs(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
            async for line in super().logs(lease):
                yield line
            await asyncio.Event().wait()


class TestForgetsOnRestart(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def leases(self) -> Sequence[Lease]:
            self.mine = getattr(self, "mine", set[LeaseId]())
            return [lease for lease in await super().leases() if lease.id in self.mine]

        async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
            lease = await super().launch(offer, boot, key=key)
            self.mine = {*getattr(self, "mine", ()), lease.id}
            return lease


class TestMixesRuns(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def leases(self) -> Sequence[Lease]:
            await super().leases()
            return [machine.lease for machine in self.cloud.running.values()]


class TestEndsNodesOnClose(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def close(self) -> None:
            for lease in list(self.cloud.running):
                await self.cloud.remove(lease)


class TestAnnouncesTooEarly(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
            lease = await super().launch(offer, boot, key=key)
            return replace(lease, endpoint=Endpoint(("127.0.0.1:1",)))


class TestOffersExcludedOnes(Broken):
    class kind(MemoryProvider):  # noqa: N801  # it is this class's attribute
        async def offers(self, need: Need) -> Sequence[Offer]:
            return await super().offers(replace(need, exclude=frozenset()))
