"""The provider: stages as actors on a Ray cluster, each in a placement group of its own.

**Placement.** A stage has its own placement group of one bundle, and not a bundle in a group of the run's, since stages
come and go one by one: one is launched again on another node while the others serve. How a run is spread is decided
here, from what the cluster has free, and the group is held to the node that was chosen by the label ``ray.io/node-id``.

**Restart.** Actors and placement groups outlive whoever made them, and bear the launch key as their name: a listing is
enough to find the stages of a run again. Whoever made them may have been killed half-way: an actor that never got its
boot line gets it when its launch is repeated, and what is less than an actor in its place is listed as ended. A worker
whose orchestrator is gone ends itself after a while, and its actor then gives the place back.

**Events.** A listing tells at once of a raylet that has died (its port is tried; Ray takes about 15 s), of an actor or
worker that has, with Ray's own reason, and of a node that is being pre-empted, before it is gone.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from myelin.plugin import (
    BootSpec,
    LaunchKey,
    Lease,
    LeaseId,
    LeaseState,
    LogLine,
    Need,
    NodeId,
    Offer,
    ProviderContext,
    ProviderError,
    boot_line,
)
from myelin_provider_ray import placement
from myelin_provider_ray.driver import Calls, Driver
from myelin_provider_ray.names import read_name, write_name
from myelin_provider_ray.section import RaySection, Strategy
from myelin_provider_ray.states import Stand, after_death, after_looking, before_looking, lost_node, unbooted
from myelin_provider_ray.view import ClusterView, Group, read_view

LOG_POLL_S = 0.2
REMOVE_S = 15.0
"""How long the cluster gets to take a stage off its lists, above the worker's grace."""


