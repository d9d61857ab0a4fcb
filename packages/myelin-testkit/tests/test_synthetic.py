"""Synthetic models are what their recipe says, and readable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from myelin.engine.contract import EngineOptions
from myelin.engine.reference import ReferenceEngine
from myelin.errors import EngineError
from myelin.model.quant import GgmlType
from myelin_testkit.chain import load_stages, log_softmax, logprob
from myelin_testkit.synthetic import LLAMA_1B, Recipe, write_model
from myelin_testkit.vocabulary import BYTE, CONTROL, byte_level, sentence_piece

OPTIONS = EngineOptions(max_context=64)


def test_types_follow_the_first_pattern(tmp_path: Path) -> None:
    kinds = {"token_embd.weight": GgmlType.Q8_0, "blk.1.*": GgmlType.Q6_K, "*.ffn_*": GgmlType.Q2_K}
    path = write_model(Recipe(types=kinds), tmp_path / "model.gguf")[0]
    with load_stages(ReferenceEngine, path, options=OPTIONS) as chain:
        found = {name: tensor.ggml_type for name, tensor in chain.facts.tensors.items()}
    assert found["token_embd.weight"] is GgmlType.Q8_0
    assert found["blk.1.ffn_up.weight"] is GgmlType.Q6_K
    assert found["blk.0.ffn_up.weight"] is GgmlType.Q2_K
    assert found["blk.0.attn_q.weight"] is GgmlType.F16
    assert found["blk.1.attn_norm.weight"] is GgmlType.F32


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_the_recipes(architecture: str, tied: bool, tmp_path: Path) -> None:
    recipe = Recipe(
        architecture, n_layers=3, vocab_size=311, tied=tied, sliding_window=5 if architecture == "gemma3" else 0
    )
    path = write_model(recipe, tmp_path / "model.gguf")[0]
    with load_stages(ReferenceEngine, path, options=OPTIONS) as chain:
        parameters = chain.parameters
        assert parameters.architecture == architecture
        assert (parameters.n_layers, parameters.width, parameters.ffn_width) == (3, 256, 512)
        assert (parameters.n_heads, parameters.n_kv_heads, parameters.head_dim) == (4, 2, 64)
        assert (parameters.vocab_size, parameters.tied_output) == (311, tied)
        assert parameters.qkv_bias is (architecture == "qwen2")
        (logits,) = chain.logits([1, 2, 3])
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 10


def test_parts_are_one_model(tmp_path: Path) -> None:
    recipe = Recipe(types={"*": GgmlType.Q4_K})
    whole = write_model(recipe, tmp_path / "whole.gguf")
    parts = write_model(recipe, tmp_path / "split.gguf", parts=4)
    assert [part.name for part in parts] == [f"split-{number:05d}-of-00004.gguf" for number in (1, 2, 3, 4)]
    tokens = [3, 250, 17]
    with (
        load_stages(ReferenceEngine, whole, options=OPTIONS) as one,
        load_stages(ReferenceEngine, parts, options=OPTIONS) as many,
    ):
        assert len(many.facts.parts) == 4
        np.testing.assert_array_equal(next(iter(one.logits(tokens))), next(iter(many.logits(tokens))))


def test_a_recipe_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second, other = (
        write_model(Recipe(seed=seed, types={"*": GgmlType.IQ4_XS}), tmp_path / f"{name}.gguf")[0].read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == second
    assert first != other


def test_columns_that_do_not_suit_a_type(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Q6_K"):
        write_model(Recipe(width=128, types={"*": GgmlType.Q6_K}), tmp_path / "model.gguf")


def test_the_large_shape() -> None:
    assert LLAMA_1B.n_heads * LLAMA_1B.head_dim == LLAMA_1B.width
    assert LLAMA_1B.quick


@pytest.mark.parametrize("size", [260, 301, 999])
def test_vocabularies_are_complete(size: int) -> None:
    for vocabulary in (byte_level(size), sentence_piece(size)):
        assert len(vocabulary.tokens) == len(vocabulary.types) == size
        assert len(set(vocabulary.tokens)) == size
        assert vocabulary.types[vocabulary.eos] == CONTROL
    assert sentence_piece(size).types.count(BYTE) == 256
    known = set(byte_level(size).tokens)
    assert all("".join(merge.split(" ")) in known for merge in byte_level(size).merges)


def test_a_vocabulary_that_is_too_small() -> None:
    with pytest.raises(ValueError, match="no room"):
        byte_level(258)


def test_log_softmax_of_huge_logits() -> None:
    np.testing.assert_allclose(
        log_softmax(np.array([1e30, 0, 1e30], np.float32)), [-np.log(2), -1e30, -np.log(2)], rtol=1e-6
    )


def test_logprob_is_one_of_log_softmax() -> None:
    logits = np.random.default_rng(0).normal(0, 5, 1000).astype(np.float32)
    for token in (0, 7, int(logits.argmax())):
        assert logprob(logits, token) == pytest.approx(log_softmax(logits)[token], abs=1e-5)


def test_a_chain_that_cannot_load_leaves_nothing_open(tmp_path: Path) -> None:
    path = write_model(Recipe(), tmp_path / "model.gguf")[0]
    closed: list[int] = []

    class Watched(ReferenceEngine):
        def close(self) -> None:
            closed.append(id(self))
            super().close()

    with pytest.raises(EngineError):
        load_stages(Watched, path, [1], EngineOptions(memory_bytes=1))
    assert len(closed) == 1
