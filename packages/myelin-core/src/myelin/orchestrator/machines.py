"""Which offer each stage is planned for: what there is, arrangements of stages over it, and the first that holds them.

Machines are unequal: a stage on one with half the memory gets fewer layers, and one that can't hold even a layer is
gone around. The planner knows nothing of offers; it is asked for a plan on nodes with given memory and speed, one
arrangement after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from myelin.cluster.provider import Need, Offer, Provider
from myelin.errors import PlanError
from myelin.planner.run_plan import NodeCapacity, RunPlan
from myelin.planner.texts import readable_bytes
from myelin.values import NodeId

MOST_ARRANGEMENTS = 64
"""How many are tried at most."""
_SHOWN = 6

Planner = Callable[[tuple[NodeCapacity, ...]], RunPlan]
"""Plans the model on nodes; raises :class:`PlanError`."""


def node_names(stages: int) -> tuple[NodeId, ...]:
    """``stage-0``, ``stage-1``, …"""
    return tuple(NodeId(f"stage-{index}") for index in range(stages))


async def read_offers(provider: Provider, engine: str, plan: Planner, stages: int) -> tuple[Offer, ...]:
    """What the provider could start for a run, the best first; nothing is started.

    Of a provider that costs nothing all of it, small machines too. Where money is asked, an offer is first sought that
    holds its part of an even split, since the best of those is the cheapest; whatever there is counts only where there
    are too few.

    Raises:
        MyelinError: It can't be read.
    """
    names = node_names(stages)
    if not names:
        return ()  # the planner says what is wrong with that
    every = tuple(await provider.offers(Need(names[0], 0, engine)))
    if not any(offer.dollars_per_hour for offer in every):
        return every
    even = plan(tuple(NodeCapacity(name) for name in names))
    largest = max(stage.memory_bytes for stage in even.stages)
    fitting = tuple(await provider.offers(Need(names[0], largest, engine)))
    return fitting if _room(fitting) >= stages else every


def plan_on(offers: Sequence[Offer], stages: int, plan: Planner, *, packed: bool) -> tuple[RunPlan, tuple[Offer, ...]]:
    """The plan on the best arrangement of ``stages`` over ``offers`` that holds the model. Pure as ``plan`` is.

    Args:
        offers: The best first.
        stages: How many.
        plan: The planner.
        packed: Whether few machines are better than many.

    Returns:
        The plan, and the offer of each node in the order of :func:`node_names`; no offers where there is none, or too
        little room in all of them together: what is offered later must do then.

    Raises:
        PlanError: None holds it, or the request itself can't be planned.
    """
    first: PlanError | None = None
    for arrangement in islice(arrangements(offers, stages, packed=packed), MOST_ARRANGEMENTS):
        try:
            return plan(capacities(arrangement)), arrangement
        except PlanError as error:
            if error.reason != "too-little-memory":
                raise
            first = first or error
    if first is not None:
        raise PlanError(first.message, f"{first.hint}; offered: {_shown(offers)}", reason=first.reason) from None
    return plan(tuple(NodeCapacity(name) for name in node_names(stages))), ()


def capacities(arrangement: Sequence[Offer]) -> tuple[NodeCapacity, ...]:
    """What the planner may assume of each node. Stages on one machine share its memory evenly, unless each has its own;
    speeds count only where all are known. Pure."""
    known = all(offer.bandwidth > 0 for offer in arrangement)
    sharers = [sum(other.id == offer.id for other in arrangement) if offer.shared else 1 for offer in arrangement]
    return tuple(
        NodeCapacity(
            name,
            # 0 would be «unknown»; a machine with nothing left for a stage has 1 byte.
            max(1, offer.memory_bytes // count) if offer.memory_bytes else 0,
            offer.bandwidth if known else 1.0,
        )
        for name, offer, count in zip(node_names(len(arrangement)), arrangement, sharers, strict=True)
    )


def arrangements(offers: Sequence[Offer], stages: int, *, packed: bool = False) -> Iterator[tuple[Offer, ...]]:
    """Ways of giving each stage an offer, the best first, none twice. Pure.

    Over as many machines as can be (or as few, where ``packed``), then over fewer (or more): those that the provider
    likes best, then the largest. Stages of one machine are neighbours. Each machine gets as many stages as any other,
    or else as its memory allows; and where machines are unequal, the largest go to both ends, or to one: the first
    stage has the embedding, the last one the output.
    """
    seen: set[tuple[str, ...]] = set()
    sizes = range(min(len(offers), stages), 0, -1)
    for size in reversed(sizes) if packed else sizes:
        for chosen in (list(offers[:size]), _largest(offers, size)):
            for counts in (_even(chosen, stages), _by_memory(chosen, stages)):
                if counts is None:
                    continue
                pairs = list(zip(chosen, counts, strict=True))
                by_memory = sorted(pairs, key=lambda pair: -_memory(pair[0]))
                both_ends = by_memory[::2] + by_memory[1::2][::-1]
                for order in (pairs, both_ends, by_memory, by_memory[::-1]):
                    arrangement = tuple(offer for offer, count in order for _ in range(count))
                    names = tuple(offer.id for offer in arrangement)
                    if names not in seen:
                        seen.add(names)
                        yield arrangement


def _largest(offers: Sequence[Offer], size: int) -> list[Offer]:
    """The ``size`` offers with the most memory, in their own order."""
    kept = sorted(range(len(offers)), key=lambda index: (-_memory(offers[index]), index))[:size]
    return [offers[index] for index in sorted(kept)]


def _even(chosen: Sequence[Offer], stages: int) -> list[int] | None:
    """As many stages on each as on any other, as far as there is room; None where there isn't."""
    return _shared_out(chosen, stages, [1.0] * len(chosen))


def _by_memory(chosen: Sequence[Offer], stages: int) -> list[int] | None:
    """Stages in proportion to memory, at least one each; None where it isn't known, or there is no room."""
    if not all(offer.memory_bytes for offer in chosen):
        return None
    return _shared_out(chosen, stages, [float(offer.memory_bytes) for offer in chosen])


def _shared_out(chosen: Sequence[Offer], stages: int, weights: Sequence[float]) -> list[int] | None:
    """One each, then one after the other to whoever has the most weight for each stage that it would have."""
    if _room(chosen) < stages or len(chosen) > stages:
        return None
    counts = [1] * len(chosen)
    for _ in range(stages - len(chosen)):
        free = [index for index, offer in enumerate(chosen) if not offer.room or counts[index] < offer.room]
        taker = max(free, key=lambda index: (weights[index] / (counts[index] + 1), -index))
        counts[taker] += 1
    return counts


def _memory(offer: Offer) -> float:
    """Of unknown memory, we hope for the best."""
    return offer.memory_bytes or math.inf


def _room(offers: Sequence[Offer]) -> float:
    return sum(offer.room or math.inf for offer in offers)


def _shown(offers: Sequence[Offer]) -> str:
    shown = [readable_bytes(offer.memory_bytes) if offer.memory_bytes else "?" for offer in offers[:_SHOWN]]
    return ", ".join(shown) + (f", and {len(offers) - _SHOWN} more" if len(offers) > _SHOWN else "")
