"""The reconciler in bad weather: 500 random runs in simulated time, against a cloud that fails in every way we know.

The cloud is a few lists, time is a number, the orchestrator is killed wherever it may be and started again with what
was on disk. At every start of a machine, the rules that cost money when broken are checked; and each of them is shown
to be checked, by a reconciler that breaks it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from myelin.cluster import reconcile as module
from myelin.cluster.intents import Intent, IntentState, inherited
from myelin.cluster.provider import LaunchKey, Lease, LeaseState, Need
from myelin.cluster.reconcile import (
    Action,
    Adopt,
    GiveUp,
    Gone,
    Launch,
    Listing,
    Observed,
    Policy,
    Release,
    Wait,
    Wanted,
    reconcile,
)
from myelin.values import Attempt, LeaseId, NodeId, RunId

RUN = RunId("storm")
SETTLE_S = 6.0
LAG_S = 3.0
"""Listings lag by at most this; a create that was answered by a 504 happens within this. The settling outlasts both."""
POLICY = Policy(tries=3, backoff_s=0.5, longest_backoff_s=4.0, settle_s=SETTLE_S)
RUNS = 500


class Violation(AssertionError):
    """A rule was broken."""


class Killed(Exception):
    """The orchestrator, by somebody."""


class Ambiguous(Exception):
    """A 504, or no answer: something may have been made."""


class Refused(Exception):
    """The provider said no, and nothing was made."""


@dataclass
class Instance:
    """A machine. Billed from ``created`` to ``destroyed``, whatever became of it."""

    id: LeaseId
    key: LaunchKey
    offer: str
    created: float
    acknowledged: bool
    exits: float = float("inf")
    destroyed: float = float("inf")

    def lease(self, at: float) -> Lease:
        state = LeaseState.EXITED if at >= self.exits else LeaseState.RUNNING
        return Lease(self.id, self.key, state, self.offer, exit_reason="died" if at >= self.exits else "")


class World:
    """The cloud, the disk, and the time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.instances: list[Instance] = []
        self.disk: dict[tuple[NodeId, int], Intent] = {}
        self.calm = False
        """Faults are over: what is left to be done must come to an end."""
        self.kills_left = self.random.choice([0, 1, 3, 8])
        self.trouble = self.random.choice([0.05, 0.2, 0.5])
        self.losses = self.random.choice([0.03, 0.1, 0.4])
        self.creates = 0

    def chance(self, share: float) -> bool:
        return not self.calm and self.random.random() < share

    def killed_here(self) -> None:
        """A place where the orchestrator may be killed."""
        if self.kills_left and self.random.random() < 0.02:
            self.kills_left -= 1
            raise Killed

    def billed(self, node: NodeId) -> list[Instance]:
        return [each for each in self.instances if each.key.node == node and each.destroyed > self.now]

    def keep(self, intent: Intent) -> None:
        """Write an intent; the orchestrator may be killed before and after."""
        self.killed_here()
        self.disk[intent.node, intent.attempt] = intent
        self.killed_here()

    def create(self, key: LaunchKey, offer: str, generation: int) -> Instance:
        """One call of a provider's launch: idempotent by key, and all else as bad as it gets."""
        for instance in self.billed(key.node):
            if instance.key == key:
                instance.acknowledged = True
                return instance
        self.check_start(key, offer, generation)
        self.creates += 1
        kind = self.random.choices(
            ["fine", "refused", "made-504", "late-504", "lost-504", "dies"],
            [1.0, *(self.trouble * share for share in (0.5, 1.0, 0.7, 0.5, 0.7))]
            if not self.calm
            else [1, 0, 0, 0, 0, 0],
        )[0]
        self.now += self.random.uniform(0.0, 2.0)
        if kind == "refused":
            raise Refused("taken")
        if kind == "lost-504":
            raise Ambiguous("504")
        created = self.now + (self.random.uniform(0.0, LAG_S) if kind == "late-504" else 0.0)
        name = LeaseId(f"i{len(self.instances)}")
        instance = Instance(name, key, offer, created, acknowledged=kind in ("fine", "dies"))
        self.instances.append(instance)
        if kind == "dies":  # two were accepted on one offer, and ours is the one that goes
            instance.exits = created + self.random.uniform(0.0, 5.0)
        self.killed_here()
        if kind.endswith("504"):
            raise Ambiguous("504")
        return instance

    def check_start(self, key: LaunchKey, offer: str, generation: int) -> None:
        """What must be true whenever a machine is about to be rented."""
        mine = self.disk.get((key.node, key.attempt))
        if mine is None or mine.state is not IntentState.INTENDED:
            raise Violation(f"{key} is rented without an intent on disk")
        others = self.billed(key.node)
        for other in others:
            theirs = self.disk[key.node, other.key.attempt]
            if not other.acknowledged and not theirs.served:
                raise Violation(f"a double rent after a 504: {key}, while {other} is there")
            if theirs.generation >= generation:
                raise Violation(f"{key} beside {other}, which nobody replaces")
        if len(others) > 1:
            raise Violation(f"{key} beside {others}")
        newest = max((attempt for node, attempt in self.disk if node == key.node), default=0)
        if key.attempt != newest:
            raise Violation(f"{key} after attempt {newest}")
        failed = {each.offer for each in self.disk.values() if each.node == key.node and each.failure}
        if offer in failed and len(failed) < len(OFFERS):
            raise Violation(f"{key} on {offer}, which has failed")

    def listing(self) -> Listing | None:
        """Unreadable, late, or right."""
        began = self.now
        self.now += self.random.uniform(0.0, 0.3)
        self.killed_here()
        if self.chance(self.trouble * 0.6):
            return None
        at = began - (self.random.uniform(0.0, LAG_S) if self.chance(self.trouble) else 0.0)
        return Listing(began, tuple(each.lease(at) for each in self.instances if each.created <= at < each.destroyed))

    def release(self, lease: LeaseId) -> None:
        """It works, fails, or pretends."""
        self.now += self.random.uniform(0.0, 1.0)
        if self.chance(self.trouble):
            return
        for instance in self.instances:
            if instance.id == lease and instance.created <= self.now < instance.destroyed:
                instance.destroyed = self.now
        self.killed_here()


