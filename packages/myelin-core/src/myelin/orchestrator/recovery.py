"""What to do about losses: pure decisions, each a function of what is known.

The words: a *loss* is a node that can't be counted on; *trouble* is anything for which the open epoch can't go on (a
loss, a broken edge, a fault that a stage told of). A *round* is one try to mend: every node is there and loaded again,
the edges are opened with a new epoch, and a token has come through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from myelin.errors import MyelinError
from myelin.values import Epoch, FinishReason, SamplingParams, SequenceId
from myelin.wire.requests import Finished, Submit

STRIKES = 2
"""A request that was under way at so many faults of an engine is ended with the last one, not admitted again: it may be
what the engine dies of."""

_BREAKS = frozenset({"node-lost", "edge-lost", "edge-closed", "edge-broken"})
"""Reasons that tell *that* something broke; why may become known a moment later."""

_OF_THE_MACHINE = frozenset({"node-exited", "node-lost", "startup-timeout", "load-stalled"})
"""Reasons for which another machine, or another start, may do better. What remains, every node would meet again: a
model that can't be opened, an engine that has no kernel for it, an address where somebody else is."""

_ADOPTED_OTHERWISE = "already-provisioned"
"""An adopted node holds another stage than the one that is due."""

_AGAIN = _BREAKS | {"unreachable", "stream-lost", "edges-timeout", "pipeline-lost", "epoch-lost", "closed", "wire"}
"""Reasons of a round's failure for which another round may do better."""


class Remedy(StrEnum):
    """What to do about an attempt that failed."""

    REDIAL = "redial"
    """Only its control stream is known to be broken: it may still be there, with all that it has loaded."""
    REPLACE = "replace"
    GIVE_UP = "give-up"


def remedy(reason: str, *, reached: bool, redialled: bool, tries: int, limit: int, engine_dead: bool = False) -> Remedy:
    """What to do about an attempt that failed for ``reason``.

    Args:
        reached: It had been dialled, so that it can be dialled again.
        redialled: It was, since it last served.
        tries: Launches of this node since it last served, this one included.
        limit: The most launches that there may be.
        engine_dead: The node has said that its engine can't go on; the reason is the engine's own.
    """
    if reason == "node-lost" and reached and not redialled:
        return Remedy.REDIAL
    if engine_dead or reason in _OF_THE_MACHINE or reason == _ADOPTED_OTHERWISE:
        return Remedy.REPLACE if tries < limit else Remedy.GIVE_UP
    return Remedy.GIVE_UP


def only_tells_of_a_break(error: BaseException | None) -> bool:
    """Whether an error is worth a moment's wait for a better explanation."""
    return isinstance(error, MyelinError) and error.reason in _BREAKS


def worth_another_round(error: MyelinError, *, trouble: bool) -> bool:
    """Whether a round that failed with ``error`` should be followed by another.

    Args:
        trouble: Something was reported about its epoch meanwhile, so that the failure isn't the edges' own.
    """
    return trouble or error.reason in _AGAIN


def next_epoch(ours: Epoch, seen: Iterable[int]) -> Epoch:
    """The epoch to open after ours and after any that a node has seen (an adopted one may be ahead of us)."""
    return Epoch(max([ours, *seen]) + 1)


@dataclass(frozen=True, slots=True)
class Budget:
    """How much mending is allowed: ``rounds`` within any ``window_s`` seconds."""

    rounds: int
    window_s: float


@dataclass(frozen=True, slots=True)
class History:
    """When rounds began, oldest first; times of one monotonic clock."""

    times: tuple[float, ...] = ()

    def began(self, now: float, budget: Budget) -> History | None:
        """With one more round, at ``now``; None where the budget doesn't allow it."""
        recent = tuple(time for time in self.times if now - time < budget.window_s)
        return History((*recent, now)) if len(recent) < budget.rounds else None


@dataclass(frozen=True, slots=True)
class Order:
    """What a client asked for. The sequence keeps its number through all epochs."""

    sequence: SequenceId
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    ignore_end: bool


def first_admission(order: Order) -> Submit:
    """How a request is admitted when nothing of it was sent yet."""
    return Submit(order.sequence, order.prompt, order.max_tokens, order.sampling, order.ignore_end)


def admission(order: Order, sent: Sequence[int], max_context: int) -> Submit | Finished:
    """How a request is (re-)admitted when its client has got the tokens ``sent``.

    They follow the prompt as forced input, so that the next token is drawn for the very position at which it would have
    been: sampling is keyed by seed and position, and a row of a batch depends on nothing but what comes before it
    (batch invariance), so the tokens are those of an undisturbed run. Where only the news of its end was lost, that is
    told again. (An end-of-generation token is never sent: the replay draws it again.)
    """
    if not sent:
        return first_admission(order)
    if len(sent) >= order.max_tokens or len(order.prompt) + len(sent) >= max_context:
        return Finished(order.sequence, FinishReason.LENGTH, len(sent))
    return Submit(
        order.sequence,
        (*order.prompt, *sent),
        order.max_tokens - len(sent),
        order.sampling,
        order.ignore_end,
    )


def cause(error: MyelinError, node: str) -> str:
    """What an error says, without the node's name in front."""
    text = error.message
    for prefix in (f"{node} was lost: ", f"{node}: ", f"{node} "):
        if text.startswith(prefix):
            return text[len(prefix) :]
    return text
