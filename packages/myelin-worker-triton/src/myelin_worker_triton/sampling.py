"""Drawing tokens where the logits are: what ``choose`` of :mod:`myelin.engine_api` does, for many rows at once.

The same order of filters and the same float64 arithmetic: temperature, then ``top_k``, then ``top_p``, then the inverse
of the cumulative distribution over the survivors, most likely first, ties to the lowest id. Only the one random number
of each row, which the seed and the position decide, is made on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from myelin.engine_api import SamplingParams


def draws(parameters: Sequence[SamplingParams], positions: Sequence[int]) -> list[float]:
    """A number in [0, 1) for each row: the first of NumPy's Philox 4x64 with the key (seed modulo 2^64, position)."""
    return [
        float(np.random.Generator(np.random.Philox(key=np.array([one.seed % 2**64, position], np.uint64))).random())
        for one, position in zip(parameters, positions, strict=True)
    ]


def drawn(logits: torch.Tensor, parameters: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """A token for each row.

    Args:
        logits: ``float32[rows, vocab_size]`` on any device, finite or ``-inf``; not changed.
        parameters: Of each row, with temperatures above 0.
        positions: Of the tokens that are drawn.

    Returns:
        ``int64[rows]`` on the device of the logits.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    count = logits.shape[1]
    limits = [one.top_k if 0 < one.top_k < count else count for one in parameters]
    # The peak is subtracted before the division, in float64: a tiny temperature gives -inf, never inf - inf.
    below = logits.double() - logits.amax(dim=1, keepdim=True).double()
    ranked, order = torch.sort(
        below / column([one.temperature for one in parameters]), dim=1, descending=True, stable=True
    )
    outside = torch.arange(count, device=logits.device)[None, :] >= column(limits)
    cumulative = torch.exp(ranked).masked_fill(outside, 0.0).cumsum(dim=1)
    bound = column([min(one.top_p, 1.0) for one in parameters]) * cumulative[:, -1:]
    last = torch.searchsorted(cumulative, bound).clamp(max=count - 1)
    target = column(draws(parameters, positions)) * cumulative.gather(1, last)
    place = torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
    return order.gather(1, place)[:, 0]
