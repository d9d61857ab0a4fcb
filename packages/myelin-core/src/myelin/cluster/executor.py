"""Doing to a provider what the orchestrator has decided: launching nodes, watching them start, releasing them.

Nothing is left behind: whatever is cancelled or fails, :meth:`Executor.release_all` ends every node of the run that the
provider lists, and believes that they are gone only once a listing says so.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from myelin.cluster.provider import Lease, LeaseState, LogLine, Offer, Provider
from myelin.cluster.spec import NodeSpec
from myelin.errors import MyelinError, NodeError, ProviderError
from myelin.values import Attempt, LeaseId, NodeId

LAUNCH_TRIES = 3
"""Attempts for one node, each on another offer where there is one."""
_FAULT_HANDLER = re.compile(r'Extension modules: |(Current t|T)hread 0x|File "|<no Python frame>|\.\.\.')
FASTEST_POLL_S = 0.02
SLOWEST_POLL_S = 0.25
RELEASE_HEAD_START_S = 1.0
"""How long a replacement waits for the node that it replaces to be gone."""


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """Deadlines, in seconds.

    Attributes:
        launch: For a provider's offers and launch of one attempt.
        release: For releasing everything and seeing it gone.
        wait: Before the first retry of a launch; doubles each time.
    """

    launch: float = 60.0
    release: float = 20.0
    wait: float = 0.2


class Executor:
    """Launches and releases the nodes of one run. The event loop owns it.

    Args:
        provider: Who starts them.
        name: The provider's name, for errors.
        times: Deadlines.
    """

    def __init__(self, provider: Provider, name: str, times: LaunchTimes = LaunchTimes()) -> None:
        self._provider = provider
        self._name = name
        self._times = times
        self._known: dict[LeaseId, NodeId] = {}
        self._attempts: dict[NodeId, int] = {}
        self._releasing: set[asyncio.Task[None]] = set()

    async def launch(self, spec: NodeSpec, exclude: frozenset[str] = frozenset()) -> Lease:
        """Start a node, trying again on a :class:`ProviderError`; each try is an attempt with a number of its own.

        Args:
            exclude: Offers that have failed before; they are taken again only where there is no other.

        Returns:
            The lease, usually before the node has announced where it listens.

        Raises:
            ProviderError: Nothing could be started; nothing is left started.
        """
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

        failed_offers = set(exclude)
        async for attempt in AsyncRetrying(
            stop=stop_after_attempt(LAUNCH_TRIES),
            wait=wait_exponential(multiplier=self._times.wait, max=5.0),
            retry=retry_if_exception(_worth_another_try),
            reraise=True,
        ):
            with attempt:
                return await self._launch_once(spec, failed_offers)
        raise AssertionError("a retry loop that reraises always returns or raises")

    async def replace(self, spec: NodeSpec, lost: Lease, why: str) -> Lease:
        """Give a lost node back and start another one for it, on another offer where there is one.

        Giving back goes on behind us where it takes long; :meth:`release_all` sees to what is left.

        Args:
            lost: What is given back.
            why: For people.

        Raises:
            ProviderError: Nothing could be started.
        """
        releasing = asyncio.create_task(self._release(lost), name=f"release {lost.key}")
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)
        await asyncio.wait({releasing}, timeout=RELEASE_HEAD_START_S)
        return await self.launch(spec, frozenset({lost.offer}))

    async def _release(self, lost: Lease) -> None:
        try:
            await self._provider.release(lost.id)
        except ProviderError:
            pass  # it stays known, and is released with all others

    async def adopt(self, spec: NodeSpec) -> Lease | None:
        """A live lease of this run and node that an earlier orchestrator left; None where there is none.

        Of several, the newest attempt is taken; the others are given back at the end.

        Raises:
            ProviderError: The listing can't be read: there might be one.
        """
        async with asyncio.timeout(self._times.launch):
            leases = await self._provider.leases()
        ours = [lease for lease in leases if (lease.key.run, lease.key.node) == (spec.run, spec.node)]
        if not ours:
            return None
        self._attempts[spec.node] = max(int(lease.key.attempt) for lease in ours)
        live = [lease for lease in ours if lease.state is not LeaseState.EXITED]
        self._known.update({lease.id: spec.node for lease in ours})
        return max(live, key=lambda lease: lease.key.attempt, default=None)

    async def _launch_once(self, spec: NodeSpec, failed_offers: set[str]) -> Lease:
        number = Attempt(self._attempts.get(spec.node, 0) + 1)
        self._attempts[spec.node] = number
        try:
            async with asyncio.timeout(self._times.launch):
                offer = await self._best_offer(spec, failed_offers)
                failed_offers.add(offer.id)
                lease = await self._provider.launch(offer, spec.boot(number), key=spec.key(number))
        except TimeoutError:
            raise ProviderError(
                f"the provider {self._name} did not start {spec.node} within {self._times.launch:g} s",
                "try again, or look at the provider's own status",
                reason="launch-timeout",
            ) from None
        self._known[lease.id] = spec.node
        return lease

    async def _best_offer(self, spec: NodeSpec, failed_offers: set[str]) -> Offer:
        """The best offer that has not failed yet; where all have, the best one again."""
        offers = await self._provider.offers(spec.need(frozenset(failed_offers)))
        if not offers and failed_offers:
            offers = await self._provider.offers(spec.need())
        if not offers:
            raise ProviderError(
                f"the provider {self._name} has nothing for {spec.node}, which needs {spec.memory_bytes >> 20} MiB",
                "use more stages, a smaller model or context, or another provider",
                reason="no-offer",
            )
        return offers[0]

    async def watch(self, on_leases: Callable[[Sequence[Lease]], None]) -> None:
        """List the leases again and again and hand each listing over; ends when cancelled.

        It polls fast at first and ever slower, so that a node that starts in a second is not noticed a quarter late. A
        listing that can't be read is *unknown*, and skipped.
        """
        began = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(self._times.launch):
                    leases = await self._provider.leases()
            except (ProviderError, TimeoutError):
                pass
            else:
                on_leases(leases)
            await asyncio.sleep(min(max((time.monotonic() - began) / 10, FASTEST_POLL_S), SLOWEST_POLL_S))

    async def lease(self, lease: LeaseId, timeout_s: float = 1.0) -> Lease | None:
        """What the provider says of a lease now; None where it doesn't list it, or can't say in time."""
        try:
            async with asyncio.timeout(timeout_s):
                listed = await self._provider.leases()
        except (ProviderError, TimeoutError):
            return None
        return next((each for each in listed if each.id == lease), None)

    def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        """What the node writes."""
        return self._provider.logs(lease)

    async def release_all(self) -> None:
        """Release every node of the run, known here or listed by the provider, all at once, until a listing shows none.

        Raises:
            ProviderError: Some could not be released in time; they are named.
        """
        problem: BaseException | None = None
        try:
            async with asyncio.timeout(self._times.release):
                while True:
                    try:
                        listed = {lease.id for lease in await self._provider.leases()}
                        self._known = {lease: node for lease, node in self._known.items() if lease in listed}
                        if not listed:
                            return
                    except ProviderError as error:  # unknown is not empty: release what is known, and ask again
                        problem, listed = error, set()
                    results = await asyncio.gather(
                        *(self._provider.release(lease) for lease in listed | set(self._known)), return_exceptions=True
                    )
                    failures = [result for result in results if isinstance(result, Exception)]
                    if failures:
                        problem = failures[0]
                    if failures or not listed:
                        await asyncio.sleep(SLOWEST_POLL_S)
        except TimeoutError:
            names = ", ".join(f"{node} ({lease})" for lease, node in self._known.items()) or "the listing"
            why = f": {problem}" if isinstance(problem, MyelinError) else ""
            raise ProviderError(
                f"the provider {self._name} could not show that its nodes are gone ({names}){why}",
                "look at the provider's own list, and end them there",
                reason="release-failed",
            ) from problem

    async def close(self) -> None:
        """Free the provider's connections and tasks."""
        for task in tuple(self._releasing):
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)
        await self._provider.close()


