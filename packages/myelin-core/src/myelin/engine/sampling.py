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
    log_total = peak + math.log(float(np.exp(logits - logits[best], dtype=np.float32).sum(dtype=np.float64)))
    if parameters.temperature <= 0.0:
        return best, peak - log_total

    order, weights = _most_likely(logits, peak, parameters)
    cumulative = np.cumsum(weights)
    if parameters.top_p < 1.0:
        survivors = int(np.searchsorted(cumulative, parameters.top_p * cumulative[-1], side="left")) + 1
        cumulative = cumulative[:survivors]
    draw = np.random.Generator(np.random.Philox(key=_key(parameters.seed, position))).random()
    index = min(int(np.searchsorted(cumulative, draw * cumulative[-1], side="right")), len(cumulative) - 1)
    token = int(order[index])
    return token, float(logits[token]) - log_total


def _most_likely(
    logits: NDArray[np.float32], peak: float, parameters: SamplingParams
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Ids of the ``top_k`` most likely tokens (all where it is 0), most likely first, and their unscaled probabilities.

    Tokens whose probability is below float64's resolution of the best one's are left out: no draw can reach them, and
    so a peaked distribution over a vocabulary of 262,144 isn't sorted whole.
    """
    # The peak is subtracted before the division: a tiny temperature then gives -inf for the others, never inf - inf.
    with np.errstate(over="ignore"):
        scaled = (logits.astype(np.float64) - peak) / parameters.temperature
    if 0 < parameters.top_k < len(scaled):
        threshold = np.partition(scaled, -parameters.top_k)[-parameters.top_k]
    else:
        threshold = -np.inf
    candidates = np.flatnonzero(scaled >= max(threshold, _NEGLIGIBLE))
    order = candidates[np.argsort(-scaled[candidates], kind="stable")]
    if parameters.top_k > 0:
        order = order[: parameters.top_k]  # ties at the threshold: the lowest ids stay
    return order, np.exp(scaled[order])


_NEGLIGIBLE = math.log(2.0**-53) - math.log(2.0**24)
"""Even 2^24 tokens below this log-probability ratio add up to less than the last bit of the total."""


def _key(seed: int, position: int) -> NDArray[np.uint64]:
    """Philox's key: any Python int as a seed, modulo 2^64."""
    return np.array([seed % 2**64, position], dtype=np.uint64)
