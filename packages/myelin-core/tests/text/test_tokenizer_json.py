"""A ``tokenizer.json`` in place of the header's own rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from myelin.errors import ModelError
from myelin.model.facts import ModelFacts, TensorInfo
from myelin.model.quant import GgmlType
from myelin.model.tokenizer import build_tokenizer

CONTROL, USER_DEFINED = 3, 4
MERGES = ["h i", "Ġ hi", "1 2"]
SPECIALS = [("<bos>", CONTROL), ("<|im_end|>", CONTROL), ("<u>", USER_DEFINED)]
BOS, END, USER = range(256 + len(MERGES), 259 + len(MERGES))
Facts = Callable[..., ModelFacts]


@pytest.fixture
def facts(byte_level: Facts) -> ModelFacts:
    return byte_level(MERGES, SPECIALS, tokenizer__ggml__bos_token_id=BOS, tokenizer__ggml__eos_token_id=END)


def byte_level_file(path: Path, facts: ModelFacts, *, length: int | None = None) -> Path:
    """A file that says the same as the header, with a post-processor that adds BOS, and perhaps truncation."""
    pieces: Any = facts.metadata["tokenizer.ggml.tokens"]
    vocabulary = {piece: token for token, piece in enumerate(pieces) if token < BOS}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<u>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    if length is not None:
        tokenizer.enable_truncation(length)
    tokenizer.save(str(path))
    return path


def test_the_same_rules_give_the_same_ids(tmp_path: Path, facts: ModelFacts) -> None:
    ours = build_tokenizer(facts)
    theirs = build_tokenizer(facts, byte_level_file(tmp_path / "tokenizer.json", facts))
    for text in ("hi hi 12", "<bos>hi<u><|im_end|>", "", "é 你"):
        for parse in (False, True):
            assert theirs.encode(text, parse_special=parse) == ours.encode(text, parse_special=parse)
        assert theirs.decode(theirs.encode(text)) == text
    assert theirs.encode("<bos>hi", parse_special=True) == [BOS, 256]
    assert BOS not in theirs.encode("<bos>hi")


def test_the_header_s_special_ids_are_kept(tmp_path: Path, facts: ModelFacts) -> None:
    tokenizer = build_tokenizer(facts, byte_level_file(tmp_path / "tokenizer.json", facts))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_ids) == (BOS, END, frozenset({END}))
    assert not tokenizer.add_bos  # the rule gpt-2 adds none, whatever the file would do


def test_nothing_is_cut_off_or_filled_up(tmp_path: Path, facts: ModelFacts) -> None:
    tokenizer = build_tokenizer(facts, byte_level_file(tmp_path / "tokenizer.json", facts, length=4))
    assert len(tokenizer.encode("h" * 50)) == 50


def test_a_header_with_an_unknown_split_rule_takes_the_file_s(tmp_path: Path, facts: ModelFacts) -> None:
    path = byte_level_file(tmp_path / "tokenizer.json", facts)
    metadata = {**facts.metadata, "tokenizer.ggml.pre": "no-such-rule"}
    tokenizer = build_tokenizer(ModelFacts("llama", metadata, {}), path)
    assert tokenizer.encode("hi", add_special=False) == [256]
    assert tokenizer.add_bos  # as the file does


def test_a_header_without_a_vocabulary_takes_the_file_s(tmp_path: Path, facts: ModelFacts) -> None:
    path = byte_level_file(tmp_path / "tokenizer.json", facts)
    tokenizer = build_tokenizer(ModelFacts("llama", {"tokenizer.ggml.model": "none"}, {}), path)
    assert tokenizer.vocab_size == len(facts.metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type] # a list
    assert tokenizer.encode("hi é<u><|im_end|>", parse_special=True)[-2:] == [USER, END]
    assert tokenizer.decode(tokenizer.encode("hi é<u>")) == "hi é<u>"
    assert tokenizer.end_ids == {END}


def test_a_scored_file(tmp_path: Path) -> None:
    pieces = {"<unk>": 0, "<s>": 1, "</s>": 2, "<0xC3>": 3, "<0xA9>": 4, "▁": 5, "a": 6, "▁a": 7}
    library = Tokenizer(models.BPE(pieces, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    metadata = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    tokenizer = build_tokenizer(ModelFacts("llama", metadata, {}), path)
    assert tokenizer.encode("a a") == [1, 7, 7]
    assert tokenizer.decode(tokenizer.encode("é")) == " é"
    assert tokenizer.encode("</s>", add_special=False, parse_special=True) == [2]


def test_a_file_with_more_tokens_than_the_model_is_refused(tmp_path: Path, facts: ModelFacts) -> None:
    path = byte_level_file(tmp_path / "tokenizer.json", facts)
    embedding = TensorInfo("token_embd.weight", GgmlType.F32, (100, 8), 0, 0, 3200)
    with pytest.raises(ModelError, match="100") as caught:
        build_tokenizer(ModelFacts("llama", facts.metadata, {"token_embd.weight": embedding}), path)
    assert caught.value.reason == "tokenizer-mismatch"


def test_another_model_s_file_is_refused(tmp_path: Path, facts: ModelFacts) -> None:
    path = byte_level_file(tmp_path / "tokenizer.json", facts)
    document = json.loads(path.read_text())
    pieces = list(document["model"]["vocab"])
    document["model"]["vocab"] = dict(zip(pieces, np.roll(np.arange(len(pieces)), 7).tolist(), strict=True))
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match="differently"):
        build_tokenizer(facts, path)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": 7}'])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, facts: ModelFacts, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelError, match="no tokenizer"):
        build_tokenizer(facts, path)


def test_a_missing_file(tmp_path: Path, facts: ModelFacts) -> None:
    with pytest.raises(ModelError, match="no file"):
        build_tokenizer(facts, tmp_path / "tokenizer.json")
