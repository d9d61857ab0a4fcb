"""The real executor, the real ledger and a provider that fails: killed at every step, started again, nothing left.

A kill is an exception that nothing handles, after which the book and the provider of that orchestrator are dead.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from myelin.cluster.executor import Executor, LaunchTimes
from myelin.cluster.intents import Intent, IntentState
from myelin.cluster.ledger import Ledger, RunBook, RunRecord
from myelin.cluster.provider import BootSpec, LaunchKey, Lease, Need, Offer
from myelin.cluster.spec import NodeSpec
from myelin.errors import ProviderError
from myelin.values import LeaseId, NodeId, RunId
from myelin_testkit.memory_provider import (
    Announce,
    Cloud,
    Fail,
    Fault,
    Hang,
    Ignored,
    Late,
    LostAnswer,
    Machine,
    MemoryProvider,
    Operation,
    Say,
    Twice,
)

RUN = RunId("storm")
LAG_S = 0.03
TIMES = LaunchTimes(launch=0.15, release=10.0, wait=0.005, settle=0.05, listing=0.02)
NODES = 2


class Killed(BaseException):
    """The orchestrator, at this step."""


class Fate:
    """Counts the steps of one orchestrator, and kills it at one of them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.steps = 0
        self.dead = False

    def step(self) -> None:
        """One more."""
        self.steps += 1
        if self.dead or self.steps == self.at:
            self.dead = True
            raise Killed


class MortalBook:
    """The ledger's book, as long as its orchestrator lives."""

    def __init__(self, book: RunBook, fate: Fate) -> None:
        self._book, self._fate = book, fate

    def intents(self) -> tuple[Intent, ...]:
        return self._book.intents()

    def put(self, intent: Intent) -> None:
        self._fate.step()
        self._book.put(intent)
        self._fate.step()

    def close(self, *, ended: bool) -> None:
        self._fate.step()
        self._book.close(ended=ended)


class MortalProvider(MemoryProvider):
    """A provider whose calls are places to be killed at, before they happen and after."""

    def __init__(self, cloud: Cloud, fate: Fate) -> None:
        super().__init__(RUN, cloud)
        self._fate = fate

    async def offers(self, need: Need) -> Sequence[Offer]:
        self._fate.step()
        return await super().offers(need)

    async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
        self._fate.step()
        lease = await super().launch(offer, boot, key=key)
        self._fate.step()
        return lease

    async def leases(self) -> Sequence[Lease]:
        """What is younger than the listings' lag may not be listed yet."""
        self._fate.step()
        assert isinstance(self.cloud, StrictCloud)
        listed = await super().leases()
        shown = self.cloud.clock.time() - self.cloud.lag()
        return [lease for lease in listed if self.cloud.running[lease.id].started <= shown]

    async def release(self, lease: LeaseId) -> None:
        self._fate.step()
        await super().release(lease)
        self._fate.step()


class StrictCloud(Cloud):
    """Starts no machine that the rules forbid."""

    def __init__(self, ledger: Ledger) -> None:
        async def life(boot: BootSpec, announce: Announce, say: Say) -> None:
            await asyncio.Event().wait()

        super().__init__(life)
        self.offers = [Offer(name, "memory", name, dollars_per_hour=1.0) for name in ("a", "b", "c", "d")]
        self.violations: list[str] = []
        self.lag: Callable[[], float] = lambda: 0.0
        self._ledger = ledger

    def start(self, offer: Offer, boot: BootSpec, key: LaunchKey) -> Machine:
        noted = {(intent.node, intent.attempt): intent for intent in self._ledger.intents(RUN)}
        mine = noted.get((key.node, key.attempt))
        if mine is None or mine.state is not IntentState.INTENDED:
            self.violations.append(f"{key} without an intent")
        others = {m.key.attempt for m in self.running.values() if m.key.node == key.node and m.key != key}
        for attempt in others:
            theirs = noted[key.node, attempt]
            if not theirs.served or mine is None or theirs.generation >= mine.generation:
                self.violations.append(f"{key} beside {theirs}")
        if len(others) > 1:
            self.violations.append(f"{key} beside {others}")
        return super().start(offer, boot, key)