class RayProvider:
    """See :class:`myelin.plugin.Provider`.

    Args:
        context: The run, and the section ``ray``.
        command: What a stage's host runs in place of the worker (tests).
        driver: Who speaks with Ray (tests).
    """

    def __init__(self, context: ProviderContext, *, command: Sequence[str] = (), driver: Calls | None = None) -> None:
        section = context.section
        self._section = section if isinstance(section, RaySection) else RaySection()
        self._run = context.run
        self._stages = max(1, context.nodes)
        self._command = tuple(command)
        self._driver = driver or Driver(
            {
                "address": self._section.address,
                "namespace": self._section.namespace,
                "runtime_env": self._section.runtime_env,
                "local_cpus": float(math.ceil(self._section.cpus * self._stages)),
            },
            self._section.connect_timeout_s,
            self._section.call_timeout_s,
        )
        self._seen: ClusterView | None = None
        self._needs: dict[NodeId, Need] = {}
        self._dead: set[str] = set()
        self._starting: dict[LaunchKey, _Start] = {}
        self._chosen: dict[LaunchKey, str] = {}
        self._claims: dict[LaunchKey, tuple[str, Mapping[str, float]]] = {}
        self._abandoned: set[LaunchKey] = set()
        self._stands: dict[LaunchKey, Stand] = {}
        self._waiting_since: dict[LaunchKey, float] = {}
        self._boots: dict[LaunchKey, BootSpec] = {}
        """Of launches whose actor hasn't been seen to have got its boot line yet."""
        self._releasing: dict[LaunchKey, asyncio.Task[None]] = {}

    @property
    def found_by(self) -> Mapping[str, str]:
        """What another process must know to find the stages. ``auto`` may be another cluster in another shell."""
        address = self._section.address
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS") or address
        return {"address": address, "namespace": self._section.namespace}

    @property
    def packed(self) -> bool:
        """Whether a run is meant to take as few nodes as can be; planning asks."""
        return self._section.strategy is Strategy.PACK

    async def offers(self, need: Need) -> Sequence[Offer]:
        """See :meth:`myelin.plugin.Provider.offers`. An offer is a node of the cluster, or one that it may add."""
        view = await self._view()
        self._needs[need.node] = need  # the launch that follows reserves what it says
        planning, placed = not need.memory_bytes, self._placed(view)
        # Where a run is planned, or one that is taken up again asks once more, what it has already isn't taken from it.
        own = [group for group in placed if planning or group.key.node == need.node]
        others = [group for group in placed if group not in own]
        view = self._seen = placement.as_if_released(view, own)
        return placement.offers(view, need, self._section, others, {} if planning else self._promised(view))

    def lacking(self, need: Need) -> str:
        """What the cluster would need for ``need``, and what it has; after :meth:`offers` gave nothing."""
        if self._seen is None:
            return ""
        return placement.lacking(self._seen, need, self._section, self._stages)

    async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
        """See :meth:`myelin.plugin.Provider.launch`. Returns once the cluster has noted what is wanted.

        Where another stage of the run has taken the room on the offer's node meanwhile, the next best node is taken;
        the lease says which.

        Raises:
            ProviderError: See :meth:`~myelin_provider_ray.driver.Driver.call`. Where the cluster didn't answer,
                whatever turns up of the launch later is removed when it is seen.
        """
        start = self._starting.get(key)
        if start is None:
            task = asyncio.create_task(self._start(offer, boot, key), name=f"place {key}")
            start = self._starting[key] = _Start(task)
        start.waiting += 1
        try:
            # Shielded: a call that is interrupted half-way leaves a place reserved that nobody knows of.
            return await asyncio.shield(start.task)
        except asyncio.CancelledError:
            if start.waiting == 1:
                await self._give_up(start, key)
            raise
        finally:
            start.waiting -= 1

    async def leases(self) -> Sequence[Lease]:
        """See :meth:`myelin.plugin.Provider.leases`."""
        view = await self._view()
        groups = []
        for group in view.of_run(self._run):
            if group.key in self._abandoned:
                self._begin_release(group.key, group.id)  # the late fruit of a launch that was given up
            elif group.key not in self._starting:
                groups.append(group)
        stands = await self._judged(groups, view)
        strays = [key for key in view.strays if key.run == self._run and key not in self._starting]
        return (*(self._lease(group, stands[group.key]) for group in groups), *map(_stray, strays))

    async def all_leases(self) -> Sequence[Lease]:
        """The live leases of every run in the cluster, for cleaning up; how their workers are isn't asked."""
        view = await self._view()
        groups = (self._lease(group, Stand(LeaseState.STARTING)) for group in view.groups)
        return (*groups, *map(_stray, view.strays))

    async def release(self, lease: LeaseId) -> None:
        """See :meth:`myelin.plugin.Provider.release`. Returns once the cluster lists neither the actor nor its place;
        goes on by itself where it is cancelled.

        Raises:
            ProviderError: They could not be shown to be gone.
        """
        key = read_name(lease)
        if key is None:
            return
        if key in self._releasing:
            await asyncio.shield(self._releasing[key])
            return
        view = await self._view()
        group = next((group for group in view.groups if group.key == key), None)
        if group is None and write_name(key) not in view.actors:
            self._forget(key)
            return
        await asyncio.shield(self._begin_release(key, group.id if group else "", view))

    async def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        """See :meth:`myelin.plugin.Provider.logs`. What a stage waits for before it has a place is told, too."""
        key = read_name(lease)
        position, told, absences, place = 0, "", 0, ""
        while key is not None:
            known = self._stands.get(key)
            if known is not None and known.detail.startswith("waits") and known.detail != told:
                told = known.detail
                yield LogLine("provider", f"{key.node} {told}", time.time())
            if known is None or not known.detail.startswith("waits"):
                answer = await self._driver.call("lines", name=lease, after=position)
                if answer is None:
                    absences += 1
                    if key not in self._starting and absences > (1 if known is None else 2):
                        return
                elif "silent" not in answer:
                    if answer["node"] != place:
                        place = answer["node"]
                        yield LogLine("provider", f"{key.node} is placed on {place}", answer["since"])
                    if answer["first"] > position:
                        yield LogLine("provider", f"({answer['first'] - position} lines were dropped)", answer["since"])
                    for stream, text, at in answer["lines"]:
                        yield LogLine(stream, text, at)
                    position = answer["next"]
                    if answer["ended"]:
                        return
            elif key not in self._waiting_since:
                return
            await asyncio.sleep(LOG_POLL_S)

    async def close(self) -> None:
        """Leave the cluster, once releases that are under way are done. Stages stay."""
        await asyncio.gather(*self._releasing.values(), return_exceptions=True)
        await self._driver.close()

    async def _view(self) -> ClusterView:
        """The cluster now. A raylet that once refused a connection is dead for good: one that is started in its place
        has another id. It is remembered, since only nodes with stages of ours are tried."""
        view = read_view(await self._driver.call("snapshot"), self._section.autoscaling)
        self._dead |= {node.id for node in view.nodes if node.answers is False}
        if not self._dead:
            return view
        return replace(view, nodes=tuple(replace(n, answers=False) if n.id in self._dead else n for n in view.nodes))

    def _placed(self, view: ClusterView) -> tuple[Group, ...]:
        return tuple(group for group in view.of_run(self._run) if group.key not in self._releasing)

    def _promised(self, view: ClusterView) -> dict[str, list[Mapping[str, float]]]:
        """What launches that are under way, or wait for their place, will reserve, by node."""
        promised: dict[str, list[Mapping[str, float]]] = {}
        placed = {group.key for group in view.groups if group.node}
        for key, (node, bundle) in self._claims.items():
            if key not in placed:
                promised.setdefault(node, []).append(bundle)
        return promised

    async def _start(self, offer: Offer, boot: BootSpec, key: LaunchKey) -> Lease:
        name = write_name(key)
        try:
            view = await self._view()
            existing = next((group for group in view.groups if group.key == key), None)
            self._boots[key] = boot
            if existing is not None and name in view.actors and key not in self._abandoned:
                return self._lease(existing, (await self._judged([existing], view))[key])
            if existing is not None and key not in self._abandoned and (known := self._stands.get(key)) is not None:
                return self._lease(existing, known)
            if existing is not None and key in self._abandoned:
                await self._begin_release(key, existing.id, view)
            elif key in view.strays:  # its place is gone, and another one would be of no use to it
                await self._begin_release(key, "", view)
            self._abandoned.discard(key)
            self._boots[key] = boot
            need = self._needs.get(key.node) or Need(key.node, 0, boot.engine)
            bundle = placement.reserved(need, self._section)
            chosen = self._untaken(offer, view, need)
            self._claims[key] = (chosen, bundle)
            self._chosen[key] = chosen
            host = {
                "command": self._command,
                "cores": max(1, int(self._section.cpus)),
                "log_lines": self._section.log_lines,
                "linger_s": self._section.linger_s,
            }
            try:
                await self._driver.call(
                    "create",
                    name=name,
                    bundle=bundle,
                    selector=placement.selector(chosen, self._section),
                    host=host,
                    line=boot_line(boot).decode(),
                    bind=self._section.bind,
                )
            except ProviderError:
                self._abandoned.add(key)
                with suppress(ProviderError):
                    await self._begin_release(key, "", view)
                raise
            self._stands.pop(key, None)
            return Lease(LeaseId(name), key, LeaseState.STARTING, chosen, detail="its place is being reserved")
        except BaseException:
            self._claims.pop(key, None)
            self._boots.pop(key, None)
            raise
        finally:
            del self._starting[key]

    def _untaken(self, offer: Offer, view: ClusterView, need: Need) -> str:
        """The offer's node, or the next best where another stage of the run has just been promised its room."""
        if offer.id == placement.AUTOSCALER:
            return offer.id
        open_to_us = placement.offers(view, need, self._section, self._placed(view), self._promised(view))
        if any(each.id == offer.id for each in open_to_us):
            return offer.id
        if not open_to_us:
            raise ProviderError(
                f"the room for {need.node} has just been taken: "
                + placement.lacking(view, need, self._section, self._stages),
                "use fewer stages, smaller reservations (ray.cpus, ray.memory_mb), or a larger cluster",
                reason="offer-taken",
            )
        return open_to_us[0].id

    async def _give_up(self, start: _Start, key: LaunchKey) -> None:
        """End a launch that nobody waits for any more, and all that has come of it."""
        with suppress(ProviderError):
            lease = await start.task
            self._abandoned.add(key)
            await self.release(lease.id)
            self._abandoned.discard(key)

    async def _judged(self, groups: Sequence[Group], view: ClusterView) -> dict[LaunchKey, Stand]:
        """How each of these launches stands."""
        stands: dict[LaunchKey, Stand] = {}
        asked: list[Group] = []
        for group in groups:
            known = self._stands.get(group.key)
            if known is not None and known.state is LeaseState.EXITED:
                stands[group.key] = known  # an end is an end, whatever Ray makes of the place afterwards
                continue
            told = self._without_asking(group, view)
            if told is None:
                asked.append(group)
            else:
                stands[group.key] = told
        names = [write_name(group.key) for group in asked]
        answers = await self._driver.call("look", names=names) if names else {}
        dead: list[Group] = []
        for group in asked:
            answer = answers[write_name(group.key)]
            known = after_looking(answer, self._stands.get(group.key))
            if known is None:
                dead.append(group)
                continue
            stands[group.key] = known
            if unbooted(answer):
                await self._boot(group.key)
            elif "worker" in answer:
                self._boots.pop(group.key, None)
        if dead:
            causes = await self._driver.call("obituaries", names=[write_name(group.key) for group in dead])
            for group in dead:
                name = write_name(group.key)
                stands[group.key] = after_death(causes.get(name), answers[name].get("died", ""))
        self._stands |= stands
        return stands

    async def _boot(self, key: LaunchKey) -> None:
        """Give an actor its boot line once more, where it is ours to give: whoever made it was killed before the first
        one had arrived. Until the launch is repeated, it is nobody's."""
        boot = self._boots.get(key)
        if boot is not None:
            line = boot_line(boot).decode()
            await self._driver.call("boot", name=write_name(key), line=line, bind=self._section.bind)

    def _without_asking(self, group: Group, view: ClusterView) -> Stand | None:
        pinned = self._chosen.get(group.key, "").replace(placement.AUTOSCALER, "")
        name = write_name(group.key)
        if group.node:
            self._waiting_since.pop(group.key, None)
        else:
            self._waiting_since.setdefault(group.key, time.monotonic())
        since = self._waiting_since.get(group.key)
        return before_looking(
            group,
            view,
            has_actor=name in view.actors,
            waited_s=time.monotonic() - since if since is not None else 0.0,
            patience_s=self._section.pending_timeout_s,
            pinned=pinned,
        )

    def _lease(self, group: Group, stand: Stand) -> Lease:
        return Lease(
            id=LeaseId(write_name(group.key)),
            key=group.key,
            state=stand.state,
            offer=group.node or self._chosen.get(group.key, ""),
            endpoint=stand.endpoint,
            exit_reason=stand.reason,
            detail=stand.detail,
        )

    def _begin_release(self, key: LaunchKey, group: str, view: ClusterView | None = None) -> asyncio.Task[None]:
        task = self._releasing.get(key)
        if task is None:
            task = self._releasing[key] = asyncio.create_task(self._remove(key, group, view), name=f"release {key}")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # leases() begins some unwatched
        return task

    async def _remove(self, key: LaunchKey, group: str, view: ClusterView | None) -> None:
        try:
            grace_s = 0.0 if view is None or not self._can_answer(key, view) else self._section.grace_s
            await self._driver.call(
                "remove", timeout_s=REMOVE_S + grace_s, name=write_name(key), grace_s=grace_s, group=group
            )
            self._forget(key)
        finally:
            self._releasing.pop(key, None)

    def _can_answer(self, key: LaunchKey, view: ClusterView) -> bool:
        """Whether the actor of ``key`` may be asked to end its worker: it has a place, on a node that answers."""
        group = next((group for group in view.groups if group.key == key), None)
        node = view.node(group.node) if group is not None else None
        return node is not None and not (lost_node(node) and node.drained_in_s is None)

    def _forget(self, key: LaunchKey) -> None:
        for table in (self._stands, self._claims, self._chosen, self._waiting_since, self._boots):
            table.pop(key, None)
        self._abandoned.discard(key)


def _stray(key: LaunchKey) -> Lease:
    """An actor without a place, which Ray would keep waiting for it for ever."""
    return Lease(LeaseId(write_name(key)), key, LeaseState.EXITED, exit_reason="its place is gone")


class _Start:
    """A launch that is under way, and how many calls wait for it."""

    def __init__(self, task: asyncio.Task[Lease]) -> None:
        self.task = task
        self.waiting = 0
