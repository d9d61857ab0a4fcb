"""Intents: what was meant to be started, and what became of it. Pure; the ledger keeps them, the reconciler reads them.

An intent is written down before the provider is called, so that whatever a crash leaves behind has a name::

    INTENDED ──▶ LAUNCHED ──▶ RELEASING ──▶ RELEASED
        │            ▲             ▲            ▲
        └────────▶ DOUBTFUL ───────┴────────────┘

Times are Unix seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from myelin.cluster.provider import Lease
from myelin.values import Attempt, LeaseId, NodeId

_FIRST = Attempt(1)
_NONE = LeaseId("")


class IntentState(StrEnum):
    """How far one start of a node has come."""

    INTENDED = "intended"
    """Written down; the provider is being called."""
    DOUBTFUL = "doubtful"
    """The call failed, or whoever made it is gone: whether there is a node, a listing has to say."""
    LAUNCHED = "launched"
    """It has a lease."""
    RELEASING = "releasing"
    """It isn't wanted any more; it counts, and costs, until a listing shows that it is gone."""
    RELEASED = "released"
    """A listing has shown that nothing is there, or nothing can have been started."""


@dataclass(frozen=True, slots=True)
class Intent:
    """One start of one logical node.

    Attributes:
        node, attempt: Which start; attempts of a node are numbered upwards for as long as the run is remembered.
        generation: Which wish for the node it serves; a replacement is a wish of a higher generation.
        state: See :class:`IntentState`.
        since: When that state began.
        started: When it was written down; money is counted from here.
        made: When the provider's call had ended, well or not: what there is of it was made before.
        ended: When it was seen to be gone; 0 before.
        offer: The id of the offer.
        dollars_per_hour: Its price.
        lease: The provider's name for it; empty while there is none.
        served: Whether the call that made it was answered, so that there was a node which could be lost.
        failure: Why it failed or was given up, for people; its offer is avoided then. Empty where it served well.
    """

    node: NodeId
    attempt: Attempt = _FIRST
    generation: int = 1
    state: IntentState = IntentState.INTENDED
    since: float = 0.0
    started: float = 0.0
    made: float = 0.0
    ended: float = 0.0
    offer: str = ""
    dollars_per_hour: float = 0.0
    lease: LeaseId = _NONE
    served: bool = False
    failure: str = ""

    @property
    def open(self) -> bool:
        """It may stand for a node that is there."""
        return self.state is not IntentState.RELEASED

    def launched(self, lease: Lease, now: float) -> Intent:
        """The provider answered with a lease, whose price and offer count from now on."""
        return replace(
            self,
            state=IntentState.LAUNCHED,
            since=now,
            made=now,
            lease=lease.id,
            served=True,
            failure="",
            offer=lease.offer or self.offer,
            dollars_per_hour=lease.dollars_per_hour or self.dollars_per_hour,
        )

    def called(self, now: float) -> Intent:
        """The call is made once more, to take what an earlier one has made."""
        return replace(self, state=IntentState.INTENDED, since=now)

    def doubted(self, why: str, now: float) -> Intent:
        """Nobody knows what became of the call."""
        return replace(self, state=IntentState.DOUBTFUL, since=now, made=now, failure=why)

    def unwanted(self, why: str, now: float, lease: LeaseId = _NONE) -> Intent:
        """It shall go; also one that was thought gone and has turned up. ``why`` is empty where it did nothing wrong.

        Args:
            lease: What it has turned out to have, where that wasn't known.
        """
        if self.state is IntentState.RELEASING:
            return self
        return replace(
            self,
            state=IntentState.RELEASING,
            since=now,
            ended=0.0,
            lease=self.lease or lease,
            failure=why or self.failure,
        )

    def gone(self, now: float, why: str = "") -> Intent:
        """Nothing is there."""
        return replace(self, state=IntentState.RELEASED, since=now, ended=now, failure=why or self.failure)

    def dollars(self, now: float) -> float:
        """What it has cost until ``now``, at its price, from the intent to its end."""
        return max(0.0, (self.ended or now) - self.started) / 3600 * self.dollars_per_hour


def inherited(intent: Intent, now: float) -> Intent:
    """An intent of an orchestrator that is gone, as the next one must see it.

    Whatever it was in the middle of, only a listing can tell what is there.
    """
    if not intent.open:
        return intent
    made = now if intent.state is IntentState.INTENDED else min(intent.made, now)
    state = intent.state if intent.state is IntentState.RELEASING else IntentState.DOUBTFUL
    return replace(intent, state=state, since=now, made=made)


@dataclass(frozen=True, slots=True)
class Spend:
    """What a run's nodes cost: now, in dollars an hour, and so far, in dollars. Estimates from the offers' prices."""

    dollars_per_hour: float = 0.0
    dollars: float = 0.0


def spend(intents: tuple[Intent, ...], now: float) -> Spend:
    """What ``intents`` cost. One that is being released costs until it is gone."""
    return Spend(
        sum(intent.dollars_per_hour for intent in intents if intent.open),
        sum(intent.dollars(now) for intent in intents),
    )
