"""Choosing a token from logits: greedy, or a draw keyed by (seed, position) so that a replay gives the same tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from myelin.values import SamplingParams


def choose(logits: NDArray[np.float32], parameters: SamplingParams, position: int) -> tuple[int, float]:
    """The next token and its log-probability under the untempered distribution.

    Args:
        logits: ``float32[vocab_size]``; not changed.
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

    scaled = logits.astype(np.float64) / parameters.temperature
    keep = len(scaled) if parameters.top_k <= 0 else min(parameters.top_k, len(scaled))
    order = np.argsort(-scaled, kind="stable")[:keep]
    weights = np.exp(scaled[order] - scaled[order[0]])
    cumulative = np.cumsum(weights)
    if parameters.top_p < 1.0:
        survivors = int(np.searchsorted(cumulative, parameters.top_p * cumulative[-1], side="left")) + 1
        cumulative = cumulative[: min(survivors, len(cumulative))]
    draw = np.random.Generator(np.random.Philox(key=[parameters.seed & (2**64 - 1), position])).random()
    index = min(int(np.searchsorted(cumulative, draw * cumulative[-1], side="right")), len(cumulative) - 1)
    token = int(order[index])
    return token, float(logits[token]) - log_total
