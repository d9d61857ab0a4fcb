"""The provider: nodes on machines that are rented on Vast.ai, one each.

**Money.** A machine is billed from the create call until it is destroyed, whatever became of it. So every machine is
labelled with its launch key when it is created, an answer that leaves doubt is followed by listings and never by a
second create, and a machine counts as gone only once a listing that could be read doesn't have it.

**Restart.** A listing is enough to find the machines of a run again (:meth:`VastaiProvider.leases`). Workers outlive
their SSH session; launching a key whose machine exists takes that machine, and the worker on it where there is one;
releasing its lease destroys it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import asyncssh

from myelin.plugin import (
    BootSpec,
    Endpoint,
    LaunchKey,
    Lease,
    LeaseId,
    LeaseState,
    LogLine,
    Need,
    Offer,
    ProviderContext,
    ProviderError,
)
from myelin_provider_vastai.api import TAKEN_CODES, Api, Doubtful, HalfDone, Refused, Rent
from myelin_provider_vastai.asks import Ask, as_offer, ask_of, in_turn, machine_of, ranked, search_query
from myelin_provider_vastai.instances import Instance, Stand, judge, mapped_address
from myelin_provider_vastai.inventory import Inventory
from myelin_provider_vastai.labels import port_for, write_label
from myelin_provider_vastai.node import RentedNode, Workshop
from myelin_provider_vastai.scripts import onstart_script
from myelin_provider_vastai.section import VastaiSection
from myelin_provider_vastai.ssh import HostKeys, load_identity

SEARCH_AGE_S = 20.0
"""How long a search's answer serves: the nodes of one run share it, since searches are few."""
SETTLE_LISTINGS = 3
"""How often we list after a create of unknown outcome before we believe that there is no machine."""
SETTLE_S = 2.0
"""Between those, times the spacing of calls."""
DESTROY_AGAIN_S = 5.0

ANSWER_S = 2.0
"""How long the port of a worker that another object has started may take to answer."""
KEPT_S = 0.2
"""How long a connection must last for somebody to be there: a worker waits for the other side to speak first."""
LISTING_LAG_S = 5.0
"""How long a listing may lack a machine that was rented, times the spacing of calls."""