OFFERS = tuple(f"offer-{number}" for number in range(4))


class Orchestrator:
    """What the executor does, in simulated time: notes, calls, notes again."""

    def __init__(self, world: World, nodes: int) -> None:
        self.world = world
        self.nodes = [NodeId(f"stage-{index}") for index in range(nodes)]
        self.intents = {key: inherited(intent, world.now) for key, intent in world.disk.items()}
        for intent in self.intents.values():
            world.keep(intent)
        self.generation = {
            node: max([intent.generation for intent in self.intents.values() if intent.node == node], default=1)
            for node in self.nodes
        }
        self.given_up = False

    def note(self, intent: Intent) -> None:
        self.intents[intent.node, intent.attempt] = intent
        self.world.keep(intent)

    def step(self, *, ending: bool) -> bool:
        """Look, decide, do; whether there was nothing left to do."""
        world = self.world
        wanted = () if ending else [Wanted(Need(node, 1, "cpu"), self.generation[node]) for node in self.nodes]
        listing = world.listing()
        observed = Observed(world.now, listing, tuple(self.intents.values()))
        actions = reconcile(wanted, observed, POLICY)
        for action in actions:
            world.killed_here()
            self.do(action)
        if actions and all(isinstance(action, Wait) for action in actions):
            until = min(action.until for action in actions if isinstance(action, Wait))
            world.now = max(world.now, min(until, world.now + 0.5))
        return not actions

    def do(self, action: Action) -> None:
        world = self.world
        match action:
            case Gone(intent, why):
                self.note(intent.gone(world.now, why))
            case Release(lease, _, _, why, ends):
                if ends is not None and ends.state is not IntentState.RELEASING:
                    self.note(ends.unwanted(why, world.now, lease))
                world.release(lease)
            case Launch(need, attempt, generation):
                if (need.node, attempt) in world.disk:
                    raise Violation(f"attempt {attempt} of {need.node} for the second time")
                free = [offer for offer in OFFERS if offer not in need.exclude] or list(OFFERS)
                intent = Intent(
                    need.node, attempt, generation, since=world.now, started=world.now, offer=world.random.choice(free)
                )
                self.note(intent)
                self.call(intent)
            case Adopt(intent, _):
                self.note(intent.called(world.now))
                if not self.call(intent, adopting=True):
                    current = self.intents[intent.node, intent.attempt]
                    self.note(current.unwanted(current.failure, world.now))
            case GiveUp(node, _):
                self.generation[node] += 1  # somebody tries again

    def call(self, intent: Intent, *, adopting: bool = False) -> bool:
        world = self.world
        key = LaunchKey(RUN, intent.node, intent.attempt)
        try:
            instance = world.create(key, intent.offer, intent.generation)
        except Refused as error:
            self.note(intent.doubted(str(error), world.now) if adopting else intent.gone(world.now, str(error)))
            return False
        except Ambiguous as error:
            self.note(intent.doubted(str(error), world.now))
            return False
        self.note(intent.launched(instance.lease(world.now), world.now))
        return True

    def lose(self, node: NodeId) -> None:
        """A node has fallen silent: it is replaced."""
        serving = [
            intent for intent in self.intents.values() if intent.node == node and intent.state is IntentState.LAUNCHED
        ]
        self.generation[node] += 1
        for intent in serving:
            self.note(intent.unwanted("it fell silent", self.world.now))