def _worth_another_try(error: BaseException) -> bool:
    return isinstance(error, ProviderError) and error.reason != "no-offer"


def exit_error(lease: Lease, last_lines: Sequence[str], doing: str) -> NodeError:
    """The error for a node that ended by itself.

    Args:
        lease: Exited; its reason is shown.
        last_lines: What the node itself wrote at last; the last one that tells something is shown, all are attached as
            a note.
        doing: What it was doing: ``while it started``.
    """
    assert lease.state is LeaseState.EXITED
    written = [line.strip() for line in last_lines if line.strip()]
    reason = lease.exit_reason or "no reason given"
    telling = [text for line in written if (text := telling_text(line))]
    said = f"; its last words: {telling[-1]}" if telling and telling[-1] not in reason else ""
    error = NodeError(
        f"{lease.key.node} ended {doing} ({reason}){said}",
        "see all that it wrote with --log-level debug",
        reason="node-exited",
    )
    if written:
        error.add_note(f"the last lines of {lease.key.node}:\n" + "\n".join(written))
    return error


def telling_text(line: str) -> str:
    """What a line of a node's output may tell of its end: all of it, the text of a structured line, or nothing. Pure.

    A structured line (JSON with a ``level``) below an error is about the node's work, or about what others did to it.
    Of what Python's fault handler writes, only the first line tells anything to most people.
    """
    if not line.startswith("{"):
        return "" if _FAULT_HANDLER.match(line) else line
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(entry, dict) or "level" not in entry:
        return line
    if entry["level"] in ("debug", "info", "warning"):
        return ""
    return ": ".join(str(entry[key]) for key in ("event", "message") if key in entry)
