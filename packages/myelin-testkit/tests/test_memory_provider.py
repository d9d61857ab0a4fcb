"""The in-memory provider: it keeps the contract with faults off, and breaks it as told with faults on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import contextmanager

import pytest
from pydantic import SecretStr

from myelin.plugin import (
    Attempt,
    BootSpec,
    LaunchKey,
    LeaseId,
    LeaseState,
    Need,
    NodeId,
    Offer,
    Provider,
    ProviderError,
    RunId,
)
from myelin_testkit.clock import SimulatedClock
from myelin_testkit.memory_provider import (
    Announce,
    Cloud,
    Fail,
    Fault,
    Hang,
    Ignored,
    Late,
    LostAnswer,
    MemoryProvider,
    Operation,
    Say,
    Stale,
    Twice,
)
from myelin_testkit.provider_compliance import Feature, ProviderCompliance

RUN = RunId("run-1")
KEY = LaunchKey(RUN, NodeId("stage-0"), Attempt(1))
BOOT = BootSpec(RUN, KEY.node, KEY.attempt, SecretStr("hush"))
NEED = Need(KEY.node, 1, "cpu")


class TestMemoryProvider(ProviderCompliance):
    features = frozenset(Feature)

    @pytest.fixture(autouse=True)
    def _cloud(self) -> None:
        self.cloud = Cloud()

    def make_provider(self, run: RunId) -> Provider:
        return MemoryProvider(run, self.cloud)

    def failing_provider(self, run: RunId) -> Provider:
        self.cloud.faults.next("launch", Fail(), Fail())
        return MemoryProvider(run, self.cloud)

    @contextmanager
    def unreadable(self, provider: Provider) -> Iterator[None]:
        with self.cloud.faults.during("leases", Fail()):
            yield

    def outside(self) -> Collection[object]:
        return [task for task in asyncio.all_tasks() if task.get_name().startswith("node ")]


class TestSlowMemoryProvider(TestMemoryProvider):
    @pytest.fixture(autouse=True)
    def _slow(self, _cloud: None) -> None:
        self.cloud.launch_seconds = 0.02


@pytest.fixture
async def cloud() -> AsyncIterator[Cloud]:
    cloud = Cloud(clock=SimulatedClock())
    yield cloud
    for lease in list(cloud.running):
        await cloud.remove(lease)


@pytest.fixture
def provider(cloud: Cloud) -> MemoryProvider:
    return MemoryProvider(RUN, cloud)


async def launch(provider: MemoryProvider, key: LaunchKey = KEY) -> LeaseId:
    (offer, *_) = await provider.offers(NEED)
    return (await provider.launch(offer, BOOT, key=key)).id


def clock_of(cloud: Cloud) -> SimulatedClock:
    assert isinstance(cloud.clock, SimulatedClock)
    return cloud.clock


async def test_a_lost_answer_leaves_a_node_that_the_listing_shows(cloud: Cloud, provider: MemoryProvider) -> None:
    cloud.faults.next("launch", LostAnswer())
    with pytest.raises(ProviderError, match="504"):
        await launch(provider)
    (left,) = await provider.leases()
    assert left.key == KEY
    assert await launch(provider) == left.id
    assert cloud.started == [KEY]
    assert cloud.history == [("launch", LostAnswer(error=cloud.history[0][1].error))]


async def test_who_gives_up_on_a_lost_answer_leaves_the_node_too(cloud: Cloud, provider: MemoryProvider) -> None:
    cloud.faults.next("launch", LostAnswer(60.0))
    launching = asyncio.create_task(launch(provider))
    while not cloud.running:  # noqa: ASYNC110  (it gets there by itself in a few turns)
        await asyncio.sleep(0)
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    assert len(cloud.running) == 1


async def test_a_launch_that_hangs_has_started_nothing(cloud: Cloud, provider: MemoryProvider) -> None:
    cloud.faults.next("launch", Hang(), None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await launch(provider)
    assert cloud.running == {}
    await launch(provider)
    assert cloud.peak == 1


async def test_a_late_launch_by_a_simulated_clock(cloud: Cloud, provider: MemoryProvider) -> None:
    cloud.faults.next("launch", Late(90.0))
    launching = asyncio.create_task(launch(provider))
    await clock_of(cloud).advance(89.0)
    assert not launching.done()
    await clock_of(cloud).advance(2.0)
    assert launching.done()


async def test_twice_for_one_key(cloud: Cloud, provider: MemoryProvider) -> None:
    cloud.faults.next("launch", Twice())
    first = await launch(provider)
    leases = await provider.leases()
    assert [lease.key for lease in leases] == [KEY, KEY]
    assert leases[0].id == first != leases[1].id
    assert cloud.peak == 2


async def test_a_stale_listing(cloud: Cloud, provider: MemoryProvider) -> None:
    assert await provider.leases() == ()
    await launch(provider)
    cloud.faults.next("leases", Stale())
    assert await provider.leases() == ()
    assert len(await provider.leases()) == 1


async def test_an_ignored_release(cloud: Cloud, provider: MemoryProvider) -> None:
    lease = await launch(provider)
    cloud.faults.next("release", Ignored())
    await provider.release(lease)
    assert [each.id for each in await provider.leases()] == [lease]
    await provider.release(lease)
    assert await provider.leases() == ()


async def test_a_node_that_dies(cloud: Cloud, provider: MemoryProvider) -> None:
    lease = await launch(provider)
    cloud.kill("stage-0", "the host lost power")
    await asyncio.wait({machine.task for machine in cloud.running.values()})
    (dead,) = await provider.leases()
    assert (dead.id, dead.state, dead.exit_reason) == (lease, LeaseState.EXITED, "the host lost power")


async def test_any_exception_for_every_call_or_by_a_rule(cloud: Cloud, provider: MemoryProvider) -> None:
    with cloud.faults.during("offers", Fail(ValueError("a mistake"))):
        for _ in range(3):
            with pytest.raises(ValueError, match="a mistake"):
                await provider.offers(NEED)
    calls: list[Operation] = []

    def rule(operation: Operation) -> Fault | None:
        calls.append(operation)
        return Fail() if len(calls) % 2 else None

    cloud.faults.ask = rule
    results = await asyncio.gather(*(provider.leases() for _ in range(4)), return_exceptions=True)
    assert [isinstance(result, ProviderError) for result in results] == [True, False, True, False]
    assert calls == ["leases"] * 4


async def test_what_nodes_cost(cloud: Cloud, provider: MemoryProvider) -> None:
    cloud.offers = [Offer("big", "memory", "a big one", 100, 2.0), Offer("small", "memory", "a small one", 10, 1.0)]
    lease = await launch(provider)
    await clock_of(cloud).advance(1800)
    await provider.release(lease)
    await clock_of(cloud).advance(3600)
    assert cloud.spent() == pytest.approx(1.0)
    offers = await provider.offers(Need(KEY.node, 50, "cpu"))
    assert [offer.id for offer in offers] == ["big"]


async def test_sleepers_wake_in_order_and_at_their_time() -> None:
    clock, woken = SimulatedClock(start=0.0), list[tuple[str, float]]()

    async def sleeper(name: str, *naps: float) -> None:
        for seconds in naps:
            await clock.sleep(seconds)
            woken.append((name, clock.time()))

    tasks = [asyncio.create_task(sleeper(*each)) for each in (("a", 3.0, 1.0), ("b", 2.0, 5.0), ("c", 0.0))]
    await clock.advance(4.5)
    assert woken == [("c", 0.0), ("b", 2.0), ("a", 3.0), ("a", 4.0)]
    tasks[1].cancel()
    await clock.advance(10.0)
    assert clock.time() == 14.5
    assert len(woken) == 4


async def test_a_life_of_ones_own(cloud: Cloud, provider: MemoryProvider) -> None:
    async def says_two_things(boot: BootSpec, announce: Announce, say: Say) -> None:
        say("one")
        await asyncio.sleep(0.01)
        say(f"two by {boot.node}")

    cloud.life = says_two_things
    lease = await launch(provider)
    assert [line.text async for line in provider.logs(lease)] == ["one", "two by stage-0"]
    (ended,) = await provider.leases()
    assert ended.exit_reason == "exit code 0"