class VastaiProvider:
    """See :class:`myelin.plugin.Provider`.

    Args:
        context: The run, and the section ``vastai``.

    Raises:
        ProviderError: There is no key of an account.
    """

    def __init__(self, context: ProviderContext) -> None:
        section = context.section
        self._section = section if isinstance(section, VastaiSection) else VastaiSection.model_validate({})
        self._run = context.run
        self.price_agreed = not self._section.confirm_lease
        self.listing_lag_s = LISTING_LAG_S * self._section.call_spacing
        self._api = Api(self._section.api_url, account_key(self._section, os.environ), self._section.call_spacing)
        self._inventory = Inventory(self._api)
        self._host_keys = HostKeys()
        self._shop: Workshop | None = None
        self._opening = asyncio.Lock()
        self._renting = asyncio.Lock()
        self._asks: tuple[float, list[Ask]] = (float("-inf"), [])
        self._searching = asyncio.Lock()
        self._shown: dict[str, int] = {}
        self._beside: dict[str, tuple[Offer, ...]] = {}
        self._failed_machines: set[int] = set()
        self._gone_asks: set[int] = set()
        self._nodes: dict[LaunchKey, RentedNode] = {}
        self._starting: dict[LaunchKey, _Start] = {}
        self._abandoned: set[LaunchKey] = set()
        self._releasing: dict[int, asyncio.Task[None]] = {}
        self._forwards: dict[RentedNode, int] = {}
        self._mesh: set[asyncio.Task[None]] = set()

    async def offers(self, need: Need) -> Sequence[Offer]:
        """See :meth:`myelin.plugin.Provider.offers`. Different nodes are shown different machines first."""
        rented = {machine for node in self._nodes.values() if (machine := machine_of(node.offer)) is not None}
        asks = [
            ask
            for ask in ranked(await self._search(), need, self._section)
            if ask.machine not in self._failed_machines and ask.id not in self._gone_asks
        ]
        others = {machine for node, machine in self._shown.items() if node != need.node}
        ordered = in_turn(asks, others | rented)
        if ordered:
            self._shown[need.node] = ordered[0].machine
        offers = tuple(as_offer(ask, need.engine) for ask in ordered)
        self._beside |= {offer.id: offers for offer in offers}
        return offers

    async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
        """See :meth:`myelin.plugin.Provider.launch`. Returns once a machine is rented; it comes up by itself.

        Where another node of the run has taken the offer meanwhile, the next best of those that were made with it is
        taken; the lease says which.

        Raises:
            ProviderError: It could not be rented. Reasons beside those of the service: ``cost-cap``, ``offer-taken``,
                ``abandoned`` (an earlier call with this key left doubt, and what came of it is being destroyed), and
                ``doubtful`` where the outcome stayed unknown: should the machine turn up later, it is destroyed.
        """
        if node := self._nodes.get(key):
            return node.lease
        if key in self._abandoned:
            raise ProviderError(f"what came of {key} is being destroyed", "start another attempt", reason="abandoned")
        start = self._starting.get(key)
        if start is None:
            start = self._starting[key] = _Start(asyncio.create_task(self._start(offer, boot, key), name=f"rent {key}"))
        start.waiting += 1
        try:
            # Shielded: a create that is interrupted half-way leaves a machine that nobody knows of.
            return (await asyncio.shield(start.task)).lease
        except asyncio.CancelledError:
            if start.waiting == 1:
                await self._give_up(start, key)
            raise
        finally:
            start.waiting -= 1

    async def leases(self) -> Sequence[Lease]:
        """See :meth:`myelin.plugin.Provider.leases`. The service is asked at most every ``vastai.poll_s`` seconds.

        A machine that another object has started counts as running where its worker's port answers.
        """
        sure = self._nodes and not self._abandoned  # otherwise there may be a machine that nobody here knows of
        instances = await self._inventory.listing(max_age_s=self._section.poll_s if sure else 0.0)
        known = {node.instance: node for node in self._nodes.values()}
        for node in list(self._nodes.values()):
            node.look(instances.get(node.instance))
        leases = [node.lease for node in known.values()]
        unknown: list[Instance] = []
        for instance in instances.values():
            if instance.label is None or instance.label.key.run != self._run or instance.id in known:
                continue
            if instance.label.key in self._abandoned or instance.label.key in self._nodes:
                self._begin_release(instance.id)  # the late fruit of a doubtful create
            if instance.label.key not in self._starting:
                unknown.append(instance)
        return (*leases, *await asyncio.gather(*map(self._found_lease, unknown)))

    async def all_leases(self) -> Sequence[Lease]:
        """The machines of every run of the account that carry our label, as far as a listing shows them.

        Raises:
            ProviderError: The listing can't be read.
        """
        instances = await self._inventory.listing()
        return tuple(_unknown_lease(instance) for instance in instances.values() if instance.label is not None)

    async def release(self, lease: LeaseId) -> None:
        """See :meth:`myelin.plugin.Provider.release`. Returns once a listing shows it gone; goes on where cancelled.

        Machines whose label isn't this run's are never touched.

        Raises:
            ProviderError: It could not be destroyed, or not be shown to be gone, in time.
        """
        number = int(lease) if lease.isdecimal() else -1
        if number not in {node.instance for node in self._nodes.values()}:
            instance = (await self._inventory.listing()).get(number)
            if instance is None or instance.label is None or instance.label.key.run != self._run:
                return
        await asyncio.shield(self._begin_release(number))

    async def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        """See :meth:`myelin.plugin.Provider.logs`. Of machines that this object has started alone."""
        node = next((node for node in self._nodes.values() if node.id == lease), None)
        if node is not None:
            async for line in node.log.follow():
                yield line

    async def close(self) -> None:
        """Free connections and tasks. Machines stay rented, and workers go on for as long as their patience lasts."""
        await asyncio.gather(*self._releasing.values(), *self._mesh, return_exceptions=True)
        await asyncio.gather(*(node.stop() for node in self._nodes.values()), return_exceptions=True)
        await self._inventory.close()
        await self._api.close()

    async def _found_lease(self, instance: Instance) -> Lease:
        """The lease of a machine of this run that this object has not started."""
        lease = _unknown_lease(instance)
        assert instance.label is not None
        port = self._section.node_port or port_for(write_label(instance.label.key, instance.label.offer))
        address = mapped_address(instance, port)
        if lease.state is LeaseState.EXITED or address is None or not await _answers(address):
            return lease
        return replace(lease, state=LeaseState.RUNNING, endpoint=Endpoint((f"{address[0]}:{address[1]}",)))

    async def _search(self) -> list[Ask]:
        async with self._searching:
            began, asks = self._asks
            if time.monotonic() - began > SEARCH_AGE_S * min(1.0, self._section.call_spacing):
                asks = await self._api.search(search_query(self._section))
                self._asks = (time.monotonic(), asks)
            return asks

    async def _workshop(self) -> Workshop:
        """What nodes share, made once: the SSH key is read and the account told of it."""
        async with self._opening:
            if self._shop is None:
                identity = await asyncio.to_thread(load_identity, self._section.ssh_identity, Path.home())
                await self._api.register_key(identity.public)
                self._shop = Workshop(
                    self._api, self._inventory, identity, self._host_keys, self._section, version("myelin-core")
                )
            return self._shop

    async def _start(self, offer: Offer, boot: BootSpec, key: LaunchKey) -> RentedNode:
        try:
            if ask_of(offer.id) is None:
                raise ProviderError(f"{offer.id!r} is no offer of Vast.ai", "take one of offers()", reason="no-offer")
            shop = await self._workshop()
            async with self._renting:  # so that two rents can't pass under the cost cap together
                instances = await self._inventory.listing()
                existing = next((i for i in instances.values() if i.label is not None and i.label.key == key), None)
                if existing is not None and existing.label is not None:
                    number, offer_id, price = existing.id, existing.label.offer, existing.price
                else:
                    offer = self._untaken(offer)
                    self._under_cap(offer, instances)
                    number, offer_id, price = await self._rent(offer, key), offer.id, offer.dollars_per_hour
                self._inventory.outdate()
                node = RentedNode(
                    key,
                    offer_id,
                    number,
                    self._section.node_port or port_for(write_label(key, offer_id)),
                    price,
                    boot,
                    shop,
                    on_failed=self._note_failure,
                    on_forward=self._note_forward,
                    on_back=self._note_back,
                )
                self._nodes[key] = node
                return node
        finally:
            del self._starting[key]

    def _under_cap(self, offer: Offer, instances: Mapping[int, Instance]) -> None:
        """Raise where the run's machines and this one would cost more than is allowed."""
        cap = self._section.max_run_dollars_per_hour
        listed = {i.id: i.price for i in instances.values() if i.label is not None and i.label.key.run == self._run}
        prices = listed | {node.instance: node.price for node in self._nodes.values()}
        total = sum(prices.values()) + offer.dollars_per_hour
        if cap > 0 and total > cap + 1e-9:
            raise ProviderError(
                f"renting {offer.description} would bring the run to ${total:.3f}/h, above the cap of ${cap:.3f}/h",
                "raise vastai.max_run_dollars_per_hour, or use fewer stages",
                reason="cost-cap",
            )

    def _untaken(self, offer: Offer) -> Offer:
        """``offer``, or the next best beside it where a node of ours has it.

        Vast.ai would accept a second create on the same ask, and let one of the two die.
        """
        taken = {machine_of(node.offer) for node in self._nodes.values()}
        for other in (offer, *self._beside.get(offer.id, ())):
            if machine_of(other.id) not in taken and ask_of(other.id) not in self._gone_asks:
                return other
        raise ProviderError(f"the offer {offer.id} has just been taken", "take another", reason="offer-taken")

    async def _rent(self, offer: Offer, key: LaunchKey) -> int:
        """Rent a machine; its number."""
        ask, label = ask_of(offer.id), write_label(key, offer.id)
        assert ask is not None
        rent = Rent(
            ask=ask,
            image=self._section.image,
            disk_gb=self._section.disk_gb,
            label=label,
            onstart=onstart_script(self._section.dead_man_s, self._section.api_url),
            node_port=self._section.node_port or port_for(label),
        )
        try:
            return await self._api.create(rent)
        except Refused as error:
            if error.code in TAKEN_CODES or error.status == 410:
                self._gone_asks.add(ask)
                raise ProviderError(
                    "the offer was taken by someone else", "take another", reason="offer-taken"
                ) from error
            raise
        except HalfDone as error:
            self._gone_asks.add(ask)
            self._abandoned.add(key)
            await asyncio.shield(self._begin_release(error.instance))
            raise
        except Doubtful as error:
            found = await self._settle(key)
            if found is not None:
                return found
            # Whatever comes of it later is destroyed when it is seen; the key is never used again.
            self._abandoned.add(key)
            self._gone_asks.add(ask)
            raise Doubtful(f"{error.message}; no machine has come of it so far", "try again") from error

    async def _settle(self, key: LaunchKey) -> int | None:
        """The machine that a doubtful create has made, if a few listings show one.

        Raises:
            ProviderError: The listings can't be read.
        """
        for tries in range(SETTLE_LISTINGS):
            if tries:
                await asyncio.sleep(SETTLE_S * self._section.call_spacing)
            try:
                instances = await self._inventory.listing()
            except ProviderError:
                self._abandoned.add(key)
                raise
            for instance in instances.values():
                if instance.label is not None and instance.label.key == key:
                    return instance.id
        return None

    async def _give_up(self, start: _Start, key: LaunchKey) -> None:
        """End a start that nobody waits for any more, and what it has rented."""
        try:
            node = await start.task
        except ProviderError:
            return
        self._abandoned.add(key)
        await asyncio.shield(self._begin_release(node.instance))
        self._abandoned.discard(key)  # one machine was made, and a listing shows it gone: nothing is in doubt

    def _begin_release(self, number: int) -> asyncio.Task[None]:
        """Release a machine, once, however often it is asked for."""
        if number not in self._releasing:
            task = asyncio.create_task(self._release(number), name=f"release {number}")
            self._releasing[number] = task
            task.add_done_callback(lambda done: self._released(number, done))
        return self._releasing[number]

    def _released(self, number: int, task: asyncio.Task[None]) -> None:
        self._releasing.pop(number, None)
        if not task.cancelled():
            task.exception()  # whoever waits is told; where nobody does, the next listing begins again

    async def _release(self, number: int) -> None:
        node = next((node for node in self._nodes.values() if node.instance == number), None)
        if node is not None:
            await node.stop()
        deadline = time.monotonic() + self._section.destroy_timeout_s
        await self._api.destroy(number)
        asked = time.monotonic()
        problem = ""
        while True:
            self._inventory.outdate()
            try:
                if number not in await self._inventory.listing():
                    break
                problem = "it is still listed"
            except ProviderError as error:
                problem = error.message
            if time.monotonic() > deadline:
                raise ProviderError(
                    f"machine {number} could not be shown to be destroyed: {problem}",
                    "it may still be billed: look at the account's list of instances",
                    reason="release-failed",
                )
            if time.monotonic() - asked > DESTROY_AGAIN_S * self._section.call_spacing:
                await self._api.destroy(number)
                asked = time.monotonic()
            await asyncio.sleep(min(1.0, self._section.poll_s))
        self._host_keys.forget(number)
        if node is not None:
            self._nodes.pop(node.key, None)
            self._forwards.pop(node, None)

    def _note_failure(self, node: RentedNode) -> None:
        """A machine that has failed is not offered again."""
        machine = machine_of(node.offer)
        if machine is not None:
            self._failed_machines.add(machine)

    def _note_forward(self, node: RentedNode, port: int) -> None:
        """A node is reached by a forward that ends here: carry it on to the others, and theirs to it.

        Each node gets the same ports on its own loopback that we have on ours, so that one address means the same
        everywhere, and neighbours reach each other through us.
        """
        self._forwards[node] = port
        for other in self._nodes.values():
            if other is not node:
                self._carry(other, port)
                if other in self._forwards:
                    self._carry(node, self._forwards[other])

    def _note_back(self, node: RentedNode) -> None:
        """A node is logged in to again: what was carried to it ended with its old connection."""
        for other, port in self._forwards.items():
            if other is not node:
                self._carry(node, port)

    def _carry(self, node: RentedNode, port: int) -> None:
        async def carry() -> None:
            if node.connection is None:
                return
            try:
                await node.connection.forward_remote_port("127.0.0.1", port, "127.0.0.1", port)
            except (OSError, asyncssh.Error, asyncssh.ChannelListenError) as error:
                node.note(f"the port {port} of a neighbour could not be carried to it ({type(error).__name__})")

        task = asyncio.create_task(carry(), name=f"carry {port} to {node.key}")
        self._mesh.add(task)
        task.add_done_callback(self._mesh.discard)


