"""Small models that exist only as facts, for the planner's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from myelin.model.architecture import Activation, Hyperparameters, RopeStyle
from myelin.model.facts import ModelFacts, PartInfo, TensorInfo
from myelin.model.quant import GgmlType, row_bytes

MakeModel = Callable[..., tuple[ModelFacts, Hyperparameters]]


def make_model(
    layer_rows: Sequence[int] = (4, 4, 4, 4),
    *,
    tied: bool = True,
    vocab: int = 64,
    window: Sequence[int] = (),
    rope_freqs: bool = False,
) -> tuple[ModelFacts, Hyperparameters]:
    """A llama of width 32 whose layer ``i`` has one matrix of ``layer_rows[i]`` rows (float32: 128 bytes a row) and one
    norm."""
    width, offset = 32, 0
    tensors: dict[str, TensorInfo] = {}

    def add(name: str, *shape: int) -> None:
        nonlocal offset
        rows = shape[0] if len(shape) == 2 else 1
        nbytes = rows * row_bytes(GgmlType.F32, shape[-1])
        tensors[name] = TensorInfo(name, GgmlType.F32, shape, part=0, offset=offset, nbytes=nbytes)
        offset += nbytes

    add("token_embd.weight", vocab, width)
    if rope_freqs:
        add("rope_freqs.weight", 4)
    for layer, rows in enumerate(layer_rows):
        add(f"blk.{layer}.attn_norm.weight", width)
        add(f"blk.{layer}.ffn_down.weight", rows, width)
    add("output_norm.weight", width)
    if not tied:
        add("output.weight", vocab, width)
    parameters = Hyperparameters(
        architecture="llama",
        n_layers=len(layer_rows),
        width=width,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        value_dim=8,
        ffn_width=64,
        vocab_size=vocab,
        context_length=2048,
        norm_epsilon=1e-5,
        rope_style=RopeStyle.INTERLEAVED,
        rope_dims=8,
        rope_base=10000.0,
        rope_base_local=10000.0,
        rope_scale=1.0,
        rope_scale_local=1.0,
        attention_scale=8**-0.5,
        embedding_scale=1.0,
        activation=Activation.SILU,
        qkv_bias=False,
        qk_norm=False,
        post_norms=False,
        sliding_window=tuple(window) or (0,) * len(layer_rows),
        tied_output=tied,
    )
    return ModelFacts("llama", {}, tensors, (PartInfo("toy.gguf", offset, 0),)), parameters


@pytest.fixture(name="make_model", scope="session")
def _make_model() -> MakeModel:
    return make_model
