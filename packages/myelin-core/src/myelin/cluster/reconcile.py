"""The reconciler: from what is wanted and what is seen to what is to be done. Pure: no clock, no I/O, no memory.

The rules, each of which is there because somebody has paid for its lack:

1. A listing that can't be read is *unknown*, never *empty*: nothing is started on its account.
2. A start whose outcome is unknown (a timeout, a 504, a crash of ours) is looked for by its key in a listing before
   another one is made; what it has left is taken, or released.
3. A node has one start at a time. Only while one is being *replaced* may there be one more.
4. A start that failed, and one that was replaced, name an offer that is avoided from then on.
5. *Gone* is what a listing shows, and only one that is younger than the last change and than the listings' own lag.
6. Attempts are numbered upwards, in the ledger's sight, across restarts.

(After Ray's ``autoscaler/v2/instance_manager/reconciler.py`` and dask's ``worker_state_machine.py``.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from myelin.cluster.intents import Intent, IntentState
from myelin.cluster.provider import Lease, LeaseState, Need
from myelin.values import Attempt, LeaseId, NodeId


@dataclass(frozen=True, slots=True)
class Wanted:
    """A node that shall be there.

    Attributes:
        need: What it must have; also which node.
        generation: Goes up by one whenever the node is replaced: starts of a lower one aren't wanted any more.
        patience_until: When to give up waiting for something to become possible; Unix seconds.
    """

    need: Need
    generation: int = 1
    patience_until: float = math.inf


@dataclass(frozen=True, slots=True)
class Listing:
    """What the provider showed, when it was asked for at ``began`` (Unix seconds)."""

    began: float
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Observed:
    """All that is known. ``listing`` is None where it can't be read."""

    now: float
    listing: Listing | None
    intents: tuple[Intent, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """How patient to be; seconds.

    Attributes:
        tries: Starts for one wish, each on another offer where there is one.
        backoff_s: Before the second one; doubles each time.
        longest_backoff_s: And no longer than this.
        settle_s: How far a listing may lag behind: one that was asked for earlier than this after a start, or after a
            doubtful call, proves no absence.
    """

    tries: int = 3
    backoff_s: float = 0.2
    longest_backoff_s: float = 5.0
    settle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Launch:
    """Write an intent down, then start an attempt of a node. The need names the offers to avoid."""

    need: Need
    attempt: Attempt
    generation: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take the node that an earlier, doubtful call has left, by repeating the call with its key."""

    intent: Intent
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Release:
    """End a lease.

    Attributes:
        node, attempt: Of the start that it came from.
        why: For people; empty where it did nothing wrong.
        ends: The intent that ends with it, to be noted first; None for one too many, or one of unknown origin.
    """

    lease: LeaseId
    node: NodeId
    attempt: Attempt
    why: str = ""
    ends: Intent | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """Note that nothing is there (any more); ``why`` says more where that was not meant."""

    intent: Intent
    why: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again, at the latest at ``until`` (Unix seconds); infinity is whenever the next listing comes."""

    node: NodeId | None
    why: str
    until: float = math.inf


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The node can't be had."""

    node: NodeId
    reason: str


Action = Launch | Adopt | Release | Gone | Wait | GiveUp


def reconcile(wanted: Sequence[Wanted], observed: Observed, policy: Policy = Policy()) -> tuple[Action, ...]:
    """What to do now. Nothing is left to do, and nothing left behind, where it is empty.

    Args:
        wanted: One for each node that shall be there; none at the end of a run.
        observed: What is known. May be of some nodes only, together with ``wanted``: nodes don't depend on each other.
        policy: Patience.
    """
    wishes = {wish.need.node: wish for wish in wanted}
    leases = observed.listing.leases if observed.listing is not None else ()
    nodes = dict.fromkeys(
        [*wishes, *(intent.node for intent in observed.intents), *(lease.key.node for lease in leases)]
    )
    actions: list[Action] = []
    if observed.listing is None and not wanted:
        actions.append(Wait(None, "the listing can't be read, so it is not known what is left"))
    for node in nodes:
        actions += _OfNode(node, wishes.get(node), observed, policy).decide()
    return tuple(actions)


class _OfNode:
    """The decision about one node: first what each of its starts has come to, then whether another is due."""

    def __init__(self, node: NodeId, wish: Wanted | None, observed: Observed, policy: Policy) -> None:
        self.node = node
        self.wish = wish
        self.now = observed.now
        self.listing = observed.listing
        self.policy = policy
        self.intents = sorted(
            (intent for intent in observed.intents if intent.node == node), key=lambda intent: -intent.attempt
        )
        self.leases = [
            lease for lease in (observed.listing.leases if observed.listing else ()) if lease.key.node == node
        ]
        self.actions: list[Action] = []
        self.serving: Intent | None = None
        self.replaced: list[Intent] = []
        """Starts of earlier wishes that are on their way out."""
        self.obstacles: list[str] = []
        """What forbids another start."""

    def decide(self) -> list[Action]:
        """All actions for the node."""
        for intent in self.intents:
            self.look_at(intent)
        known = {intent.attempt for intent in self.intents}
        for lease in self.leases:
            if lease.key.attempt not in known:
                self.actions.append(Release(lease.id, self.node, lease.key.attempt, "nothing is known of its start"))
                self.obstacles.append("a node of an unknown start is still there")
        if self.wish is not None and self.serving is None:
            self.actions.append(self.next_start(self.wish))
        return self.actions

    def look_at(self, intent: Intent) -> None:
        """What one start has come to."""
        listed = [lease for lease in self.leases if lease.key.attempt == intent.attempt]
        if intent.state is IntentState.INTENDED:
            self.wait("a start is under way")
        elif listed:
            self.there(intent, listed)
        elif intent.state is IntentState.RELEASED:
            pass
        elif self.listing is None:
            self.unknown(intent)
        elif self.listing.began >= self.shown_from(intent):
            lost = intent.state is IntentState.LAUNCHED and self.wish is not None
            self.actions.append(Gone(intent, "it vanished from the provider's list" if lost else ""))
        elif self.is_wanted(intent) and intent.state is IntentState.LAUNCHED:
            self.serving = intent
        else:
            self.wait("what was not listed yet may still turn up", self.shown_from(intent))

    def there(self, intent: Intent, listed: Sequence[Lease]) -> None:
        """A start that has a node, or (a provider's own mistake) several."""
        alive = [lease for lease in listed if lease.state is not LeaseState.EXITED]
        kept: Lease | None = None
        if self.is_wanted(intent) and alive:
            kept = next((lease for lease in alive if lease.id == intent.lease), alive[0])
            self.serving = intent
            if intent.state is IntentState.DOUBTFUL:
                self.actions.append(Adopt(intent, kept.id))
        elif self.is_replaced(intent) and len(listed) == 1:
            self.replaced.append(intent)
        else:
            self.obstacles.append("an earlier start is still there")
        for lease in listed:
            if lease is not kept:
                ends = intent if kept is None else None
                self.actions.append(Release(lease.id, self.node, intent.attempt, lease.exit_reason, ends))

    def unknown(self, intent: Intent) -> None:
        """A start of which the listing might tell, if it could be read."""
        if self.is_wanted(intent) and intent.state is IntentState.LAUNCHED:
            self.serving = intent
            return
        self.obstacles.append("the listing can't be read")
        if intent.lease and not self.is_wanted(intent):
            self.actions.append(Release(intent.lease, self.node, intent.attempt, ends=intent))

    def next_start(self, wish: Wanted) -> Action:
        """Another start, or why there is none now."""
        if self.now > wish.patience_until:
            return GiveUp(self.node, self.last_failure() or "; ".join(self.obstacles) or "it took too long")
        if self.listing is None:
            return Wait(self.node, "the listing can't be read, so it is not known what there is")
        if self.obstacles or len(self.replaced) > 1:
            return Wait(self.node, self.obstacles[0] if self.obstacles else "two earlier starts are still there")
        failed = [intent for intent in self.intents if intent.generation == wish.generation]
        if len(failed) >= self.policy.tries:
            return GiveUp(self.node, self.last_failure())
        if failed:
            pause = min(self.policy.backoff_s * 2 ** (len(failed) - 1), self.policy.longest_backoff_s)
            due = max(intent.since for intent in failed) + pause
            if self.now < due:
                return Wait(self.node, "a moment before the next try", due)
        attempt = max((intent.attempt for intent in self.intents), default=0) + 1
        avoided = frozenset(intent.offer for intent in self.intents if intent.failure and intent.offer)
        return Launch(replace(wish.need, exclude=wish.need.exclude | avoided), Attempt(attempt), wish.generation)

    def is_wanted(self, intent: Intent) -> bool:
        """It is what the wish is about, and nothing newer serves it."""
        return (
            self.wish is not None
            and self.serving is None
            and intent.generation == self.wish.generation
            and intent.state in (IntentState.LAUNCHED, IntentState.DOUBTFUL)
        )

    def is_replaced(self, intent: Intent) -> bool:
        """It had a node that served an earlier wish: what takes its place needn't wait for its end."""
        return (
            self.wish is not None
            and intent.generation < self.wish.generation
            and intent.state in (IntentState.LAUNCHED, IntentState.RELEASING)
            and intent.served
        )

    def shown_from(self, intent: Intent) -> float:
        """The earliest listing that proves the absence of a start: asked for after its last change, and late enough
        after whatever may have made it."""
        return max(intent.since, intent.made + self.policy.settle_s)

    def last_failure(self) -> str:
        """Why the newest start failed."""
        return next((intent.failure for intent in self.intents if intent.failure), "")

    def wait(self, why: str, until: float = math.inf) -> None:
        """Something must be known better before another start."""
        self.obstacles.append(why)
        self.actions.append(Wait(self.node, why, until))