class _Start:
    """A launch that is under way, and how many calls wait for it."""

    def __init__(self, task: asyncio.Task[RentedNode]) -> None:
        self.task = task
        self.waiting = 0


def account_key(section: VastaiSection, environment: Mapping[str, str]) -> str:
    """The account's key: the setting, or the file that the ``vastai`` tool keeps.

    Raises:
        ProviderError: There is none.
    """
    if section.api_key is not None and (told := section.api_key.get_secret_value().strip()):
        return told
    home = Path(environment.get("HOME") or Path.home())
    configuration = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    for path in (configuration / "vastai" / "vast_api_key", home / ".vast_api_key"):
        with suppress(OSError, UnicodeDecodeError):
            if kept := path.read_text(encoding="ascii").strip():
                return kept
    raise ProviderError(
        "the provider 'vastai' has no key of an account", "set VAST_API_KEY to the key of yours", reason="no-key"
    )


async def _answers(address: tuple[str, int]) -> bool:
    """Whether somebody takes a TCP connection there, and keeps it: what maps a port may take it with nobody behind."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(*address)
    except (OSError, TimeoutError):
        return False
    try:
        async with asyncio.timeout(KEPT_S):
            return bool(await reader.read(1))
    except TimeoutError:
        return True
    except OSError:
        return False
    finally:
        writer.close()


def _unknown_lease(instance: Instance) -> Lease:
    """The lease of a machine of this run that this object has not started. Pure."""
    assert instance.label is not None
    verdict = judge(instance, elapsed_s=0.0, timeout_s=float("inf"), was_seen=True)
    failed = verdict.stand is Stand.FAILED
    return Lease(
        LeaseId(str(instance.id)),
        instance.label.key,
        LeaseState.EXITED if failed else LeaseState.STARTING,
        instance.label.offer,
        None,
        instance.price,
        verdict.reason if failed else "",
    )
