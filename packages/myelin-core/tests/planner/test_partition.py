"""The dynamic programming against brute force over every partition."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.planner.partition import balanced_partition, smallest_bottleneck


def every_partition(n_layers: int, cuts: tuple[int, ...], stages: int) -> list[tuple[int, ...]]:
    """The boundaries of all partitions into ``stages`` stages."""
    return [(0, *chosen, n_layers) for chosen in combinations(cuts, stages - 1)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, tuple[int, ...], int, list[int], list[int], list[int]]:
    """Layers with costs and sizes, some legal cuts, and nodes with speeds and limits (0 is none)."""
    n_layers = draw(st.integers(1, 9))
    cuts = tuple(cut for cut in range(1, n_layers) if draw(st.integers(0, 3)) > 0)
    stages = draw(st.integers(1, 5))
    weights = draw(st.lists(st.integers(1, 20), min_size=n_layers, max_size=n_layers))
    speeds = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=stages, max_size=stages))
    limits = draw(st.lists(st.sampled_from([0, 10, 25, 40, 80]), min_size=stages, max_size=stages))
    return n_layers, cuts, stages, weights, speeds, limits


@settings(max_examples=400, deadline=None)
@given(problems())
def test_the_best_partition_is_found(
    problem: tuple[int, tuple[int, ...], int, list[int], list[int], list[int]],
) -> None:
    n_layers, cuts, stages, weights, speeds, limits = problem

    def cost(stage: int, first: int, end: int) -> float:
        total = sum(weights[first:end])
        return math.inf if limits[stage] and total > limits[stage] else total / speeds[stage]

    def costs(boundaries: tuple[int, ...]) -> list[float]:
        return [cost(i, a, b) for i, (a, b) in enumerate(pairwise(boundaries))]

    possible = [costs(boundaries) for boundaries in every_partition(n_layers, cuts, stages)]
    expected = min(((max(each), sum(c * c for c in each)) for each in possible), default=(math.inf, math.inf))

    sizes = balanced_partition(n_layers, cuts, stages, cost)

    assert smallest_bottleneck(n_layers, cuts, stages, cost) == expected[0]
    if math.isinf(expected[0]):
        assert sizes is None
        return
    assert sizes is not None
    assert sum(sizes) == n_layers
    assert len(sizes) == stages
    boundaries = tuple(sum(sizes[:index]) for index in range(stages + 1))
    assert set(boundaries[1:-1]) <= set(cuts)
    found = costs(boundaries)
    assert (max(found), sum(c * c for c in found)) == expected  # sums of eighths: exact in float


def test_equal_layers_over_equal_nodes_are_even() -> None:
    sizes = balanced_partition(10, range(1, 10), 3, lambda stage, first, end: float(end - first))
    assert sizes is not None
    assert sorted(sizes) == [3, 3, 4]


def test_more_stages_than_layers_are_impossible() -> None:
    assert balanced_partition(2, (1,), 3, lambda stage, first, end: 1.0) is None
    assert balanced_partition(2, (1,), 0, lambda stage, first, end: 1.0) is None
