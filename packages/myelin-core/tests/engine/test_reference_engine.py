"""What the reference engine has beyond the contract: every tensor type, and a plain forward pass as its own oracle."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from gguf.quants import dequantize
from numpy.typing import NDArray

from myelin.builtins import engine_reference
from myelin.engine.contract import EngineOptions
from myelin.engine.reference import REFERENCE_TYPES, ReferenceEngine, _floats
from myelin.errors import EngineError
from myelin.model.quant import GgmlType
from myelin_testkit.chain import load_stages
from myelin_testkit.synthetic import Recipe, write_model

OPTIONS = EngineOptions(max_context=64, kv_dtype="f32")


def exact_logits(path: Path, tokens: list[int]) -> NDArray[np.float64]:
    """A llama's logits after the last token, written once more and differently: whole matrices, float64, one file."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    weight = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float64).reshape(tensor.shape[::-1])
        for tensor in reader.tensors
    }

    def norm(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight[name]
        return scaled

    x = weight["token_embd.weight"][tokens]
    count = len(tokens)
    angles = np.outer(np.arange(count), 10000.0 ** (-np.arange(0, 64, 2) / 64))
    turn = np.exp(1j * angles)[:, None, :]
    for layer in range(2):
        block = f"blk.{layer}."
        normal = norm(x, block + "attn_norm.weight")

        def heads(letter: str, n: int, normal: NDArray[np.float64] = normal, block: str = block) -> NDArray[np.float64]:
            return (normal @ weight[f"{block}attn_{letter}.weight"].T).reshape(count, n, 64)

        def turned(h: NDArray[np.float64]) -> NDArray[np.float64]:
            product = (h[..., ::2] + 1j * h[..., 1::2]) * turn
            return np.stack([product.real, product.imag], -1).reshape(h.shape)

        q, k, v = turned(heads("q", 4)), turned(heads("k", 2)), heads("v", 2)
        scores = np.einsum("ihd,jhd->hij", q, np.repeat(k, 2, axis=1)) / math.sqrt(64)
        scores[:, ~np.tri(count, dtype=bool)] = -np.inf
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", share, np.repeat(v, 2, axis=1)).reshape(count, -1)
        x = x + mixed @ weight[block + "attn_output.weight"].T
        normal = norm(x, block + "ffn_norm.weight")
        gate = normal @ weight[block + "ffn_gate.weight"].T
        up = normal @ weight[block + "ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight[block + "ffn_down.weight"].T
    return norm(x, "output_norm.weight") @ weight["output.weight"].T


def test_a_forward_pass_written_twice(tmp_path: Path) -> None:
    write_model(Recipe(types={"*.ffn_*": GgmlType.Q5_K, "*": GgmlType.Q8_0}), tmp_path / "model.gguf")
    tokens = [5, 200, 17, 300, 42, 42, 7]
    with load_stages(ReferenceEngine, tmp_path / "model.gguf", options=OPTIONS) as chain:
        (logits,) = chain.logits(tokens)
    np.testing.assert_allclose(logits, exact_logits(tmp_path / "model.gguf", tokens), atol=2e-5)


@pytest.mark.parametrize("kind", sorted(REFERENCE_TYPES), ids=lambda kind: kind.name)
def test_every_tensor_type(kind: GgmlType, tmp_path: Path) -> None:
    write_model(Recipe(n_layers=1, types={"*": kind}), tmp_path / "model.gguf")
    with load_stages(ReferenceEngine, tmp_path / "model.gguf", options=OPTIONS) as chain:
        (logits,) = chain.logits([1, 2, 3])
    assert logits.shape == (3, 301)
    assert np.isfinite(logits).all()
    assert (logits.std(axis=1) > 0.01).all()


def test_support_names_what_it_computes() -> None:
    support = engine_reference.myelin_engine_support()
    assert support is not None
    assert (support.name, support.rank, support.unavailable) == ("reference", 0, "")
    assert support.types == REFERENCE_TYPES
    assert isinstance(engine_reference.myelin_engine("reference", OPTIONS), ReferenceEngine)
    assert engine_reference.myelin_engine("cpu", OPTIONS) is None


def test_a_type_that_holds_no_weights() -> None:
    with pytest.raises(EngineError, match="Q8_1"):
        _floats(np.zeros((1, 40), np.uint8), GgmlType.Q8_1)


def test_the_head_alone_dequantizes_no_embedding(tmp_path: Path) -> None:
    recipe = Recipe(n_layers=2, tied=True, vocab_size=1000)
    write_model(recipe, tmp_path / "model.gguf")
    with load_stages(ReferenceEngine, tmp_path / "model.gguf", [1], OPTIONS) as chain:
        head, tail = chain.reports
    assert tail.weight_bytes - head.weight_bytes == 4 * (1000 * 256 + 256)