def spec(index: int) -> NodeSpec:
    return NodeSpec(RUN, NodeId(f"stage-{index}"), 1, "cpu", "memory", SecretStr("s"))


class Lives:
    """A run, over as many orchestrators as it takes."""

    def __init__(self, folder: Path, faults: random.Random | None = None) -> None:
        self.ledger = Ledger(folder)
        self.cloud = StrictCloud(self.ledger)
        self.faults = faults
        if faults is not None:
            self.cloud.faults.ask = self.fault
            self.cloud.lag = lambda: faults.choice([0.0, 0.0, LAG_S])

    def fault(self, operation: Operation) -> Fault | None:
        assert self.faults is not None
        if self.faults.random() > 0.25:
            return None
        kinds: dict[str, list[Fault]] = {
            "offers": [Fail()],
            "launch": [Fail(), Hang(), Late(0.02), LostAnswer(), LostAnswer(0.02), Twice()],
            "leases": [Fail(), Late(0.02), LostAnswer()],
            "release": [Fail(), Ignored(), Late(0.02), LostAnswer()],
        }
        return self.faults.choice(kinds[operation])

    async def live(self, kill_at: int) -> Fate:
        """One orchestrator: takes or launches the nodes, replaces one, ends everything; or is killed."""
        fate = Fate(kill_at)
        record = RunRecord(RUN, "memory", "toy", NODES, SecretStr("s"))
        book = MortalBook(self.ledger.open_run(record), fate)
        executor = Executor(MortalProvider(self.cloud, fate), "memory", TIMES, book)
        story = asyncio.create_task(self.tell(executor))
        try:
            await story
        except Killed:
            pass
        finally:
            fate.dead = True
            others = [task for task in asyncio.all_tasks() if not task.get_name().startswith("node ")]
            for task in others:
                if task is not asyncio.current_task() and task.get_coro().__qualname__.startswith("Executor."):
                    task.cancel()
            await asyncio.sleep(0)
        return fate

    async def tell(self, executor: Executor) -> None:
        async def up(node: NodeSpec) -> Lease:
            for tries in itertools.count():
                try:
                    return await executor.adopt(node) or await executor.launch(node)
                except ProviderError:
                    if tries == 9:
                        raise
            raise AssertionError

        try:
            leases = [await up(spec(0)), *await asyncio.gather(*(up(spec(index)) for index in range(1, NODES)))]
            self.cloud.kill(leases[0].id)
            await again(lambda: executor.replace(spec(0), leases[0], "it fell silent"))
            assert executor.spend().dollars_per_hour >= NODES
        finally:
            await again(executor.release_all)
            await executor.close()

    def check(self) -> None:
        """What must be true once an orchestrator has come to its own end."""
        assert self.cloud.violations == []
        assert self.cloud.running == {}
        (run,) = self.ledger.runs()
        assert run.ended
        assert [intent for intent in self.ledger.intents(RUN) if intent.open] == []


async def again(work: Any) -> Any:
    """Do it, and once more where the provider had a bad day."""
    for tries in itertools.count():
        try:
            return await work()
        except ProviderError:
            if tries == 9:
                raise
    raise AssertionError


async def test_killed_at_every_step_and_started_again(tmp_path: Path) -> None:
    for step in itertools.count(1):
        lives = Lives(tmp_path / str(step))
        first = await lives.live(step)
        if first.steps < step:
            lives.check()
            break
        await lives.live(0)
        lives.check()
    assert step > 40


@pytest.mark.parametrize("seed", range(30))
async def test_storms_leave_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    lives = Lives(tmp_path, chance)
    for _ in range(chance.randint(0, 4)):
        await lives.live(chance.randint(1, 60))
    await lives.live(0)
    lives.check()
