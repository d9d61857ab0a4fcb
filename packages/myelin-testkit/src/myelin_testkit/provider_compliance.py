"""What every provider must do, as a test class: subclass :class:`ProviderCompliance` in a test module.

::

    class TestMyProvider(ProviderCompliance):
        features = frozenset({Feature.RECOVERY})

        def make_provider(self, run: RunId) -> Provider:
            return MyProvider(ProviderContext(run, MySection()))

Every sentence of :class:`myelin.plugin.Provider` is a test here. The nodes may be real workers or, much faster,
:mod:`myelin_testkit.tiny_worker`. What can't be asked of every provider is declared as a :class:`Feature`; a test of
one that isn't declared is skipped and says so.
"""

from __future__ import annotations

import asyncio
import traceback
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

import pytest
import pytest_asyncio
from pydantic import SecretStr

from myelin.plugin import (
    Attempt,
    BootSpec,
    Endpoint,
    LaunchKey,
    Lease,
    LeaseId,
    LeaseState,
    LogLine,
    MyelinError,
    Need,
    NodeId,
    Offer,
    Provider,
    ProviderError,
    RunId,
)

PLANTED = "planted-secret-f3b1c2"
"""Part of every secret that the suite gives to a node. It may be seen nowhere."""

NO_SUCH_TRANSPORT = "no-such-transport"
"""A node that is told to use it can't, and ends by itself with an error."""

TURNS = (0, 1, 2, 3, 4, 5, 6, 8, 11, 15, 25)
"""After how many turns of the event loop a launch is cancelled."""

PARTS = (0.01, 0.03, 0.1, 0.3, 0.6, 0.9)
"""After which part of :attr:`ProviderCompliance.launch_seconds` a launch is cancelled."""


class Feature(StrEnum):
    """What some providers have and others can't."""

    RECOVERY = "recovery"
    """Nodes outlive the provider object: a new one for the same run lists them, and releases them. Without it, nodes
    end with the process that started them, and the listing of a new object is empty and true."""
    DIALLED = "dialled"
    """An endpoint's candidates are TCP addresses that can be dialled from here."""
    UNREADABLE_LISTING = "unreadable-listing"
    """Where the provider keeps its list may be out of reach; see :meth:`ProviderCompliance.unreadable`."""
    FAILING_LAUNCH = "failing-launch"
    """A launch can fail; see :meth:`ProviderCompliance.failing_provider`."""


class Bench:
    """What a test works with: providers that are cleaned up after, and the usual waits.

    Attributes:
        run: A run of this test's own.
    """

    def __init__(self, suite: ProviderCompliance) -> None:
        self.run = RunId(f"kit-{uuid.uuid4().hex[:12]}")
        self._suite = suite
        self._made: list[Provider] = []

    def provider(self, run: RunId | None = None) -> Provider:
        """A new provider object, for this test's run unless another is given."""
        return self.keep(self._suite.make_provider(run or self.run))

    def keep(self, provider: Provider) -> Provider:
        """Have a provider cleaned up after."""
        self._made.append(provider)
        return provider

    def key(self, node: str = "stage-0", attempt: int = 1) -> LaunchKey:
        """A launch key of this test's run."""
        return LaunchKey(self.run, NodeId(node), Attempt(attempt))

    async def offer(self, provider: Provider) -> Offer:
        """The best offer for a small node; there must be one."""
        offers = await provider.offers(need())
        assert offers, "a provider under test must have an offer for a node of 1 MiB"
        return offers[0]

    async def launch(self, provider: Provider, key: LaunchKey | None = None, *, transport: str = "") -> Lease:
        """Start a node; ``transport`` may be :data:`NO_SUCH_TRANSPORT`."""
        key = key or self.key()
        boot = self._suite.make_boot(key, transport)
        async with asyncio.timeout(self._suite.patience):
            return await provider.launch(await self.offer(provider), boot, key=key)

    async def until(self, provider: Provider, lease: LeaseId, *states: LeaseState) -> Lease:
        """The lease once it is in one of ``states``."""
        last: Lease | None = None
        try:
            async with asyncio.timeout(self._suite.patience):
                while True:
                    last = await self.listed(provider, lease)
                    assert last is not None, f"a lease is listed until it is released; {lease} is not"
                    if last.state in states:
                        return last
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"the lease did not become {' or '.join(states)}: {last}") from None

    async def listed(self, provider: Provider, lease: LeaseId) -> Lease | None:
        """The lease as it is listed now, or None."""
        found = [each for each in await provider.leases() if each.id == lease]
        assert len(found) <= 1, f"{lease} is listed {len(found)} times"
        return found[0] if found else None

    async def logs(self, provider: Provider, lease: LeaseId) -> list[LogLine]:
        """All that the node wrote; it must have ended."""
        try:
            async with asyncio.timeout(self._suite.patience):
                return [line async for line in provider.logs(lease)]
        except TimeoutError:
            raise AssertionError("the logs of a node that has ended must end") from None

    async def clean_up(self) -> None:
        """Release everything and close every provider."""
        for provider in self._made:
            for lease in await provider.leases():
                await provider.release(lease.id)
            await provider.close()


