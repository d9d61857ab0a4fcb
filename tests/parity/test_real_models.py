"""Real models: our engines against llama.cpp, and against themselves wherever the model is cut.

llama.cpp rounds activations to int8 before each matrix product, as the ``cpu`` engine does and the exact ``reference``
doesn't: what remains between ``reference`` and llama.cpp is llama.cpp's own noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from myelin.model.architecture import legal_cuts
from myelin.model.tokenizer import build_tokenizer
from myelin_testkit.chain import Chain, EngineFactory, load_stages, log_softmax
from myelin_testkit.prompts import PROMPTS

pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]

LICENSE = Path(__file__).parents[2] / "LICENSE"
PERPLEXITY_TOKENS = 2000


def passage() -> str:
    """A fixed text: prose of our own, then the licence."""
    return PROMPTS["long"] + "\n\n" + LICENSE.read_text()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_token_ids_are_equal(real_model, reference: Chain, prompt: str) -> None:
    tokenizer = build_tokenizer(reference.facts)
    for parse_special in (False, True):
        expected = real_model.oracle.tokenize(PROMPTS[prompt], parse_special=parse_special)
        assert tokenizer.encode(PROMPTS[prompt], parse_special=parse_special) == expected


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_continuations_are_equal(real_model, cpu: Chain, prompt: str) -> None:
    """Equal for 32 tokens, or they part where llama.cpp itself finds the two candidates within 0.25 of each other."""
    continued = real_model.continued(prompt)
    ours = [sample.token for sample in cpu.generate(continued.prompt, len(continued.path))]
    for token, candidates in zip(ours, continued.path, strict=True):
        if token != candidates[0].token:
            known = {candidate.token: candidate.logprob for candidate in candidates}
            assert token in known, "llama.cpp doesn't have our token among its best"
            assert candidates[0].logprob - known[token] <= 0.25
            return  # what follows continues another text


def top_difference(real_model, chain: Chain) -> float:
    """Mean absolute difference of llama.cpp's five best log-probabilities along its continuations of all prompts."""
    differences = []
    for prompt in PROMPTS:
        continued = real_model.continued(prompt)
        tokens = [*continued.prompt, *continued.tokens[:-1]]
        logits = np.concatenate(list(chain.logits(tokens)))[len(continued.prompt) - 1 :]
        for row, candidates in zip(logits, continued.path, strict=True):
            ours = log_softmax(row)
            differences += [abs(ours[candidate.token] - candidate.logprob) for candidate in candidates[:5]]
    return float(np.mean(differences))


def test_log_probabilities_of_cpu(real_model, cpu: Chain) -> None:
    assert top_difference(real_model, cpu) <= 0.05


def test_log_probabilities_of_reference(real_model, reference: Chain) -> None:
    assert top_difference(real_model, reference) <= 0.12


def test_perplexity(real_model, cpu: Chain, reference: Chain, record_property: Callable[[str, object], None]) -> None:
    tokens = real_model.oracle.tokenize(passage())[:PERPLEXITY_TOKENS]
    assert len(tokens) == PERPLEXITY_TOKENS
    found = {
        "llama.cpp": real_model.oracle.perplexity(tokens),
        "cpu": math.exp(-cpu.logprobs(tokens).mean()),
        "reference": math.exp(-reference.logprobs(tokens).mean()),
    }
    for name, value in found.items():
        record_property(f"perplexity of {name}", value)
    assert abs(found["cpu"] / found["reference"] - 1) <= 0.005
    assert found["cpu"] / found["llama.cpp"] - 1 <= 0.005


# Several cuts in one test, since loading takes most of the time.


def tokens_of(factory: EngineFactory, path: Path, cuts: tuple[int, ...], prompt: list[int]) -> list[int]:
    with load_stages(factory, path, cuts) as chain:
        return [sample.token for sample in chain.generate(prompt, 8, chunk=7)]


def test_cpu_gives_the_same_tokens_for_every_cut(
    real_model, cpu: Chain, factory: Callable[[str], EngineFactory]
) -> None:
    prompt = real_model.continued("story").prompt
    expected = [sample.token for sample in cpu.generate(prompt, 8)]
    legal = legal_cuts(cpu.parameters)
    third = len(legal) // 3
    pairs = [(legal[third], legal[2 * third]), (legal[0], legal[-1]), (legal[0], legal[1])]
    for cuts in (*((cut,) for cut in legal), *pairs):
        assert tokens_of(factory("cpu"), real_model.path, cuts, prompt) == expected, f"cut before {cuts}"


def test_reference_gives_the_same_tokens_for_some_cuts(
    real_model, reference: Chain, factory: Callable[[str], EngineFactory]
) -> None:
    prompt = real_model.continued("story").prompt
    expected = [sample.token for sample in reference.generate(prompt, 8)]
    legal = legal_cuts(reference.parameters)
    third = len(legal) // 3
    for cuts in ((legal[0],), (legal[-1],), (legal[third], legal[2 * third])):
        assert tokens_of(factory("reference"), real_model.path, cuts, prompt) == expected, f"cut before {cuts}"