def storm(seed: int) -> World:
    """One run: nodes come up, die, are replaced; the orchestrator is killed and comes back; then everything goes."""
    world = World(seed)
    nodes = world.random.randint(1, 3)
    steps, ending = world.random.randint(5, 60), False
    orchestrator: Orchestrator | None = None
    for step in range(2000):
        try:
            if orchestrator is None:
                orchestrator = Orchestrator(world, nodes)
            if step > steps:
                ending = True
            if step > steps + 40:
                world.calm, world.kills_left = True, 0
            if not ending and world.chance(world.losses):
                orchestrator.lose(world.random.choice(orchestrator.nodes))
            for instance in world.instances:
                if world.chance(0.01):
                    instance.exits = min(instance.exits, world.now)
            done = orchestrator.step(ending=ending)
        except Killed:
            orchestrator = None
            world.now += world.random.uniform(0.0, 30.0)
            continue
        if ending and done:
            if left := [each for each in world.instances if each.destroyed > world.now]:
                raise Violation(f"called done, and {left} is left")
            return world
    raise Violation("it never came to an end")


def all_storms() -> int:
    """Every run; how many machines were asked for."""
    creates = 0
    for seed in range(RUNS):
        try:
            creates += storm(seed).creates
        except Violation as violation:
            raise Violation(f"seed {seed}: {violation}") from violation
    return creates


def test_five_hundred_storms_cost_nothing_too_much() -> None:
    assert all_storms() > 2 * RUNS  # the weather was bad enough


def test_in_good_weather_each_node_is_started_once() -> None:
    for seed in range(20):
        world = World(seed)
        world.calm, world.kills_left = True, 0
        orchestrator = Orchestrator(world, 3)
        while not orchestrator.step(ending=False):
            pass
        assert world.creates == 3
        while not orchestrator.step(ending=True):
            pass
        assert [each for each in world.instances if each.destroyed > world.now] == []


# Each rule, broken on purpose, is noticed.


def unknown_is_empty(node: Any) -> None:
    node.listing = node.listing or Listing(node.now, ())


def doubt_is_failure(node: Any) -> None:
    node.intents = [
        intent.gone(node.now) if intent.state is IntentState.DOUBTFUL else intent for intent in node.intents
    ]


def listings_are_never_late(node: Any) -> None:
    node.policy = replace(node.policy, settle_s=0.0)


def failed_offers_are_fine(node: Any) -> None:
    original = node.next_start

    def next_start(wish: Wanted) -> Action:
        action: Action = original(wish)
        return replace(action, need=replace(action.need, exclude=frozenset())) if isinstance(action, Launch) else action

    node.next_start = next_start


def any_number_is_replaced(node: Any) -> None:
    original = node.next_start

    def next_start(wish: Wanted) -> Action:
        node.replaced = []
        action: Action = original(wish)
        return action

    node.next_start = next_start


def nothing_stands_in_the_way(node: Any) -> None:
    original = node.next_start

    def next_start(wish: Wanted) -> Action:
        node.obstacles = []
        action: Action = original(wish)
        return action

    node.next_start = next_start


def attempts_begin_anew(node: Any) -> None:
    original = node.next_start

    def next_start(wish: Wanted) -> Action:
        action: Action = original(wish)
        return replace(action, attempt=Attempt(1)) if isinstance(action, Launch) else action

    node.next_start = next_start


def released_when_asked(node: Any) -> None:
    original = node.there

    def there(intent: Intent, listed: Any) -> None:
        if intent.state is IntentState.RELEASING:
            node.actions.append(Gone(intent))
        elif intent.state is not IntentState.RELEASED:
            original(intent, listed)

    node.there = there


BREAKS: tuple[Callable[[Any], None], ...] = (
    unknown_is_empty,
    doubt_is_failure,
    listings_are_never_late,
    failed_offers_are_fine,
    any_number_is_replaced,
    nothing_stands_in_the_way,
    attempts_begin_anew,
    released_when_asked,
)


@pytest.fixture
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reconciler with one rule broken."""
    original = module._OfNode.decide

    def decide(self: Any) -> list[Action]:
        request.param(self)
        return original(self)

    monkeypatch.setattr(module._OfNode, "decide", decide)
    return


@pytest.mark.parametrize("broken", BREAKS, indirect=True, ids=lambda rule: rule.__name__)
def test_a_broken_rule_is_noticed(broken: None) -> None:
    with pytest.raises(Violation):
        all_storms()


def test_an_intent_that_is_not_on_disk_first_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Orchestrator, "note", lambda self, intent: self.intents.update({(intent.node, 1): intent}))
    with pytest.raises(Violation, match="without an intent on disk"):
        storm(0)