def need(memory_bytes: int = 1 << 20, exclude: Collection[str] = ()) -> Need:
    """What a small node must have."""
    return Need(NodeId("stage-0"), memory_bytes, "cpu", frozenset(exclude))


class ProviderCompliance(ABC):
    """Subclass it as ``Test…`` and say how a provider is made.

    Attributes:
        features: What the provider has; see :class:`Feature`.
        patience: Seconds within which a node starts, or ends.
        launch_seconds: About how long a launch takes; it is cancelled at several moments within that.
    """

    features: ClassVar[Collection[Feature]] = frozenset({Feature.DIALLED})
    patience: ClassVar[float] = 60.0
    launch_seconds: ClassVar[float] = 0.1
    pytestmark = pytest.mark.asyncio

    @abstractmethod
    def make_provider(self, run: RunId) -> Provider:
        """A new provider object for ``run``, in an event loop that runs. It may be called again for the same run."""

    def make_boot(self, key: LaunchKey, transport: str = "") -> BootSpec:
        """What a node is told. Override it where the address to bind isn't for this machine to choose.

        Args:
            transport: Empty is one that works; keep any other as it is.
        """
        environment = {"TESTKIT_TOKEN": SecretStr(f"{PLANTED}-token")}
        secret = SecretStr(f"{PLANTED}-run")
        return BootSpec(key.run, key.node, key.attempt, secret, transport or "tcp", "cpu", environment=environment)

    def outside(self) -> Collection[object]:
        """All that is started, as seen without the provider: process ids, containers. Override it where you can."""
        return ()

    def unreadable(self, provider: Provider) -> AbstractContextManager[None]:
        """As long as it lasts, the list of nodes can't be read. For :attr:`Feature.UNREADABLE_LISTING`."""
        raise AssertionError("a suite that declares unreadable-listing overrides unreadable()")

    def failing_provider(self, run: RunId) -> Provider:
        """A provider with an offer, but whose launches fail. For :attr:`Feature.FAILING_LAUNCH`."""
        raise AssertionError("a suite that declares failing-launch overrides failing_provider()")

    @pytest_asyncio.fixture
    async def bench(self) -> AsyncIterator[Bench]:
        """Cleans up, and sees that nothing is left."""
        before = set(self.outside())
        bench = Bench(self)
        yield bench
        await bench.clean_up()
        await self._as_before(before, "releasing every lease must leave nothing")

    # Offers.

    async def test_offers_change_nothing(self, bench: Bench) -> None:
        provider = bench.provider()
        before = set(self.outside())
        first, second = await provider.offers(need()), await provider.offers(need())
        assert [offer.id for offer in first] == [offer.id for offer in second]
        assert list(await provider.leases()) == []
        assert set(self.outside()) == before

    async def test_offers_meet_the_need(self, bench: Bench) -> None:
        provider = bench.provider()
        offers = await provider.offers(need())
        assert offers
        assert len({offer.id for offer in offers}) == len(offers)
        for offer in offers:
            assert offer.id
            assert offer.provider
            assert offer.description, "an offer is described to people"
            assert "\n" not in offer.description
            assert offer.memory_bytes == 0 or offer.memory_bytes >= need().memory_bytes
            assert offer.dollars_per_hour >= 0
        for offer in await provider.offers(need(1 << 60)):
            assert offer.memory_bytes == 0, "what is known to be too small isn't offered"

    async def test_excluded_offers_are_not_made_again(self, bench: Bench) -> None:
        provider = bench.provider()
        excluded = (await bench.offer(provider)).id
        assert excluded not in {offer.id for offer in await provider.offers(need(exclude={excluded}))}

    # Launching.

    async def test_a_node_is_launched_listed_and_announces_itself(self, bench: Bench) -> None:
        provider = bench.provider()
        offer = await bench.offer(provider)
        lease = await bench.launch(provider)
        assert lease.id
        assert lease.key == bench.key()
        assert lease.offer == offer.id
        assert lease.dollars_per_hour == pytest.approx(offer.dollars_per_hour)
        assert lease.endpoint is None or lease.state is LeaseState.RUNNING, "no endpoint before it is announced"
        running = await bench.until(provider, lease.id, LeaseState.RUNNING)
        assert (running.key, running.offer) == (lease.key, lease.offer)
        assert running.endpoint is not None
        assert running.endpoint.candidates
        assert running.exit_reason == ""

    async def test_launching_a_key_again_gives_the_same_lease(self, bench: Bench) -> None:
        provider = bench.provider()
        first = await bench.launch(provider)
        started = set(self.outside())
        again = await bench.launch(provider)
        assert again.id == first.id
        assert [lease.id for lease in await provider.leases()] == [first.id]
        assert set(self.outside()) == started
        await bench.until(provider, first.id, LeaseState.RUNNING)
        assert (await bench.launch(provider)).id == first.id

    async def test_launching_a_key_several_times_at_once_starts_one_node(self, bench: Bench) -> None:
        provider = bench.provider()
        before = set(self.outside())
        leases = await asyncio.gather(*(bench.launch(provider) for _ in range(4)))
        assert len({lease.id for lease in leases}) == 1, "one key, one lease"
        assert len(await provider.leases()) == 1
        assert len(set(self.outside()) - before) <= 1

    async def test_the_key_of_a_node_that_has_ended_gives_that_lease(self, bench: Bench) -> None:
        """Another start is another attempt, and so another key: whoever launches again is told what became of it."""
        provider = bench.provider()
        lease = await bench.launch(provider, transport=NO_SUCH_TRANSPORT)
        ended = await bench.until(provider, lease.id, LeaseState.EXITED)
        assert await bench.launch(provider, transport=NO_SUCH_TRANSPORT) == ended

    async def test_another_attempt_and_another_node_are_other_leases(self, bench: Bench) -> None:
        provider = bench.provider()
        keys = [bench.key(), bench.key(attempt=2), bench.key("stage-1")]
        leases = await asyncio.gather(*(bench.launch(provider, key) for key in keys))
        assert len({lease.id for lease in leases}) == 3
        assert {lease.id: lease.key for lease in await provider.leases()} == {each.id: each.key for each in leases}
        await provider.release(leases[1].id)
        assert {lease.key for lease in await provider.leases()} == {keys[0], keys[2]}

    async def test_runs_are_apart(self, bench: Bench) -> None:
        lease = await bench.launch(bench.provider())
        other = bench.provider(RunId(f"{bench.run}-other"))
        assert lease.id not in {each.id for each in await other.leases()}, "a listing is of one run"

    @pytest.mark.parametrize("turns", TURNS)
    async def test_a_launch_cancelled_after_some_turns_leaves_nothing(self, bench: Bench, turns: int) -> None:
        async def wait() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        await self._cancelled_launch_leaves_nothing(bench, wait)

    @pytest.mark.parametrize("part", PARTS)
    async def test_a_launch_cancelled_after_a_part_of_its_time_leaves_nothing(self, bench: Bench, part: float) -> None:
        async def wait() -> None:
            await asyncio.sleep(part * self.launch_seconds)

        await self._cancelled_launch_leaves_nothing(bench, wait)

    async def _cancelled_launch_leaves_nothing(self, bench: Bench, wait: Callable[[], Awaitable[None]]) -> None:
        provider = bench.provider()
        offer, before = await bench.offer(provider), set(self.outside())
        launch = asyncio.create_task(provider.launch(offer, self.make_boot(bench.key()), key=bench.key()))
        await wait()
        launch.cancel()
        (result,) = await asyncio.gather(launch, return_exceptions=True)
        if isinstance(result, Lease):  # it was faster: then it is an ordinary lease
            assert await bench.listed(provider, result.id)
            return
        assert isinstance(result, asyncio.CancelledError), f"a cancelled launch ended with {result!r}"
        assert list(await provider.leases()) == [], "a cancelled launch leaves no lease"
        await self._as_before(before, "a cancelled launch leaves nothing started")
        assert (await bench.launch(provider)).key == bench.key(), "after it, the same key can be launched"

    async def test_one_of_two_callers_may_be_cancelled(self, bench: Bench) -> None:
        provider = bench.provider()
        first, second = (asyncio.create_task(bench.launch(provider)) for _ in range(2))
        for _ in range(3):
            await asyncio.sleep(0)
        first.cancel()
        lease = await second
        await asyncio.gather(first, return_exceptions=True)
        assert [each.id for each in await provider.leases()] == [lease.id], "the other caller has its node all the same"
        await bench.until(provider, lease.id, LeaseState.RUNNING)

    async def test_a_launch_that_fails_says_why_and_leaves_nothing(self, bench: Bench) -> None:
        self._needs(Feature.FAILING_LAUNCH)
        before = set(self.outside())
        provider = bench.keep(self.failing_provider(bench.run))
        results = await asyncio.gather(*(bench.launch(provider) for _ in range(2)), return_exceptions=True)
        for error in results:
            assert isinstance(error, ProviderError), f"a launch fails with a ProviderError, not with {error!r}"
            _for_people(error)
        assert list(await provider.leases()) == []
        await self._as_before(before, "a launch that fails leaves nothing started")

    # Listing.

    async def test_a_new_object_finds_what_an_old_one_started(self, bench: Bench) -> None:
        """Or, where nodes end with the process that started them, lists nothing, which then is the truth."""
        old = bench.provider()
        lease = await bench.launch(old)
        running = await bench.until(old, lease.id, LeaseState.RUNNING)
        new = bench.provider()
        if Feature.RECOVERY not in self.features:
            assert list(await new.leases()) == [], "a provider without recovery must not claim another object's nodes"
            return
        found = await bench.until(new, lease.id, LeaseState.RUNNING)
        assert found == running, "the listing alone is enough to rebuild after a crash"
        assert (await bench.launch(new)).id == lease.id, "launching stays idempotent across a restart"
        await new.release(lease.id)
        assert await bench.listed(new, lease.id) is None
        assert await bench.listed(old, lease.id) is None

    async def test_closing_touches_no_node(self, bench: Bench) -> None:
        provider = bench.provider()
        lease = await bench.launch(provider)
        running = await bench.until(provider, lease.id, LeaseState.RUNNING)
        started = set(self.outside())
        await provider.close()
        await provider.close()
        assert set(self.outside()) == started
        if Feature.DIALLED in self.features:
            assert running.endpoint is not None
            assert await dialled(running.endpoint), "a closed provider's nodes go on"
        if Feature.RECOVERY in self.features:
            assert await bench.listed(bench.provider(), lease.id) == running

    async def test_an_unreadable_listing_is_an_error_and_never_empty(self, bench: Bench) -> None:
        self._needs(Feature.UNREADABLE_LISTING)
        provider = bench.provider()
        lease = await bench.launch(provider)
        with self.unreadable(provider):
            with pytest.raises(ProviderError) as caught:
                await provider.leases()
            _for_people(caught.value)
            second = bench.launch(provider, bench.key("stage-1"))
            results = await asyncio.gather(
                second, provider.offers(need()), provider.release(LeaseId("no-such-lease")), return_exceptions=True
            )
            for result in results:
                assert not isinstance(result, Exception) or isinstance(result, MyelinError), (
                    f"only MyelinError comes out of a provider, not {result!r}"
                )
        known = {lease.id} | ({results[0].id} if isinstance(results[0], Lease) else set())
        assert {each.id for each in await provider.leases()} == known, "nothing was lost, and nothing left, meanwhile"

    # Endings.

    async def test_a_released_node_is_gone(self, bench: Bench) -> None:
        provider = bench.provider()
        before = set(self.outside())
        lease = await bench.launch(provider)
        running = await bench.until(provider, lease.id, LeaseState.RUNNING)
        assert running.endpoint is not None
        if Feature.DIALLED in self.features:
            assert await dialled(running.endpoint), f"nobody listens on {running.endpoint}"
        await provider.release(lease.id)
        assert list(await provider.leases()) == []
        assert set(self.outside()) <= before, "release returns once the node is gone"
        if Feature.DIALLED in self.features:
            assert not await dialled(running.endpoint), "somebody still listens where the released node did"

    async def test_releasing_what_is_not_there_succeeds(self, bench: Bench) -> None:
        provider = bench.provider()
        await provider.release(LeaseId("no-such-lease"))
        lease = await bench.launch(provider)
        await asyncio.gather(*(provider.release(lease.id) for _ in range(3)))
        await provider.release(lease.id)
        assert list(await provider.leases()) == []

    async def test_a_release_that_was_cancelled_can_be_made_again(self, bench: Bench) -> None:
        provider = bench.provider()
        lease = await bench.launch(provider)
        await bench.until(provider, lease.id, LeaseState.RUNNING)
        release = asyncio.create_task(provider.release(lease.id))
        for _ in range(2):
            await asyncio.sleep(0)
        release.cancel()
        await asyncio.gather(release, return_exceptions=True)
        await provider.release(lease.id)
        assert list(await provider.leases()) == []

    async def test_an_ended_node_is_listed_with_its_reason_until_it_is_released(self, bench: Bench) -> None:
        provider = bench.provider()
        lease = await bench.launch(provider, transport=NO_SUCH_TRANSPORT)
        ended = await bench.until(provider, lease.id, LeaseState.EXITED)
        assert ended.exit_reason, "an exit has a reason, for people"
        assert "\n" not in ended.exit_reason
        assert ended.key == bench.key()
        await asyncio.sleep(0.1)
        assert await bench.listed(provider, lease.id) == ended
        await provider.release(lease.id)
        assert list(await provider.leases()) == []

    # Logs.

    async def test_logs_tell_what_the_node_wrote_and_end_when_it_ends(self, bench: Bench) -> None:
        provider = bench.provider()
        lease = await bench.launch(provider, transport=NO_SUCH_TRANSPORT)
        await bench.until(provider, lease.id, LeaseState.EXITED)
        lines = await bench.logs(provider, lease.id)
        assert any(NO_SUCH_TRANSPORT in line.text for line in lines), "the node's own error must be among its logs"
        for line in lines:
            assert line.stream in ("stdout", "stderr", "provider")
            assert "\n" not in line.text
            assert line.time > 1.6e9, "times are Unix seconds"
        assert await bench.logs(provider, lease.id) == lines, "a later reader gets them from the beginning too"

    async def test_logs_follow_a_running_node_to_its_release(self, bench: Bench) -> None:
        provider = bench.provider()
        lease = await bench.launch(provider)
        following = asyncio.create_task(bench.logs(provider, lease.id))
        await bench.until(provider, lease.id, LeaseState.RUNNING)
        assert not following.done(), "logs go on as long as the node does"
        await provider.release(lease.id)
        await following

    async def test_a_reader_of_logs_may_leave(self, bench: Bench) -> None:
        provider = bench.provider()
        lease = await bench.launch(provider)
        await bench.until(provider, lease.id, LeaseState.RUNNING)
        reader = asyncio.create_task(bench.logs(provider, lease.id))
        await asyncio.sleep(0.05)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await bench.until(provider, lease.id, LeaseState.RUNNING)

    async def test_logs_of_an_unknown_lease_end(self, bench: Bench) -> None:
        provider = bench.provider()
        try:
            assert await bench.logs(provider, LeaseId("no-such-lease")) == []
        except MyelinError as error:
            _for_people(error)

    # Secrets.

    async def test_no_secret_is_told(self, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(0)
        provider = bench.provider()
        offers = await provider.offers(need())
        leases = [
            await bench.launch(provider),
            await bench.launch(provider, bench.key("x"), transport=NO_SUCH_TRANSPORT),
        ]
        leases.append(await bench.until(provider, leases[0].id, LeaseState.RUNNING))
        leases.append(await bench.until(provider, leases[1].id, LeaseState.EXITED))
        seen = {"repr": repr(provider), "offers": repr(offers), "leases": repr(leases), "argv": _command_lines()}
        lines = await bench.logs(provider, leases[1].id)
        await provider.release(leases[0].id)
        seen |= {"logs": repr(lines), "log records": caplog.text}
        for place, text in seen.items():
            assert PLANTED not in text, f"a secret is seen in {place}"

    async def test_no_secret_is_told_by_a_failure(self, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
        self._needs(Feature.FAILING_LAUNCH)
        caplog.set_level(0)
        with pytest.raises(ProviderError) as caught:
            await bench.launch(bench.keep(self.failing_provider(bench.run)))
        told = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + caught.value.hint
        assert PLANTED not in told + caplog.text

    def _needs(self, feature: Feature) -> None:
        if feature not in self.features:
            pytest.skip(f"the provider does not declare {feature}")

    async def _as_before(self, before: Collection[object], why: str) -> None:
        """What is there, seen from outside, is no more than before; the system may take a moment to say so."""
        deadline = asyncio.get_running_loop().time() + self.patience
        while asyncio.get_running_loop().time() < deadline:
            if set(self.outside()) <= set(before):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{why}: {set(self.outside()) - set(before)} is left")


async def dialled(endpoint: Endpoint) -> bool:
    """Whether somebody takes a TCP connection at one of the candidates."""
    for candidate in endpoint.candidates:
        host, _, port = candidate.rpartition(":")
        try:
            async with asyncio.timeout(2):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            continue
        writer.close()
        return True
    return False


def _for_people(error: MyelinError) -> None:
    assert error.message
    assert "\n" not in error.message
    assert error.reason
    assert PLANTED not in error.message + error.hint


def _command_lines() -> str:
    """The command line of every process, which everybody on the machine may read (on Linux)."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline") if Path("/proc").is_dir() else ():
        try:
            found.append(entry.read_bytes().decode(errors="replace"))
        except OSError:
            continue  # it has ended meanwhile
    return "\n".join(found)
