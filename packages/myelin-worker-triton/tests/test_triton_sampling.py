"""Drawing where the logits are gives the tokens that every engine draws from them on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.engine_api import SamplingParams, choose
from myelin_worker_triton.sampling import drawn

PARAMETERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-30, 1e-3, 0.3, 0.8, 1.0, 2.5, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1023, 1024, 1025, 10**6]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    seed=st.integers(-(2**63), 2**64),
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(PARAMETERS, st.integers(0, 2**31)), min_size=1, max_size=5),
    vocabulary=st.sampled_from([1, 2, 50, 1500, 4000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    ties=st.booleans(),
    number=st.integers(0, 2**32 - 1),
)
def test_every_row_gets_the_token_of_the_host(
    rows: list[tuple[SamplingParams, int]], vocabulary: int, spread: float, ties: bool, number: int
) -> None:
    logits = (np.random.default_rng(number).standard_normal((len(rows), vocabulary)) * spread).astype(np.float32)
    if ties:
        logits = np.round(logits)
    found = drawn(torch.from_numpy(logits), [one for one, _ in rows], [position for _, position in rows])
    expected = [choose(row, *how)[0] for row, how in zip(logits, rows, strict=True)]
    assert found.tolist() == expected


def test_what_is_impossible_is_never_drawn() -> None:
    logits = torch.full((200, 40), float("-inf"))
    logits[:, [3, 17]] = 0.5
    tokens = drawn(logits, [SamplingParams(temperature=1.0, seed=seed) for seed in range(200)], range(200))
    assert set(tokens.tolist()) == {3, 17}


@pytest.mark.parametrize("top_k", [0, 3])
def test_many_draws_have_the_distribution(top_k: int) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).expand(4000, 5)
    parameters = [SamplingParams(temperature=0.7, top_k=top_k, seed=seed) for seed in range(4000)]
    found = np.bincount(drawn(logits, parameters, [9] * 4000).numpy(), minlength=5) / 4000
    shares = np.exp(logits[0].numpy().astype(np.float64) / 0.7)
    if top_k:
        shares[[0, 3]] = 0
    np.testing.assert_allclose(found, shares / shares.sum(), atol=0.03)
