"""Choosing tokens: greedy, filters, the keyed draw."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from myelin.engine.sampling import choose
from myelin.values import GREEDY, SamplingParams

rows = st.lists(
    st.floats(-80, 80, width=32) | st.just(-math.inf) | st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=60
).filter(lambda values: max(values) > -math.inf)


def logits_of(values: list[float]) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def probabilities(logits: NDArray[np.float32], sampling: SamplingParams) -> dict[int, float]:
    """What the draw should follow, written out in plain Python: temperature, then top_k, then top_p."""
    scaled = [float(value) / sampling.temperature for value in logits]
    peak = max(scaled)
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = [math.exp(scaled[token] - peak) for token in order]
    total = sum(weights)
    kept: dict[int, float] = {}
    for token, weight in zip(order, weights, strict=True):
        if sum(kept.values()) >= sampling.top_p * total and kept:
            break
        kept[token] = weight
    rest = sum(kept.values())
    return {token: weight / rest for token, weight in kept.items()}


@given(rows)
def test_greedy_takes_the_first_of_the_best(values: list[float]) -> None:
    logits = logits_of(values)
    token, _ = choose(logits, GREEDY, 3)
    assert logits[token] == logits.max()
    assert token == min(index for index, value in enumerate(logits) if value == logits.max())


@given(rows, st.integers(0, 2**40), st.floats(0, 3), st.integers(0, 70), st.floats(0.01, 1))
@settings(max_examples=300)
def test_what_is_chosen_survives_the_filters(
    values: list[float], seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = logits_of(values)
    before = logits.copy()
    token, logprob = choose(logits, SamplingParams(temperature, top_k, top_p, seed), 5)
    np.testing.assert_array_equal(logits, before)
    # However it was chosen, the log-probability is that of the untempered distribution.
    wide = logits.astype(np.float64)
    assert logprob == pytest.approx(wide[token] - np.logaddexp.reduce(wide), abs=1e-4)
    assert logits[token] > -math.inf
    if top_k:
        better = int((logits > logits[token]).sum()) + int((logits[:token] == logits[token]).sum())
        assert better < top_k


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.5, top_k=6, top_p=0.8),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sampling: SamplingParams) -> None:
    logits = np.random.default_rng(1).normal(0, 1.5, 12).astype(np.float32)
    expected = probabilities(logits, sampling)
    draws = 4000
    counts: dict[int, int] = {}
    for position in range(draws):
        token, _ = choose(logits, sampling, position)
        counts[token] = counts.get(token, 0) + 1
    assert counts.keys() <= expected.keys()
    # Pearson's chi-squared; its mean is the degrees of freedom, its deviation sqrt(2 * degrees): five deviations away.
    degrees = len(expected) - 1
    chi = sum((counts.get(token, 0) - draws * share) ** 2 / (draws * share) for token, share in expected.items())
    assert chi < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("spread", [0.01, 1.0, 20.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.9), (2000, 1.0), (2000, 0.5), (30, 0.9)])
def test_a_large_vocabulary_gives_what_ranking_all_of_it_would(
    monkeypatch: pytest.MonkeyPatch, spread: float, top_k: int, top_p: float
) -> None:
    logits = np.random.default_rng(2).normal(0, spread, 5000).astype(np.float32)
    sampling = SamplingParams(1.0, top_k, top_p, seed=3)
    fast = [choose(logits, sampling, position)[0] for position in range(60)]
    monkeypatch.setattr("myelin.engine.sampling.RANKED_FIRST", 5000)
    assert fast == [choose(logits, sampling, position)[0] for position in range(60)]


def test_the_seed_and_the_position_key_the_draw() -> None:
    logits = np.zeros(1000, np.float32)
    sampling = SamplingParams(temperature=1.0, seed=7)
    first = [choose(logits, sampling, position)[0] for position in range(50)]
    assert first == [choose(logits, sampling, position)[0] for position in range(50)]
    assert len(set(first)) > 40
    other = [choose(logits, SamplingParams(temperature=1.0, seed=8), position)[0] for position in range(50)]
    assert first != other
    later = [choose(logits, sampling, position)[0] for position in range(1, 50)]
    assert later == first[1:]


def test_a_draw_is_the_same_on_every_machine() -> None:
    """Philox and the inverse CDF are specified to the bit: a replay may happen on another machine."""
    logits = np.linspace(-2, 2, 100).astype(np.float32)
    sampling = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, seed=42)
    assert [choose(logits, sampling, position)[0] for position in range(8)] == [72, 88, 89, 78, 75, 92, 91, 81]


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1, 2**64, 2**100])
def test_any_integer_is_a_seed(seed: int) -> None:
    logits = np.zeros(50, np.float32)
    token, _ = choose(logits, SamplingParams(temperature=1.0, seed=seed), 1)
    assert token == choose(logits, SamplingParams(temperature=1.0, seed=seed % 2**64), 1)[0]


def test_top_k_of_one_is_greedy() -> None:
    logits = logits_of([1.0, 5.0, 5.0, 2.0])
    sampling = SamplingParams(temperature=3.0, top_k=1)
    assert {choose(logits, sampling, position)[0] for position in range(40)} == {1}


def test_a_tiny_top_p_keeps_the_best() -> None:
    logits = logits_of([1.0, 1.5, 1.0])
    sampling = SamplingParams(temperature=1.0, top_p=1e-9)
    assert {choose(logits, sampling, position)[0] for position in range(40)} == {1}


def test_ties_at_the_edge_of_top_k_stay_with_the_lowest_ids() -> None:
    logits = logits_of([0.0, 1.0, 1.0, 3.0, 1.0])
    sampling = SamplingParams(temperature=1.0, top_k=3)
    assert {choose(logits, sampling, position)[0] for position in range(200)} == {3, 1, 2}


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1.0, 1e6, 1e300])
def test_huge_logits_and_temperatures(temperature: float) -> None:
    logits = np.array([-3e38, 3e38, 2.9e38, 0.0], np.float32)
    token, logprob = choose(logits, SamplingParams(temperature=temperature, seed=1), 0)
    assert 0 <= token < 4
    assert logprob <= 0
    if temperature < 1e30:
        assert (token, logprob) == (1, 0.0)


def test_a_masked_token_is_never_drawn() -> None:
    logits = logits_of([-math.inf, 0.0, -math.inf, 0.0])
    sampling = SamplingParams(temperature=100.0)
    assert {choose(logits, sampling, position)[0] for position in range(100)} == {1, 3}
