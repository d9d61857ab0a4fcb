"""A launch that was broken off: whatever its orchestrator had come to when it was killed, the next one gets its stage.

The cluster is a table in memory; no Ray is needed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import SecretStr

from myelin.cluster.executor import Executor, LaunchTimes
from myelin.cluster.intents import Intent, inherited
from myelin.cluster.spec import NodeSpec
from myelin.plugin import Attempt, LaunchKey, LeaseState, NodeId, ProviderContext, RunId, read_boot_line
from myelin_provider_ray.names import write_name
from myelin_provider_ray.provider import RayProvider
from myelin_provider_ray.section import RaySection

RUN, NODE = RunId("run"), NodeId("stage-0")
NAME = write_name(LaunchKey(RUN, NODE, Attempt(1)))
SPEC = NodeSpec(RUN, NODE, 1 << 20, "cpu", "tcp", SecretStr("planted"))


@dataclass
class Actor:
    """One stage's host: ``silent`` looks until its process is up, ``starting`` looks until its worker listens."""

    booted: bool = False
    stopped: bool = False
    silent: int = 0
    starting: int = 2
    secrets: list[str] = field(default_factory=list)

    def boot(self, line: str) -> None:
        if not self.booted:
            self.secrets.append(read_boot_line(line.encode()).secret.get_secret_value())
        self.booted = True

    def look(self) -> dict[str, Any]:
        if self.silent:
            self.silent -= 1
            return {"silent": True}
        self.starting -= self.booted and self.starting > 0
        endpoint = ["10.0.0.1:7"] if self.booted and not self.starting else []
        told = {"booted": self.booted, "endpoint": endpoint, "ended": self.stopped, "status": None, "last": ""}
        return {"worker": told | {"failure": "it was stopped" if self.stopped else "", "kills": 0}}


class Table:
    """A cluster of two nodes, and the calls of the bridge."""

    def __init__(self) -> None:
        self.groups: dict[str, str] = {}
        self.actors: dict[str, Actor] = {}

    async def call(self, name: str, /, *, timeout_s: float = 0.0, **arguments: Any) -> Any:
        return getattr(self, name)(**arguments)

    async def close(self) -> None:
        """There is nothing to close."""

    def snapshot(self) -> dict[str, Any]:
        amounts = {"CPU": 4.0, "memory": 4e9}
        nodes = [
            {"NodeID": id, "NodeManagerAddress": f"10.0.0.{n}", "Alive": True, "Resources": amounts, "Labels": {}}
            for n, id in enumerate("ab")
        ]
        groups = [
            {
                "placement_group_id": f"id of {name}",
                "name": name,
                "state": "CREATED",
                "bundles": {0: {"CPU": 1.0, "memory": 4e8}},
                "bundles_to_node_id": {0: node},
            }
            for name, node in self.groups.items()
        ]
        free = {"a": amounts, "b": amounts}
        named = {"actors": list(self.actors), "actors_before": list(self.actors)}
        return {"nodes": nodes, "free": free, "groups": groups, "answering": {}, "draining": {}, **named} | {
            "autoscaling": False
        }

    def create(self, name: str, selector: dict[str, str], line: str, **more: Any) -> dict[str, Any]:
        self.groups[name] = selector["ray.io/node-id"]
        self.actors.setdefault(name, Actor()).boot(line)
        return {"made": True}

    def boot(self, name: str, line: str, bind: str) -> None:
        if name in self.actors:
            self.actors[name].boot(line)

    def look(self, names: list[str]) -> dict[str, Any]:
        return {name: self.actors[name].look() if name in self.actors else {"absent": True} for name in names}

    def obituaries(self, names: list[str]) -> dict[str, Any]:
        return {}

    def lines(self, name: str, after: int) -> None:
        return None

    def remove(self, name: str, grace_s: float, group: str) -> None:
        self.groups.pop(name, None)
        self.actors.pop(name, None)


class Book:
    """What the killed orchestrator had noted before it called the provider."""

    def intents(self) -> tuple[Intent, ...]:
        return (inherited(Intent(NODE, offer="a"), time.time()),)

    def put(self, intent: Intent) -> None:
        """It is forgotten with the test."""

    def close(self, *, ended: bool) -> None:
        self.ended = ended


@pytest.mark.parametrize(
    ("left", "attempt"),
    [
        pytest.param((None, None), 2, id="before there was a place"),
        pytest.param(("a", None), 2, id="before there was an actor"),
        pytest.param(("a", Actor(silent=3)), 1, id="before its actor's process was up"),
        pytest.param(("a", Actor()), 1, id="before its boot line was sent"),
        pytest.param(("a", Actor(booted=True)), 1, id="before its worker listened"),
        pytest.param(("a", Actor(booted=True, starting=0)), 1, id="when its worker listened"),
        pytest.param(("a", Actor(stopped=True)), 2, id="while it was released"),
        pytest.param((None, Actor()), 2, id="after its place was released"),
    ],
)
async def test_a_launch_that_was_broken_off_is_finished_or_made_anew(
    left: tuple[str | None, Actor | None], attempt: int
) -> None:
    table, (place, actor) = Table(), left
    if place is not None:
        table.groups[NAME] = place
    if actor is not None:
        table.actors[NAME] = actor
    already = actor is not None and actor.booted
    provider = RayProvider(ProviderContext(RUN, RaySection(), 1), driver=table)
    executor = Executor(provider, "ray", LaunchTimes(launch=5, release=5), book := Book())
    lease = await executor.adopt(SPEC) or await executor.launch(SPEC)
    assert lease.key.attempt == attempt
    for _ in range(20):
        found = await executor.lease(lease.id)
        assert found is not None
        assert found.state is not LeaseState.EXITED
        if found.state is LeaseState.RUNNING:
            break
    assert found.state is LeaseState.RUNNING, f"it never listened: {found.detail}"
    (name,) = table.actors
    assert name == lease.id
    assert table.actors[name].secrets == ([] if already else ["planted"]), "once, and never to one that has it"
    await executor.release_all()
    assert (table.groups, table.actors) == ({}, {})
    await executor.close()
    assert book.ended


async def test_what_is_less_than_a_stage_is_listed_so_that_it_is_released() -> None:
    table = Table()
    place, stray = (LaunchKey(RUN, NODE, Attempt(number)) for number in (1, 2))
    table.groups[write_name(place)] = "a"
    table.actors[write_name(stray)] = Actor()
    provider = RayProvider(ProviderContext(RUN, RaySection(), 1), driver=table)
    leases = await provider.leases()
    assert [(each.key, each.state, each.exit_reason) for each in leases] == [
        (place, LeaseState.EXITED, "its actor is gone"),
        (stray, LeaseState.EXITED, "its place is gone"),
    ]
    assert {each.key for each in await provider.all_leases()} == {place, stray}
    for each in leases:
        await provider.release(each.id)
    assert (table.groups, table.actors) == ({}, {})


async def test_an_actor_that_is_not_ours_to_boot_is_left_alone() -> None:
    """Whoever only looks (`myelin status`) has no boot line, and doesn't make one up."""
    table = Table()
    table.groups[NAME], table.actors[NAME] = "a", Actor()
    provider = RayProvider(ProviderContext(RUN, RaySection(), 1), driver=table)
    (lease,) = await provider.leases()
    assert (lease.state, lease.detail) == (LeaseState.STARTING, "its actor has not been told what to start")
    assert not table.actors[NAME].booted
