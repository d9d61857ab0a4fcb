"""Scored vocabularies: the best piece first, bytes where no piece fits, and never more than n log n."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import ModelError
from myelin.model.facts import ModelFacts
from myelin.model.tokenizer import Tokenizer, build_tokenizer

Facts = Callable[..., ModelFacts]
SCORES = {
    "▁": -9.0,
    "a": -8.0,
    "b": -7.0,
    "c": -6.5,
    "ab": -1.0,
    "ba": -1.0,
    "aba": -0.5,
    "▁a": -2.0,
    "▁ab": -1.5,
    "bab": -3.0,
    "▁▁": -4.0,
    "cc": -2.5,
    "ccc": -0.1,
}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token) for token in tokenizer.encode(text, add_special=False)]


def merged(text: str) -> list[str]:
    """The slow and obvious twin: merge the leftmost of the best-scored pairs until there is none."""
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-SCORES[left + right], at) for at, (left, right) in enumerate(pairwise(parts)) if left + right in SCORES
        ]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


class _Made:
    tokenizer: Tokenizer | None = None

    def __call__(self) -> Tokenizer:
        assert self.tokenizer is not None
        return self.tokenizer


_TOKENIZER = _Made()


@pytest.fixture(autouse=True)
def _one_tokenizer(scored: Facts) -> None:
    if _TOKENIZER.tokenizer is None:
        _TOKENIZER.tokenizer = build_tokenizer(scored(SCORES, tokenizer__ggml__add_space_prefix=False))


@given(st.text("abc ", max_size=30))
def test_merging_is_that_of_one_pair_after_the_other(text: str) -> None:
    assert pieces(_TOKENIZER(), text) == [part.replace("▁", " ") for part in merged(text)]


@given(st.text(max_size=40))
def test_every_text_comes_back(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode().replace("▁", "")
    assert _TOKENIZER().decode(_TOKENIZER().encode(text)) == text


def test_characters_without_a_piece_become_bytes() -> None:
    ids = _TOKENIZER().encode("é", add_special=False)
    assert [_TOKENIZER().token_bytes(token) for token in ids] == [b"\xc3", b"\xa9"]


def test_a_space_goes_before_the_text_and_after_special_tokens(scored: Facts) -> None:
    tokenizer = build_tokenizer(scored(SCORES))
    ids = tokenizer.encode("a</s>a", parse_special=True)
    assert [tokenizer.token_text(token) for token in ids] == ["<s>", " a", "</s>", " a"]


def test_bytes_that_the_vocabulary_lacks_become_the_unknown_token(scored: Facts) -> None:
    tokenizer = build_tokenizer(scored(SCORES, with_bytes=False, tokenizer__ggml__add_space_prefix=False))
    assert tokenizer.encode("aé", add_special=False)[1:] == [0, 0]
    assert tokenizer.token_bytes(0) == b""


def test_a_vocabulary_without_scores_still_encodes(scored: Facts) -> None:
    metadata = dict(scored(SCORES, tokenizer__ggml__add_space_prefix=False).metadata)
    del metadata["tokenizer.ggml.scores"]
    tokenizer = build_tokenizer(ModelFacts("llama", metadata, {}))
    assert tokenizer.decode(tokenizer.encode("ab ba")) == "ab ba"


@pytest.mark.parametrize("scores", ["x", np.zeros(3, dtype=np.float32), [1, 2]])
def test_bad_scores_are_named(scored: Facts, scores: object) -> None:
    with pytest.raises(ModelError, match="scores"):
        build_tokenizer(scored(SCORES, tokenizer__ggml__scores=scores))


@pytest.mark.parametrize("text", ["a" * 100_000, "ab" * 50_000, "c" * 100_000, " " * 100_000, "é" * 50_000])
def test_a_long_prompt_takes_seconds_at_most(text: str) -> None:
    start = time.thread_time()
    ids = _TOKENIZER().encode(text, add_special=False)
    assert time.thread_time() - start < 10
    assert _TOKENIZER().decode(ids) == text
