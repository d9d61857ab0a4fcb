"""Byte-level vocabularies: merges by rank, whatever the vocabulary lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import ModelError
from myelin.model.facts import ModelFacts
from myelin.model.strings import StringArray
from myelin.model.tokenizer import Tokenizer, build_tokenizer
from myelin.model.tokenizers.byte_pair import byte_letters
from myelin.model.tokenizers.split_rules import SPLIT_RULES

Facts = Callable[..., ModelFacts]


def pieces(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(token) for token in tokenizer.encode(text, add_special=False)]


def test_the_best_ranked_pair_merges_first(byte_level: Facts) -> None:
    assert pieces(build_tokenizer(byte_level(["b c", "a b"])), "abc") == [b"a", b"bc"]
    assert pieces(build_tokenizer(byte_level(["a b", "b c"])), "abc") == [b"ab", b"c"]


def test_of_a_merge_that_is_there_twice_the_first_counts(byte_level: Facts) -> None:
    assert pieces(build_tokenizer(byte_level(["a b", "b c", "a b"])), "abc") == [b"ab", b"c"]


def test_a_letter_that_the_vocabulary_lacks_is_left_out_but_still_parts_its_neighbours(byte_level: Facts) -> None:
    letters = [letter for letter in byte_letters() if letter != "x"]
    tokenizer = build_tokenizer(byte_level(["a b"], letters=letters))
    assert pieces(tokenizer, "axb") == [b"a", b"b"]


def test_a_merge_whose_product_is_no_token_is_spelt_out(byte_level: Facts) -> None:
    facts = byte_level(["b c"])
    metadata = {**facts.metadata, "tokenizer.ggml.merges": ["a b", "b c"]}  # «ab» is no token
    tokenizer = build_tokenizer(ModelFacts("llama", metadata, {}))
    assert pieces(tokenizer, "abc") == [b"a", b"b", b"c"]


@pytest.mark.parametrize("odd", ["ab", "", " ", "a", "a "])
def test_a_malformed_merge_merges_nothing(byte_level: Facts, odd: str) -> None:
    facts = byte_level(["b c"])
    metadata = {**facts.metadata, "tokenizer.ggml.merges": [odd, "b c"]}
    assert pieces(build_tokenizer(ModelFacts("llama", metadata, {})), "abc") == [b"a", b"bc"]


def test_a_vocabulary_without_merges_says_so(byte_level: Facts) -> None:
    metadata = dict(byte_level().metadata)
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(ModelError, match="no merges") as caught:
        build_tokenizer(ModelFacts("llama", metadata, {}))
    assert caught.value.reason == "tokenizer-missing"
    assert caught.value.hint


def test_an_unknown_split_rule_is_named(byte_level: Facts) -> None:
    with pytest.raises(ModelError, match="no-such-rule") as caught:
        build_tokenizer(byte_level(pre="no-such-rule"))
    assert caught.value.reason == "tokenizer-unknown"


@pytest.mark.parametrize("model", [None, "none", "bert", "rwkv"])
def test_another_kind_of_vocabulary_is_refused(byte_level: Facts, model: str | None) -> None:
    metadata = {**byte_level().metadata, "tokenizer.ggml.model": model}
    with pytest.raises(ModelError) as caught:
        build_tokenizer(ModelFacts("llama", metadata, {}))
    assert caught.value.reason in ("tokenizer-missing", "tokenizer-unknown")


def test_no_tokens_at_all(byte_level: Facts) -> None:
    metadata = dict(byte_level().metadata)
    del metadata["tokenizer.ggml.tokens"]
    with pytest.raises(ModelError, match="no vocabulary"):
        build_tokenizer(ModelFacts("llama", metadata, {}))


def test_a_missing_rule_is_the_default_rule(byte_level: Facts) -> None:
    text = "word 1234, don't!"
    merges = ["1 2", "3 4", "12 34"]
    missing, default = (build_tokenizer(byte_level(merges, pre=pre)) for pre in (None, "default"))
    assert pieces(missing, text) == pieces(default, text)
    assert b"1234" not in pieces(default, text)  # three digits at a time


def test_tokens_outside_the_byte_letters_decode_as_they_are(byte_level: Facts) -> None:
    tokenizer = build_tokenizer(byte_level(specials=[("你好 x", 1)]))
    assert tokenizer.token_bytes(256).decode() == "你好 x"


def test_a_string_array_and_a_list_give_the_same(byte_level: Facts) -> None:
    facts = byte_level(["a b", "Ġ ab"])
    arrays = {
        key: StringArray.of(value)  # type: ignore[arg-type] # these two are lists of texts
        for key, value in facts.metadata.items()
        if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    }
    lazy = build_tokenizer(ModelFacts("llama", {**facts.metadata, **arrays}, {}))
    assert lazy.encode("ab ab é") == build_tokenizer(facts).encode("ab ab é")


def test_a_lone_surrogate_becomes_a_replacement_character(byte_level: Facts) -> None:
    tokenizer = build_tokenizer(byte_level())
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "😀"


@pytest.mark.parametrize("pre", sorted(SPLIT_RULES))
def test_every_split_rule_keeps_every_character(byte_level: Facts, pre: str) -> None:
    tokenizer = build_tokenizer(byte_level(["Ġ a", "1 2"], pre=pre))
    text = "Hello, wörld's  TEXT\n\n\t12345 ½ 你好。かな 한국어 ไทย ~x~ <|a|> 👩‍👩‍👧 \u00a0\u3000\r\n  end "
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


MERGES = ["a b", "b a", "ab a", "Ġ a", "Ġa b", "ab ab", "b b", "Ġ Ġ"]


def merged(word: str, merges: Sequence[str]) -> list[str]:
    """The slow and obvious twin: merge the leftmost of the best pairs until there is none."""
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    parts = list(word)
    while True:
        pairs = [(ranks.get((left, right), len(ranks)), at) for at, (left, right) in enumerate(pairwise(parts))]
        rank, at = min(pairs, default=(len(ranks), 0))
        if rank == len(ranks):
            return parts
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


@given(word=st.text("ab", min_size=1, max_size=24))
def test_merging_is_that_of_one_pair_after_the_other(word: str) -> None:
    assert pieces(_TOKENIZER(), word) == [part.encode() for part in merged(word, MERGES)]


@given(text=st.text(max_size=40))
def test_every_text_comes_back(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert _TOKENIZER().decode(_TOKENIZER().encode(text)) == text


class _Made:
    """One tokenizer for all examples."""

    tokenizer: Tokenizer | None = None

    def __call__(self) -> Tokenizer:
        assert self.tokenizer is not None
        return self.tokenizer


_TOKENIZER = _Made()


@pytest.fixture(autouse=True)
def _one_tokenizer(byte_level: Facts) -> None:
    if _TOKENIZER.tokenizer is None:
        _TOKENIZER.tokenizer = build_tokenizer(byte_level(MERGES))
