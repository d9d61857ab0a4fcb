"""Cutting a chain of layers into stages: the best cut, exactly, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

StageCost = Callable[[int, int, int], float]
"""``cost(stage, first, end)`` of giving layers ``[first, end)`` to a stage; ``math.inf`` where that can't be."""


def smallest_bottleneck(n_layers: int, cuts: Sequence[int], stages: int, cost: StageCost) -> float:
    """The least possible cost of the costliest stage, ``math.inf`` where no partition is possible.

    Args:
        n_layers: Layers to give out, all of them, in order.
        cuts: Where a stage may begin, ascending, within ``1..n_layers-1``.
        stages: How many stages, each with at least one layer.
        cost: See :data:`StageCost`.
    """
    bottleneck, _ = _solve(n_layers, cuts, stages, cost, max)
    return bottleneck


def balanced_partition(n_layers: int, cuts: Sequence[int], stages: int, cost: StageCost) -> tuple[int, ...] | None:
    """The layers of each stage, so that the costliest costs least and, of such partitions, the stages are most even.

    «Most even» is the least sum of squared costs. Two passes, both exact: the first finds the least bottleneck, the
    second minimises the sum (which is additive, so dynamic programming holds for it) over partitions that keep to that
    bottleneck.

    Returns:
        How many layers each stage has, or None where no partition is possible.
    """
    bottleneck = smallest_bottleneck(n_layers, cuts, stages, cost)
    if math.isinf(bottleneck):
        return None

    def squared(stage: int, first: int, end: int) -> float:
        value = cost(stage, first, end)
        return value * value if value <= bottleneck else math.inf

    _, boundaries = _solve(n_layers, cuts, stages, squared, _add)
    return tuple(end - first for first, end in pairwise(boundaries))


def _add(before: float, last: float) -> float:
    return before + last


def _solve(
    n_layers: int, cuts: Sequence[int], stages: int, cost: StageCost, join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Minimise ``join(join(c0, c1), …)`` over all partitions.

    ``best[j]`` after ``k`` rounds is the least joined cost of ``k`` stages that cover exactly the layers before
    boundary ``j``. Returns that of everything and the boundaries that reach it, from 0 to ``n_layers`` (empty where it
    is infinite). Of equal partitions the one whose last cuts come first is taken, so the answer never depends on
    anything but the arguments.
    """
    places = (0, *cuts, n_layers)
    last = len(places) - 1
    if not 1 <= stages <= last:
        return math.inf, []
    best = [0.0] + [math.inf] * last
    choices: list[list[int]] = []
    for stage in range(stages):
        following = [math.inf] * (last + 1)
        choice = [0] * (last + 1)
        left = stages - 1 - stage
        for end in range(stage + 1, last + 1 - left):
            for begin in range(stage, end):
                if math.isinf(best[begin]):
                    continue
                joined = join(best[begin], cost(stage, places[begin], places[end]))
                if joined < following[end]:
                    following[end], choice[end] = joined, begin
        best = following
        choices.append(choice)
    if math.isinf(best[last]):
        return math.inf, []
    boundaries = [last]
    for choice in reversed(choices):
        boundaries.append(choice[boundaries[-1]])
    return best[last], [places[index] for index in reversed(boundaries)]
