"""Launching and releasing: retries, deadlines, cancellation, and a provider that lies low."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from pydantic import SecretStr

from myelin.cluster.executor import Executor, LaunchTimes
from myelin.cluster.exits import exit_error, telling_text
from myelin.cluster.provider import BootSpec, LaunchKey, Lease, LeaseState, LogLine, Need, Offer
from myelin.cluster.spec import NodeSpec
from myelin.errors import ConfigError, ProviderError
from myelin.values import Attempt, LeaseId, NodeId, RunId

QUICK = LaunchTimes(launch=0.3, release=1.0, wait=0.01)


class FakeProvider:
    """Leases in a table; anything may be told to fail a number of times."""

    def __init__(self) -> None:
        self.table: dict[LeaseId, Lease] = {}
        self.offered = [Offer("a", "fake", "first"), Offer("b", "fake", "second")]
        self.launch_failures: list[Exception | float] = []
        self.listing_failures: list[Exception] = []
        self.release_failures: list[Exception] = []
        self.launched_on: list[str] = []
        self.boots: list[BootSpec] = []
        self.needs: list[Need] = []
        self.sticky = 0

    async def offers(self, need: Need) -> Sequence[Offer]:
        self.needs.append(need)
        return [offer for offer in self.offered if offer.id not in need.exclude]

    async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
        self.launched_on.append(offer.id)
        if self.launch_failures:
            failure = self.launch_failures.pop(0)
            if isinstance(failure, float):
                await asyncio.sleep(failure)
            else:
                raise failure
        self.boots.append(boot)
        lease = Lease(LeaseId(str(key)), key, LeaseState.STARTING, offer.id)
        self.table[lease.id] = lease
        return lease

    async def leases(self) -> Sequence[Lease]:
        if self.listing_failures:
            raise self.listing_failures.pop(0)
        return list(self.table.values())

    async def release(self, lease: LeaseId) -> None:
        if self.release_failures:
            raise self.release_failures.pop(0)
        if self.sticky:
            self.sticky -= 1
        else:
            self.table.pop(lease, None)

    async def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        for text in ("one", "two"):
            yield LogLine("stdout", text, 0.0)

    async def close(self) -> None:
        self.offered.clear()


def spec(node: str = "stage-0") -> NodeSpec:
    return NodeSpec(RunId("run"), NodeId(node), 5 << 20, "cpu", "memory", SecretStr("s"), {"A": SecretStr("1")})


async def gone(provider: FakeProvider, lease: Lease) -> None:
    """Return once the provider doesn't list a lease any more."""
    for _ in range(6000):
        if lease.id not in provider.table:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{lease.id} is still there")


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
def executor(provider: FakeProvider) -> Executor:
    return Executor(provider, "fake", QUICK)


async def test_a_node_is_told_who_it_is(provider: FakeProvider, executor: Executor) -> None:
    lease = await executor.launch(spec())
    assert lease.key == LaunchKey(RunId("run"), NodeId("stage-0"), Attempt(1))
    (boot,) = provider.boots
    assert (boot.run, boot.node, boot.attempt, boot.engine, boot.transport) == ("run", "stage-0", 1, "cpu", "memory")
    assert boot.secret.get_secret_value() == "s"
    assert boot.environment["A"].get_secret_value() == "1"
    assert provider.needs[0].memory_bytes == 5 << 20


async def test_a_failed_launch_is_tried_on_another_offer_as_another_attempt(
    provider: FakeProvider, executor: Executor
) -> None:
    provider.launch_failures = [ProviderError("broken machine")]
    lease = await executor.launch(spec())
    assert provider.launched_on == ["a", "b"]
    assert lease.key.attempt == 2


async def test_where_every_offer_has_failed_the_best_is_tried_again(provider: FakeProvider, executor: Executor) -> None:
    provider.offered = provider.offered[:1]
    provider.launch_failures = [ProviderError("once"), ProviderError("twice")]
    assert (await executor.launch(spec())).key.attempt == 3
    assert provider.launched_on == ["a", "a", "a"]


async def test_the_last_error_is_told(provider: FakeProvider, executor: Executor) -> None:
    provider.launch_failures = [ProviderError("one"), ProviderError("two"), ProviderError("three")]
    with pytest.raises(ProviderError, match="three"):
        await executor.launch(spec())
    assert provider.table == {}


