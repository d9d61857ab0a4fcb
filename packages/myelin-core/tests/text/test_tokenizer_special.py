"""Special tokens: which there are, where they are recognised, and what they never do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import ModelError
from myelin.model.facts import ModelFacts
from myelin.model.tokenizer import Tokenizer, build_tokenizer
from myelin.model.tokenizers.special import SpecialTokens
from myelin.model.tokenizers.vocabulary import SpecialToken

CONTROL, USER_DEFINED = 3, 4
Facts = Callable[..., ModelFacts]


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(token) for token in ids]


def test_control_tokens_are_parsed_only_on_request_and_user_defined_ones_always(byte_level: Facts) -> None:
    tokenizer = build_tokenizer(byte_level(specials=[("<c>", CONTROL), ("<u>", USER_DEFINED)]))
    assert texts(tokenizer, tokenizer.encode("<c><u>")) == ["<", "c", ">", "<u>"]
    assert texts(tokenizer, tokenizer.encode("<c><u>", parse_special=True)) == ["<c>", "<u>"]


def test_the_longest_special_token_wins(byte_level: Facts) -> None:
    specials = [("<a>", CONTROL), ("<a><b>", CONTROL), ("<b>x", USER_DEFINED)]
    tokenizer = build_tokenizer(byte_level(specials=specials))
    assert texts(tokenizer, tokenizer.encode("<a><a><b>x", parse_special=True)) == ["<a>", "<a><b>", "x"]


def test_a_model_without_a_bos_key_gets_no_bos(byte_level: Facts) -> None:
    # 11 is what llama.cpp takes for a byte-level vocabulary that doesn't name its BOS.
    tokenizer = build_tokenizer(byte_level(pre="llama-bpe", tokenizer__ggml__add_bos_token=True))
    assert tokenizer.bos_id is None
    assert not tokenizer.add_bos
    assert 11 not in tokenizer.encode("ab")


@pytest.mark.parametrize(
    ("pre", "key", "begins"),
    [
        ("llama-bpe", None, True),
        ("tekken", None, True),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("tekken", False, False),
    ],
)
def test_bos_by_the_rule_or_by_the_key(byte_level: Facts, pre: str, key: bool | None, begins: bool) -> None:
    keys: dict[str, object] = {} if key is None else {"tokenizer__ggml__add_bos_token": key}
    facts = byte_level(specials=[("<bos>", CONTROL)], pre=pre, tokenizer__ggml__bos_token_id=256, **keys)
    tokenizer = build_tokenizer(facts)
    assert (tokenizer.encode("a")[0] == 256) is begins
    assert 256 not in tokenizer.encode("a", add_special=False)


def test_eos_is_added_where_the_model_wants_it(byte_level: Facts) -> None:
    keys = {"tokenizer__ggml__eos_token_id": 256, "tokenizer__ggml__add_eos_token": True}
    tokenizer = build_tokenizer(byte_level(specials=[("<eos>", CONTROL)], **keys))
    assert tokenizer.encode("a")[-1] == 256
    assert 256 not in tokenizer.encode("a", add_special=False)


def test_sentencepiece_defaults_to_its_usual_special_tokens(scored: Facts) -> None:
    tokenizer = build_tokenizer(scored({"▁a": -1.0}))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, True)
    assert tokenizer.encode("") == [1]


def test_sentencepiece_defaults_need_control_tokens_there(scored: Facts) -> None:
    facts = scored({"▁a": -1.0}, tokenizer__ggml__token_type=np.full(260, 1, dtype=np.int32))
    assert build_tokenizer(facts).bos_id is None


def test_every_known_end_is_found(byte_level: Facts) -> None:
    specials = [(text, CONTROL) for text in ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<other>", "<ends>", "<eom>")]
    keys = {"tokenizer__ggml__eos_token_id": 260, "tokenizer__ggml__eom_token_id": 261}
    tokenizer = build_tokenizer(byte_level(specials=specials, **keys))
    assert tokenizer.end_ids == {256, 257, 258, 260, 261}


def test_an_end_that_the_file_calls_ordinary_is_a_control_token_all_the_same(byte_level: Facts) -> None:
    tokenizer = build_tokenizer(byte_level(specials=[("<|im_end|>", 1)]))
    assert 256 in tokenizer.end_ids
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [256]
    assert tokenizer.token_bytes(256) == b""


def test_html_that_looks_like_an_end_is_text(scored: Facts) -> None:
    facts = scored({"a": -1.0}, [("<s>x", USER_DEFINED)], tokenizer__ggml__add_space_prefix=False)
    metadata = dict(facts.metadata)
    types = np.array(metadata["tokenizer.ggml.token_type"])
    types[2] = USER_DEFINED
    metadata |= {"tokenizer.ggml.token_type": types, "tokenizer.ggml.eos_token_id": 1}
    tokenizer = build_tokenizer(ModelFacts("llama", metadata, {}))
    assert tokenizer.end_ids == {1}
    assert tokenizer.token_bytes(2) == b"</s>"


def test_a_message_s_end_among_calls_and_returns_ends_nothing(byte_level: Facts) -> None:
    specials = [(text, CONTROL) for text in ("<|end|>", "<|return|>", "<|call|>", "<|channel|>")]
    tokenizer = build_tokenizer(byte_level(specials=specials))
    assert tokenizer.end_ids == {257, 258}
    assert tokenizer.token_bytes(259) == b"<|channel|>"


def test_phi_3_swallows_white_space_after_special_tokens(byte_level: Facts) -> None:
    specials = [("<|user|>", CONTROL), ("<|endoftext|>", CONTROL)]
    tokenizer = build_tokenizer(byte_level(specials=specials, general__name="Phi-3 mini"))
    ids = tokenizer.encode("<|user|> \n a<|endoftext|> b", parse_special=True)
    assert texts(tokenizer, ids) == ["<|user|>", "a", "<|endoftext|>", " ", "b"]


def test_special_tokens_have_no_text_unless_asked(byte_level: Facts) -> None:
    tokenizer = build_tokenizer(byte_level(specials=[("<c>", CONTROL), ("<ü>", USER_DEFINED)]))
    ids = tokenizer.encode("a<c><ü>", parse_special=True)
    assert tokenizer.decode(ids) == "a<ü>"
    assert tokenizer.decode(ids, skip_special=False) == "a<c><ü>"
    assert tokenizer.token_bytes(256) == b""


@pytest.mark.parametrize("token", [-1, 10**9])
def test_an_id_outside_the_vocabulary_has_no_text(byte_level: Facts, token: int) -> None:
    tokenizer = build_tokenizer(byte_level())
    assert tokenizer.token_bytes(token) == b""
    assert tokenizer.decode([token], skip_special=False) == ""


def test_an_id_beyond_the_vocabulary_is_no_special_token(byte_level: Facts) -> None:
    assert build_tokenizer(byte_level(tokenizer__ggml__bos_token_id=9999)).bos_id is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bos_token_id", "one"),
        ("eos_token_id", True),
        ("add_bos_token", 1),
        ("token_type", np.zeros(3, dtype=np.int32)),
        ("token_type", np.zeros(256, dtype=np.float32)),
        ("tokens", 7),
        ("merges", [1, 2]),
    ],
)
def test_a_key_of_the_wrong_kind_is_named(byte_level: Facts, key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        build_tokenizer(byte_level(**{f"tokenizer__ggml__{key}": value}))


def test_barriers_keep_control_tokens_from_being_recognised(byte_level: Facts) -> None:
    tokenizer = build_tokenizer(byte_level(specials=[("<c>", CONTROL), ("<u>", USER_DEFINED)]))
    ids = tokenizer.encode("<c><c><u>", parse_special=True, barriers=[1, 7])
    assert texts(tokenizer, ids) == ["<", "c", ">", "<c>", "<u>"]


def test_no_control_token_comes_about_by_merging_behind_a_barrier(scored: Facts) -> None:
    # «<» + «s>» has the best score of all: llama.cpp makes BOS of it even where special tokens aren't parsed.
    facts = scored({"s>": -1.0, "<": -2.0, "s": -3.0, ">": -4.0}, tokenizer__ggml__add_space_prefix=False)
    tokenizer = build_tokenizer(facts)
    assert tokenizer.encode("<s>", add_special=False) == [1]
    ids = tokenizer.encode("<s>", add_special=False, parse_special=True, barriers=[1])
    assert texts(tokenizer, ids) == ["<", "s", ">"]


SPECIALS = [
    SpecialToken(0, "<ab>", True),
    SpecialToken(1, "ab", False),
    SpecialToken(2, "<a", True),
    SpecialToken(3, "  ", False),
]


def simply(text: str, parse_hidden: bool) -> list[int | str]:
    """The slow and obvious twin: one token after the other, everywhere."""
    parts: list[int | str] = [text] if text else []
    for token in SPECIALS:
        if token.hidden and not parse_hidden:
            continue
        cut: list[int | str] = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            pieces = part.split(token.text)
            for index, piece in enumerate(pieces):
                cut += [token.id] * (index > 0) + [piece] * bool(piece)
        parts = cut
    return parts


@given(st.text("<ab> ", max_size=20), st.booleans())
def test_the_split_is_that_of_one_token_after_the_other(text: str, parse_hidden: bool) -> None:
    fragments = SpecialTokens(SPECIALS).split(text, parse_hidden=parse_hidden)
    found = [part if isinstance(part, int) else text[part[0] : part[1]] for part in fragments]
    assert found == simply(text, parse_hidden)


@given(st.text("<ab> ", max_size=20), st.sets(st.integers(1, 19)))
def test_no_hidden_token_spans_a_barrier_and_no_text_is_lost(text: str, barriers: set[int]) -> None:
    written = {token.id: token for token in SPECIALS}
    position = 0
    for part in SpecialTokens(SPECIALS).split(text, parse_hidden=True, barriers=sorted(barriers)):
        start = position
        if isinstance(part, int):
            position += len(written[part].text)
            assert text[start:position] == written[part].text
            assert not (written[part].hidden and any(start < barrier < position for barrier in barriers))
        else:
            assert part[0] == position
            position = part[1]
    assert position == len(text)
