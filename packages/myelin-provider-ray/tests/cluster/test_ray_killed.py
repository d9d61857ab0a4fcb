"""Launches that were broken off by the death of whoever made them, on a real cluster."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from pydantic import SecretStr
from ray_cluster_support import InProcess, ThreeNodes

from myelin.cluster.executor import Executor, LaunchTimes
from myelin.cluster.spec import NodeSpec
from myelin.plugin import Attempt, Lease, LeaseState, NodeId, ProviderContext, RunId, boot_line
from myelin_provider_ray.names import write_name
from myelin_provider_ray.provider import RayProvider
from myelin_provider_ray.section import RaySection
from myelin_testkit import tiny_worker

TINY_WORKER = (sys.executable, str(tiny_worker.__file__))
KILLED_DRIVER = Path(__file__).with_name("ray_killed_driver.py")
STEPS = ("place", "actor", "boot", "booted")


async def test_whatever_a_launch_had_come_to_when_its_maker_was_killed_the_stage_can_be_had(
    cluster: ThreeNodes,
) -> None:
    run = RunId(f"killed-{time.monotonic_ns()}")
    specs = [NodeSpec(run, NodeId(step), 1 << 20, "cpu", "tcp", SecretStr("planted")) for step in STEPS]
    begin(cluster, specs)
    section = RaySection(address=cluster.address, overhead_mb=50, grace_s=1.0)
    provider = RayProvider(ProviderContext(run, section, 4), command=TINY_WORKER, driver=InProcess(20))
    executor = Executor(provider, "ray", LaunchTimes(launch=20, release=20))
    try:
        leases = await asyncio.gather(*(running(executor, spec) for spec in specs))
        attempts = {step: lease.key.attempt for step, lease in zip(STEPS, leases, strict=True)}
        assert attempts["place"] == 2, "there was nothing to adopt"
        assert attempts["booted"] == 1, "it was all there"
        assert {attempts["actor"], attempts["boot"]} <= {1, 2}, "Ray gives an actor up whose maker died too early"
        assert cluster.actors() == {lease.id for lease in leases}
        assert len(cluster.groups()) == len(cluster.workers("tiny_worker")) == len(STEPS)
    finally:
        await executor.release_all()
        await executor.close()
    assert cluster.actors() == cluster.groups() == cluster.workers("tiny_worker") == set()


def begin(cluster: ThreeNodes, specs: list[NodeSpec]) -> None:
    """Launches that are broken off, all at once, each at the step that its node is called after."""
    killed = []
    for spec in specs:
        name = write_name(spec.key(Attempt(1)))
        where = (cluster.address, name, cluster.nodes[1].node_id, json.dumps(TINY_WORKER))
        words = [sys.executable, str(KILLED_DRIVER), spec.node, *where]
        killed.append(subprocess.Popen(words, stdin=subprocess.PIPE))
    for process, spec in zip(killed, specs, strict=True):
        process.communicate(boot_line(spec.boot(Attempt(1))), timeout=120)
        assert process.returncode == -signal.SIGKILL


async def running(executor: Executor, spec: NodeSpec) -> Lease:
    """The lease of a node, once it listens: adopted, or launched, or launched anew where it ended on the way."""
    lease = await executor.adopt(spec) or await executor.launch(spec)
    found: Lease | None = lease
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        found = await executor.lease(lease.id, timeout_s=5)
        if found is None or found.state is LeaseState.EXITED:
            lease = await executor.replace(spec, lease, "it ended while it started")
        elif found.state is LeaseState.RUNNING:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"{spec.node} never listened: {found}")


async def test_an_actor_whose_place_is_gone_is_found_and_released(cluster: ThreeNodes) -> None:
    """As when the last step of a launch comes after its release. Ray would keep it waiting for ever."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from myelin_provider_ray.host import WorkerHost

    run = RunId(f"stray-{time.monotonic_ns()}")
    name = f"myelin.{run}.stage-0.1"
    group = placement_group([{"CPU": 1.0}], name=name, lifetime="detached")
    remove_placement_group(ray.util.get_placement_group(name))
    place = PlacementGroupSchedulingStrategy(group, 0)
    ray.remote(WorkerHost).options(name=name, lifetime="detached", num_cpus=1, scheduling_strategy=place).remote()
    section = RaySection(address=cluster.address)
    provider = RayProvider(ProviderContext(run, section, 1), driver=InProcess(20))
    (lease,) = await provider.leases()
    assert (lease.id, lease.state, lease.exit_reason) == (name, LeaseState.EXITED, "its place is gone")
    await provider.release(lease.id)
    assert cluster.actors() == set()
    assert await provider.leases() == ()