@pytest.mark.parametrize("error", [ConfigError("no credentials"), ValueError("a mistake")])
async def test_what_another_try_cannot_mend_is_not_tried_again(
    provider: FakeProvider, executor: Executor, error: Exception
) -> None:
    provider.launch_failures = [error]
    with pytest.raises(type(error)):
        await executor.launch(spec())
    assert len(provider.launched_on) == 1


async def test_a_launch_that_hangs_is_given_up_and_tried_again(provider: FakeProvider, executor: Executor) -> None:
    provider.launch_failures = [30.0]
    assert (await executor.launch(spec())).key.attempt == 2


async def test_nothing_on_offer_says_what_was_needed(provider: FakeProvider, executor: Executor) -> None:
    provider.offered = []
    with pytest.raises(ProviderError, match="stage-0, which needs 5 MiB") as raised:
        await executor.launch(spec())
    assert raised.value.reason == "no-offer"
    assert len(provider.needs) == 1


async def test_releasing_everything_includes_what_only_the_provider_knows(
    provider: FakeProvider, executor: Executor
) -> None:
    await executor.launch(spec())
    stray = LaunchKey(RunId("run"), NodeId("stage-7"), Attempt(1))
    provider.table[LeaseId("stray")] = Lease(LeaseId("stray"), stray, LeaseState.RUNNING)
    await executor.release_all()
    assert provider.table == {}


async def test_released_is_believed_only_once_a_listing_says_so(provider: FakeProvider, executor: Executor) -> None:
    await executor.launch(spec())
    provider.sticky = 2
    await executor.release_all()
    assert provider.table == {}
    assert provider.sticky == 0


async def test_an_unreadable_listing_is_unknown_and_never_empty(provider: FakeProvider, executor: Executor) -> None:
    await executor.launch(spec())
    provider.listing_failures = [ProviderError("unreadable")]
    provider.release_failures = [ProviderError("not now")]
    await executor.release_all()
    assert provider.table == {}
    provider.listing_failures = [ProviderError("unreadable")] * 100
    with pytest.raises(ProviderError, match="unreadable") as raised:
        await executor.release_all()
    assert raised.value.reason == "release-failed"


async def test_a_replacement_that_dies_stays_listed_until_somebody_has_seen_why(
    provider: FakeProvider, executor: Executor
) -> None:
    lost = await executor.launch(spec())
    provider.sticky = 4  # the lost one takes its time to go
    second = await executor.replace(spec(), lost, "it fell silent")
    assert (second.key.attempt, second.offer) == (2, "b")
    provider.table[second.id] = replace(second, state=LeaseState.EXITED, exit_reason="no luck")
    await gone(provider, lost)
    assert provider.table[second.id].state is LeaseState.EXITED
    third = await executor.replace(spec(), provider.table[second.id], "no luck")
    assert third.key.attempt == 3
    assert {intent.attempt: intent.failure for intent in executor.intents} == {
        1: "it fell silent",
        2: "no luck",
        3: "",
    }
    await executor.release_all()
    assert provider.table == {}
    await executor.close()


async def test_a_lease_that_is_in_no_book_can_be_adopted(provider: FakeProvider, executor: Executor) -> None:
    assert await executor.adopt(spec()) is None
    key = LaunchKey(RunId("run"), NodeId("stage-0"), Attempt(4))
    await provider.launch(provider.offered[0], spec().boot(Attempt(4)), key=key)
    adopted = await executor.adopt(spec())
    assert adopted is not None
    assert adopted.key == key
    assert (await executor.replace(spec(), adopted, "gone")).key.attempt == 5


async def test_watching_skips_listings_that_cannot_be_read(provider: FakeProvider, executor: Executor) -> None:
    lease = await executor.launch(spec())
    provider.listing_failures = [ProviderError("unreadable")]
    seen: asyncio.Queue[Sequence[Lease]] = asyncio.Queue()
    watching = asyncio.create_task(executor.watch(seen.put_nowait))
    try:
        async with asyncio.timeout(60):
            assert list(await seen.get()) == [lease]
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_lost_node_is_given_back_and_another_offer_is_taken(provider: FakeProvider, executor: Executor) -> None:
    lost = await executor.launch(spec())
    lease = await executor.replace(spec(), lost, "it was killed")
    assert (lost.offer, lease.offer, lease.key.attempt) == ("a", "b", 2)
    assert list(provider.table) == [lease.id]
    provider.offered = provider.offered[:1]
    assert (await executor.replace(spec(), lease, "again")).offer == "a"


