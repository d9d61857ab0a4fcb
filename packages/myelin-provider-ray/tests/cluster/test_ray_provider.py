"""What only this provider does: places, deaths and what is told of them, waiting, cleaning up after itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import psutil
import pytest
import pytest_asyncio
from pydantic import SecretStr
from ray_cluster_support import InProcess, ThreeNodes

from myelin.plugin import (
    Attempt,
    BootSpec,
    LaunchKey,
    Lease,
    LeaseState,
    Need,
    NodeId,
    Offer,
    ProviderContext,
    ProviderError,
    RunId,
)
from myelin_provider_ray.driver import Driver
from myelin_provider_ray.placement import AUTOSCALER
from myelin_provider_ray.provider import RayProvider
from myelin_provider_ray.section import RaySection, Strategy
from myelin_testkit import tiny_worker

TINY_WORKER = (sys.executable, str(tiny_worker.__file__))
STUBBORN = (sys.executable, "-c", "import os, sys, time; sys.stdin.readline(); print('x' * 9); time.sleep(99)")


class Bench:
    """Providers of one run, and what tests do with them."""

    def __init__(self, cluster: ThreeNodes) -> None:
        self.cluster = cluster
        self.run = RunId(f"ray-{time.monotonic_ns()}")
        self.made: list[RayProvider] = []

    def provider(self, command: tuple[str, ...] = TINY_WORKER, **settings: object) -> RayProvider:
        usual: dict[str, object] = {"overhead_mb": 50, "grace_s": 1.0}
        section = RaySection(address=self.cluster.address, **(usual | settings))
        driver = InProcess(20)
        made = RayProvider(ProviderContext(self.run, section, 3), command=command, driver=driver)
        self.made.append(made)
        return made

    async def launch(
        self, provider: RayProvider, number: int = 0, *, attempt: int = 1, offer: str = "", seconds: float = 30.0
    ) -> Lease:
        key = LaunchKey(self.run, NodeId(f"stage-{number}"), Attempt(attempt))
        chosen = None
        for _ in range(int(seconds / 0.05)):  # what another test has released is shown to be free a moment later
            offers = await provider.offers(Need(key.node, 1 << 20, "cpu"))
            chosen = next((each for each in offers if offer in ("", each.id)), None)
            if chosen is not None:
                break
            await asyncio.sleep(0.05)
        assert chosen is not None, f"{offer} isn't offered"
        boot = BootSpec(key.run, key.node, key.attempt, SecretStr("planted"))
        return await provider.launch(chosen, boot, key=key)

    async def until(self, provider: RayProvider, lease: Lease, state: LeaseState, seconds: float = 90.0) -> Lease:
        last = None
        for _ in range(int(seconds / 0.05)):
            last = next((each for each in await provider.leases() if each.id == lease.id), None)
            if last is not None and last.state is state:
                return last
            await asyncio.sleep(0.05)
        raise AssertionError(f"the lease did not become {state}: {last}")

    async def running(self, provider: RayProvider, *numbers: int) -> list[Lease]:
        leases = [await self.launch(provider, number) for number in numbers]
        return [await self.until(provider, lease, LeaseState.RUNNING) for lease in leases]


@pytest_asyncio.fixture
async def bench(cluster: ThreeNodes) -> AsyncIterator[Bench]:
    bench = Bench(cluster)
    yield bench
    for provider in bench.made:
        try:
            for lease in await provider.leases():
                await provider.release(lease.id)
        finally:
            await provider.close()  # also one that a test has closed: the look at its leases began anew
    assert cluster.actors() == set()
    assert cluster.groups() == set()


@pytest.mark.parametrize(
    ("strategy", "nodes"), [(Strategy.SPREAD, [1, 1, 2]), (Strategy.STRICT_SPREAD, [1, 1, 1]), (Strategy.PACK, [3])]
)
async def test_stages_are_spread_or_packed(bench: Bench, strategy: Strategy, nodes: list[int]) -> None:
    provider = bench.provider(strategy=strategy)
    leases = [await bench.launch(provider, number) for number in range(sum(nodes))]
    where = [lease.offer for lease in leases]
    assert sorted(where.count(node) for node in set(where)) == nodes
    listed = {lease.id: lease.offer for lease in await provider.leases()}
    assert listed == {lease.id: lease.offer for lease in leases}
    if strategy is Strategy.STRICT_SPREAD:
        need = Need(NodeId("stage-3"), 1 << 20, "cpu")
        assert await provider.offers(need) == ()
        assert "it takes 3 nodes with 1 CPU and 52 MB free" in provider.lacking(need)


async def test_launches_at_once_share_out_the_nodes(bench: Bench) -> None:
    """Each was offered the same best node before any had taken it; there is room for one there."""
    provider = bench.provider(cpus=4)
    leases = await asyncio.gather(*(bench.launch(provider, number) for number in range(3)))
    assert len({lease.offer for lease in leases}) == 3
    with pytest.raises(AssertionError):
        await bench.launch(provider, 3, seconds=3)
    need = Need(NodeId("stage-3"), 1 << 20, "cpu")
    assert "of the cluster's 3 nodes" in provider.lacking(need)


async def test_an_offer_is_a_node_and_labels_choose_it(bench: Bench) -> None:
    provider = bench.provider(labels={"zone": "z1"})
    (offer,) = await provider.offers(Need(NodeId("stage-0"), 1 << 20, "cpu"))
    assert offer.id == bench.cluster.nodes[1].node_id
    assert offer.details["zone"] == "z1"
    assert (offer.room, offer.shared, offer.memory_bytes) == (4, True, 2_950_000_000)
    (lease,) = await bench.running(provider, 0)
    assert lease.offer == offer.id


async def test_a_worker_that_is_killed_is_told_of_with_its_signal(bench: Bench) -> None:
    provider = bench.provider()
    (lease,) = await bench.running(provider, 0)
    (worker,) = bench.cluster.workers("tiny_worker")
    os.kill(worker, signal.SIGKILL)
    ended = await bench.until(provider, lease, LeaseState.EXITED)
    assert ended.exit_reason.startswith("was killed (SIGKILL)")


async def test_a_worker_that_does_not_end_when_asked_is_killed(bench: Bench) -> None:
    provider = bench.provider(STUBBORN)
    lease = await bench.launch(provider)
    for _ in range(1000):
        if workers := bench.cluster.workers("time.sleep(99)"):
            break
        await asyncio.sleep(0.05)
    assert workers
    os.kill(next(iter(workers)), signal.SIGSTOP)
    await provider.release(lease.id)
    assert bench.cluster.workers("time.sleep(99)") == set()


@pytest.mark.parametrize("fresh", [False, True])
async def test_an_actor_that_dies_is_told_of_and_takes_its_worker_along(bench: Bench, fresh: bool) -> None:
    provider = bench.provider()
    (lease,) = await bench.running(provider, 0)
    (worker,) = bench.cluster.workers("tiny_worker")
    psutil.Process(worker).parent().kill()  # type: ignore[union-attr]  # an actor has its worker for a child
    teller = bench.provider() if fresh else provider
    ended = await bench.until(teller, lease, LeaseState.EXITED)
    assert ended.exit_reason.startswith("its actor died")
    assert "\n" not in ended.exit_reason
    for _ in range(600):
        if not bench.cluster.workers("tiny_worker"):
            break
        await asyncio.sleep(0.05)
    assert bench.cluster.workers("tiny_worker") == set()


async def test_an_actor_that_is_killed_by_hand_is_told_of_as_such(bench: Bench) -> None:
    import ray

    provider = bench.provider()
    (lease,) = await bench.running(provider, 0)
    ray.kill(ray.get_actor(lease.id))
    ended = await bench.until(provider, lease, LeaseState.EXITED)
    assert ended.exit_reason == "its actor was killed by ray.kill"


async def test_a_place_that_is_taken_is_waited_for_and_then_given_up(bench: Bench) -> None:
    first, second = bench.provider(cpus=4), bench.provider(cpus=4, pending_timeout_s=1.5)
    node = bench.cluster.nodes[0].node_id
    taken = await bench.launch(first, 0, offer=node)
    await second.offers(Need(NodeId("stage-1"), 1 << 20, "cpu"))
    # The room is gone when the cluster comes to it, as when somebody else is faster.
    key = LaunchKey(bench.run, NodeId("stage-1"), Attempt(1))
    second._untaken = lambda offer, view, need: node
    lease = await second.launch(Offer(node, "ray", "taken"), BootSpec(*_named(key), SecretStr("planted")), key=key)
    waiting = await bench.until(second, lease, LeaseState.STARTING)
    assert waiting.detail == "waits for a node to have room with 4 CPUs and 52 MB"
    (line,) = [line async for line in _first(second, lease)]
    assert line == "stage-1 waits for a node to have room with 4 CPUs and 52 MB"
    ended = await bench.until(second, lease, LeaseState.EXITED)
    assert "was given no place within 1.5 s" in ended.exit_reason
    assert "waited for 4 CPUs" in ended.exit_reason
    await second.release(lease.id)
    await first.release(taken.id)


async def test_waiting_for_the_autoscaler_is_told_and_ends_with_a_node(bench: Bench) -> None:
    provider = bench.provider(cpus=9, autoscaling=True)
    (offer,) = await provider.offers(Need(NodeId("stage-0"), 1 << 20, "cpu"))
    assert offer.id == AUTOSCALER
    assert "9 CPUs" in offer.description
    lease = await bench.launch(provider, 0)
    waiting = await bench.until(provider, lease, LeaseState.STARTING)
    assert waiting.detail == "waits for the autoscaler to add a node with 9 CPUs and 52 MB"
    added = bench.cluster.cluster.add_node(num_cpus=9, memory=1 << 30, object_store_memory=80 << 20)
    try:
        running = await bench.until(provider, lease, LeaseState.RUNNING)
        assert running.offer == added.node_id
        assert running.detail == ""
        await provider.release(lease.id)
    finally:
        bench.cluster.cluster.remove_node(added)


async def test_what_no_node_can_hold_ends_at_once_where_none_is_added(bench: Bench) -> None:
    hopeful = bench.provider(cpus=9, autoscaling=True)
    lease = await bench.launch(hopeful, 0)
    plain = bench.provider(cpus=9, autoscaling=False)
    ended = await bench.until(plain, lease, LeaseState.EXITED)
    assert ended.exit_reason == "no node of the cluster has 9 CPUs and 52 MB, and the cluster adds none"


async def test_a_host_that_nobody_looks_at_gives_its_place_back(bench: Bench) -> None:
    provider = bench.provider(linger_s=1.0)
    (lease,) = await bench.running(provider, 0)
    (worker,) = bench.cluster.workers("tiny_worker")
    os.kill(worker, signal.SIGTERM)
    for _ in range(600):
        await asyncio.sleep(0.1)
        if not bench.cluster.groups() and not bench.cluster.actors():
            break
    assert bench.cluster.groups() == set()
    assert await provider.leases() == ()
    await provider.release(lease.id)


async def test_every_run_of_the_cluster_is_listed_for_cleaning_up(bench: Bench) -> None:
    (lease,) = await bench.running(bench.provider(), 0)
    other = Bench(bench.cluster).provider()
    assert await other.leases() == ()
    assert [each.key for each in await other.all_leases()] == [lease.key]
    await other.release(lease.id)
    assert bench.cluster.groups() == set()


async def test_what_was_launched_when_the_cluster_did_not_answer_is_removed_when_it_turns_up(bench: Bench) -> None:
    provider = bench.provider()
    offers = await provider.offers(Need(NodeId("stage-0"), 1 << 20, "cpu"))
    driver: InProcess = provider._driver
    call = driver.call

    async def late(name: str, /, *, timeout_s: float = 0.0, **arguments: object) -> object:
        if name == "remove" and not bench.cluster.groups():
            raise ProviderError("not now")
        answer = await call(name, timeout_s=timeout_s, **arguments)
        if name == "create":
            raise ProviderError("the answer is lost", reason="ray-timeout")
        return answer

    driver.call = late
    key = LaunchKey(bench.run, NodeId("stage-0"), Attempt(1))
    boot = BootSpec(*_named(key), SecretStr("planted"))
    with pytest.raises(ProviderError, match="the answer is lost"):
        await provider.launch(offers[0], boot, key=key)
    for _ in range(1000):
        assert await provider.leases() == ()
        if not bench.cluster.groups():
            break
        await asyncio.sleep(0.05)
    assert bench.cluster.groups() == set()


async def test_the_process_that_speaks_with_ray_is_started_anew_when_it_has_ended(bench: Bench) -> None:
    section = RaySection(address=bench.cluster.address, overhead_mb=50)
    provider = RayProvider(ProviderContext(bench.run, section, 3), command=TINY_WORKER)
    bench.made.append(provider)
    try:
        (lease,) = await bench.running(provider, 0)
        (bridge,) = bench.cluster.workers("myelin_provider_ray.bridge")
        os.kill(bridge, signal.SIGKILL)
        with suppress(ProviderError):  # whether a call meets it dying or finds it dead is a matter of luck
            await provider.leases()
        assert [each.endpoint for each in await provider.leases()] == [lease.endpoint]
        assert bench.cluster.workers("myelin_provider_ray.bridge") - {bridge}
        await provider.release(lease.id)
    finally:
        await provider.close()
    assert bench.cluster.workers("myelin_provider_ray.bridge") == set()


async def test_where_there_is_no_cluster_the_error_says_what_to_do() -> None:
    settings = {"address": "127.0.0.1:1", "namespace": "n", "runtime_env": {}, "local_cpus": 1.0}
    driver = Driver(settings, connect_s=4, call_s=4)
    with pytest.raises(ProviderError) as caught:
        await driver.call("snapshot")
    assert caught.value.reason in ("no-cluster", "ray-timeout", "ray-ended")
    assert "ray" in caught.value.hint
    await driver.close()


class TestLosingNodes:
    """With a node of their own, added to the cluster and taken away."""

    @pytest_asyncio.fixture
    async def extra(self, bench: Bench) -> AsyncIterator[str]:
        node = bench.cluster.cluster.add_node(
            num_cpus=1, memory=1 << 30, object_store_memory=80 << 20, labels={"zone": "extra"}
        )
        self.node = node
        yield node.node_id
        if node in bench.cluster.cluster.worker_nodes:
            bench.cluster.cluster.remove_node(node)

    async def test_a_raylet_that_dies_is_told_of_at_once(self, bench: Bench, extra: str) -> None:
        provider = bench.provider(labels={"zone": "extra"})
        (lease,) = await bench.running(provider, 0)
        assert lease.offer == extra
        began = time.monotonic()
        self.node.kill_raylet()
        ended = await bench.until(provider, lease, LeaseState.EXITED, 12)
        assert time.monotonic() - began < 12, "Ray itself takes about 15 s"
        assert ended.exit_reason.startswith("the raylet of node")
        assert await provider.offers(Need(NodeId("stage-1"), 1 << 20, "cpu")) == (), "it is offered no more"
        await provider.release(lease.id)
        assert bench.cluster.groups() == set()
        assert await provider.offers(Need(NodeId("stage-1"), 1 << 20, "cpu")) == (), "nor when nothing of ours is on it"

    async def test_a_node_that_is_pre_empted_is_told_of_before_it_is_gone(self, bench: Bench, extra: str) -> None:
        from ray._private.worker import global_worker
        from ray.core.generated import autoscaler_pb2

        provider = bench.provider(labels={"zone": "extra"})
        (lease,) = await bench.running(provider, 0)
        deadline = int((time.time() + 60) * 1000)
        preemption = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        global_worker.gcs_client.drain_node(extra, preemption, "spot", deadline)
        ended = await bench.until(provider, lease, LeaseState.EXITED)
        assert "is being pre-empted, within" in ended.exit_reason
        assert await provider.offers(Need(NodeId("stage-1"), 1 << 20, "cpu")) == ()
        await provider.release(lease.id)
        assert bench.cluster.workers("tiny_worker") == set()


def _named(key: LaunchKey) -> tuple[RunId, NodeId, Attempt]:
    return key.run, key.node, key.attempt


async def _first(provider: RayProvider, lease: Lease) -> AsyncIterator[str]:
    async for line in provider.logs(lease.id):
        yield line.text
        return
