"""Choosing a token from logits: greedy, or a draw keyed by (seed, position) so that a replay gives the same tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from myelin.values import SamplingParams


def choose(logits: NDArray[np.float32], parameters: SamplingParams, position: int) -> tuple[int, float]:
    """The next token and its log-probability under the untempered distribution.

    Args:
        logits: ``float32[vocab_size]``, finite or ``-inf`` (never chosen); not changed.
        parameters: How to choose. With temperature 0 the most likely token wins, ties to the lowest id.
        position: Of the token that is chosen; with the seed it keys the draw.

    Order of the filters: temperature, then ``top_k``, then ``top_p``; the draw is by inverse CDF over the survivors,
    most likely first (ties to the lowest id). The log-sum-exp is taken in float64.
    """
    best = int(np.argmax(logits))
    peak = float(logits[best])
    with np.errstate(over="ignore"):  # logits farther apart than float32 reaches: -inf is as good as the difference
        below = logits - logits[best]
    log_total = peak + math.log(float(np.exp(below, dtype=np.float32).sum(dtype=np.float64)))
    if parameters.temperature <= 0.0:
        return best, peak - log_total

    # The peak is subtracted before the division: a tiny temperature then gives -inf for the others, never inf - inf.
    with np.errstate(over="ignore"):
        scaled = (logits.astype(np.float64) - peak) / parameters.temperature
    draw = np.random.Generator(np.random.Philox(key=_key(parameters.seed, position))).random()
    token = _drawn(scaled, parameters.top_k, parameters.top_p, draw)
    return token, float(logits[token]) - log_total


def _drawn(scaled: NDArray[np.float64], top_k: int, top_p: float, draw: float) -> int:
    """The token at ``draw``, in [0, 1), of the filtered distribution.

    Sorting a vocabulary of 262,144 takes longer than a small model's step, and the draw rarely lands beyond the first
    thousand: so those alone are ranked first, and all only where they don't reach far enough.
    """
    limit = min(top_k, len(scaled)) if top_k > 0 else len(scaled)
    order = _most_likely(scaled, min(limit, RANKED_FIRST))
    cumulative = np.cumsum(np.exp(scaled[order]))
    total = float(cumulative[-1])
    if limit > RANKED_FIRST:
        total = float(np.exp(scaled).sum()) if top_k <= 0 else math.inf
        if cumulative[-1] <= total * (top_p if top_p < 1.0 else draw):
            order = _most_likely(scaled, limit)
            cumulative = np.cumsum(np.exp(scaled[order]))
            total = float(cumulative[-1])
    if top_p < 1.0:
        survivors = int(np.searchsorted(cumulative, top_p * total, side="left")) + 1
        cumulative = cumulative[:survivors]
        total = float(cumulative[-1])
    index = min(int(np.searchsorted(cumulative, draw * total, side="right")), len(cumulative) - 1)
    return int(order[index])


RANKED_FIRST = 1024
"""How many tokens are ranked before the rest is looked at."""


def _most_likely(scaled: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Ids of the ``count`` most likely tokens, most likely first, ties to the lowest id; fewer where the others' share
    is below what float64 can tell from nothing."""
    threshold = np.partition(scaled, -count)[-count] if count < len(scaled) else -np.inf
    candidates = np.flatnonzero(scaled >= max(threshold, _NEGLIGIBLE))
    return candidates[np.argsort(-scaled[candidates], kind="stable")][:count]


_NEGLIGIBLE = math.log(2.0**-53) - math.log(2.0**24)
"""Even 2^24 tokens below this log-probability ratio add up to less than the last bit of the total."""


def _key(seed: int, position: int) -> NDArray[np.uint64]:
    """Philox's key: any Python int as a seed, modulo 2^64."""
    return np.array([seed % 2**64, position], dtype=np.uint64)