async def test_a_node_that_cannot_be_given_back_does_not_hold_its_replacement(
    provider: FakeProvider, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myelin.cluster.executor.RELEASE_HEAD_START_S", 0.05)
    lost = await executor.launch(spec())
    provider.release_failures = [ProviderError("not now")]
    second = await executor.replace(spec(), lost, "it was stopped")
    assert second.key.attempt == 2
    await gone(provider, lost)
    release = provider.release

    async def stuck(lease: LeaseId) -> None:
        await asyncio.sleep(30)

    provider.release = stuck
    third = await executor.replace(spec(), second, "it is stuck")
    assert third.key.attempt == 3
    assert set(provider.table) == {second.id, third.id}
    # Two that can't be given back are too many.
    with pytest.raises(ProviderError, match=r"two earlier starts are still there|it is stuck"):
        await executor.replace(spec(), third, "it is stuck, too")
    assert set(provider.table) == {second.id, third.id}
    provider.release = release
    for task in executor._calls._releasing.values():
        task.cancel()
    await executor.release_all()
    assert provider.table == {}
    await executor.close()


async def test_what_an_earlier_orchestrator_left_is_adopted(provider: FakeProvider) -> None:
    earlier = Executor(provider, "fake", QUICK)
    old, new = await earlier.launch(spec()), await earlier.launch(spec())
    executor = Executor(provider, "fake", QUICK)
    assert await executor.adopt(spec()) == new
    assert await executor.adopt(spec("stage-1")) is None
    for lease in (old, new):
        provider.table[lease.id] = Lease(lease.id, lease.key, LeaseState.EXITED)
    assert await executor.adopt(spec()) is None
    assert (await executor.launch(spec())).key.attempt == 3
    await executor.release_all()
    assert provider.table == {}


async def test_a_lease_can_be_looked_up(provider: FakeProvider, executor: Executor) -> None:
    lease = await executor.launch(spec())
    assert await executor.lease(lease.id) == lease
    assert await executor.lease(LeaseId("nobody")) is None
    provider.listing_failures = [ProviderError("unreadable")]
    assert await executor.lease(lease.id) is None
    assert [line.text async for line in executor.logs(lease.id)] == ["one", "two"]


def test_an_exit_says_why_and_what_the_node_said_last() -> None:
    key = LaunchKey(RunId("run"), NodeId("stage-1"), Attempt(1))
    lease = Lease(LeaseId("x"), key, LeaseState.EXITED, exit_reason="exit code 3")
    error = exit_error(lease, ["before", "  the end ", ""], "while it started")
    assert error.message == "stage-1 ended while it started (exit code 3); its last words: the end"
    assert "before\nthe end" in error.__notes__[0]
    bare = exit_error(Lease(LeaseId("x"), key, LeaseState.EXITED), (), "while it served")
    assert bare.message == "stage-1 ended while it served (no reason given)"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("Killed", "Killed"),
        ('{"event": "edges open", "level": "info"}', ""),
        ('{"event": "a stream was refused", "level": "warning"}', ""),
        ('{"event": "failed", "message": "no room", "level": "error"}', "failed: no room"),
        ('{"a": 1}', '{"a": 1}'),
        ("{not json", "{not json"),
        ("[1]", "[1]"),
        ("Fatal Python error: Aborted", "Fatal Python error: Aborted"),
        ("Current thread 0x00007f (most recent call first):", ""),
        ("Thread 0x00007f (most recent call first):", ""),
        ('File "/x.py", line 1 in load', ""),
        ("<no Python frame>", ""),
        ("Extension modules: numpy, uvloop.loop (total: 2)", ""),
    ],
)
def test_only_lines_that_tell_of_an_end_are_last_words(line: str, text: str) -> None:
    assert telling_text(line) == text
