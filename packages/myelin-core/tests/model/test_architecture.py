"""What the table reads out of headers: defaults, scales, windows, cuts, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import ModelError
from myelin.model.architecture import (
    ARCHITECTURES,
    Activation,
    LayerRole,
    ModelRole,
    RopeStyle,
    describe,
    layer_roles,
    layer_tensor,
    legal_cuts,
    output_tensor,
    stage_tensors,
)
from myelin.model.facts import ModelFacts, TensorInfo
from myelin.model.quant import GgmlType, row_bytes
from myelin.model.strings import StringArray

WIDTH, HEADS, KV_HEADS, HEAD, FFN, VOCAB = 256, 4, 2, 64, 512, 300
QK_NORMS = ("qwen3", "gemma3")


def make(
    architecture: str = "llama",
    layers: int = 4,
    *,
    head: int = HEAD,
    heads: int = HEADS,
    width: int = WIDTH,
    tied: bool = False,
    biases: bool | None = None,
    keys: Mapping[str, object] | None = None,
    drop: tuple[str, ...] = (),
    more: Mapping[str, tuple[int, ...]] | None = None,
    types: Mapping[str, GgmlType] | None = None,
) -> ModelFacts:
    """Facts of a small model of any family; ``keys`` get its prefix, and a None among them drops a key."""
    metadata: dict[str, object] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": layers,
        f"{architecture}.embedding_length": width,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.feed_forward_length": FFN,
        f"{architecture}.context_length": 2048,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
    }
    if head != width // heads:
        metadata[f"{architecture}.attention.key_length"] = head
        metadata[f"{architecture}.attention.value_length"] = head
    for key, item in (keys or {}).items():
        name = key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}"
        metadata[name] = item
        if item is None:
            del metadata[name]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, width), "output_norm.weight": (width,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, width)
    for layer in range(layers):
        block = f"blk.{layer}."
        shapes |= {
            block + "attn_norm.weight": (width,),
            block + "attn_q.weight": (heads * head, width),
            block + "attn_k.weight": (KV_HEADS * head, width),
            block + "attn_v.weight": (KV_HEADS * head, width),
            block + "attn_output.weight": (width, heads * head),
            block + "ffn_norm.weight": (width,),
            block + "ffn_gate.weight": (FFN, width),
            block + "ffn_up.weight": (FFN, width),
            block + "ffn_down.weight": (width, FFN),
        }
        if architecture == "qwen2" if biases is None else biases:
            shapes |= {
                block + "attn_q.bias": (heads * head,),
                block + "attn_k.bias": (KV_HEADS * head,),
                block + "attn_v.bias": (KV_HEADS * head,),
            }
        if architecture in QK_NORMS:
            shapes |= {block + "attn_q_norm.weight": (head,), block + "attn_k_norm.weight": (head,)}
        if architecture == "gemma3":
            shapes |= {block + "post_attention_norm.weight": (width,), block + "post_ffw_norm.weight": (width,)}
    shapes |= more or {}
    tensors: dict[str, TensorInfo] = {}
    offset = 4096
    for name, shape in shapes.items():
        if name in drop:
            continue
        kind = (types or {}).get(name, GgmlType.F32)
        nbytes = math.prod(shape[:-1]) * row_bytes(kind, shape[-1])
        tensors[name] = TensorInfo(name, kind, shape, 0, offset, nbytes)
        offset += nbytes
    return ModelFacts(architecture, MappingProxyType(metadata), MappingProxyType(tensors))


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("tied", [False, True])
def test_every_family_is_described(architecture: str, tied: bool) -> None:
    parameters = describe(make(architecture, tied=tied))
    assert (parameters.n_layers, parameters.width, parameters.n_heads, parameters.n_kv_heads) == (4, 256, 4, 2)
    assert (parameters.head_dim, parameters.value_dim, parameters.rope_dims) == (64, 64, 64)
    assert (parameters.ffn_width, parameters.vocab_size, parameters.context_length) == (512, 300, 2048)
    assert parameters.tied_output is tied
    assert output_tensor(parameters) == ("token_embd.weight" if tied else "output.weight")
    assert parameters.rope_style is (RopeStyle.INTERLEAVED if architecture == "llama" else RopeStyle.HALVES)
    assert parameters.activation is (Activation.GELU_TANH if architecture == "gemma3" else Activation.SILU)
    assert parameters.qkv_bias is (architecture == "qwen2")
    assert parameters.qk_norm is (architecture in QK_NORMS)
    assert parameters.post_norms is (architecture == "gemma3")
    assert parameters.embedding_scale == (16.0 if architecture == "gemma3" else 1.0)
    assert parameters.attention_scale == 0.125
    assert parameters.rope_base == 10000.0
    assert parameters.sliding_window == (0, 0, 0, 0)


def test_names_are_the_gguf_packages() -> None:
    gguf = pytest.importorskip("gguf")
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSOR}
    for role in (*LayerRole, *ModelRole):
        name = role.value.removesuffix(".weight").removesuffix(".bias")
        assert name in known or f"blk.{{bid}}.{name}" in known, role
    for architecture in ARCHITECTURES:
        (arch,) = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
        allowed = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
        for role in layer_roles(describe(make(architecture))):
            assert f"blk.{{bid}}.{role.value.removesuffix('.weight').removesuffix('.bias')}" in allowed


def test_heads_may_be_wider_than_their_share() -> None:
    parameters = describe(make("qwen3", head=128))
    assert (parameters.head_dim, parameters.value_dim, parameters.rope_dims) == (128, 128, 128)
    assert parameters.attention_scale == 1 / math.sqrt(128)


def test_missing_kv_heads_are_as_many_as_heads() -> None:
    shapes = {f"blk.{layer}.attn_{kind}.weight": (HEADS * HEAD, WIDTH) for layer in range(4) for kind in "kv"}
    parameters = describe(make(keys={"attention.head_count_kv": None}, more=shapes))
    assert parameters.n_kv_heads == HEADS


def test_numbers_for_each_layer_are_taken_where_they_are_equal() -> None:
    equal, unequal = np.array([2, 2, 2, 2], dtype=np.int32), np.array([2, 2, 1, 2], dtype=np.int32)
    assert describe(make(keys={"attention.head_count_kv": equal})).n_kv_heads == 2
    with pytest.raises(ModelError, match=r"layers differ in 'llama\.attention\.head_count_kv' \(1 to 2\)"):
        describe(make(keys={"attention.head_count_kv": unequal}))
    with pytest.raises(ModelError, match="has 3 values for 4 layers"):
        describe(make(keys={"feed_forward_length": equal[:3]}))


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({}, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 0.25),
        ({"rope.scaling.factor": 2.0}, 0.5),
        ({"rope.scale_linear": 8.0}, 0.125),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.scaling.factor": 0.0}, 1.0),
    ],
)
def test_linear_scaling(keys: dict[str, object], scale: float) -> None:
    parameters = describe(make(keys=keys))
    assert (parameters.rope_scale, parameters.rope_scale_local) == (scale, scale)
    local = describe(make("gemma3", keys={**keys, "attention.sliding_window": 32}))
    assert (local.rope_scale, local.rope_scale_local) == (scale, 1.0)


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic"])
def test_other_scalings_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=kind) as caught:
        describe(make(keys={"rope.scaling.type": kind}))
    assert caught.value.reason == "model-unsupported"


def test_gemma3_sees_everything_in_every_sixth_layer() -> None:
    keys = {"attention.sliding_window": 512, "rope.freq_base": 1e6}
    parameters = describe(make("gemma3", 14, keys=keys))
    assert parameters.sliding_window == (512, 512, 512, 512, 512, 0) * 2 + (512, 512)
    assert (parameters.rope_base, parameters.rope_base_local) == (1e6, 1e4)
    given = describe(make("gemma3", 4, keys={**keys, "rope.freq_base_swa": 5e3, "attention.sliding_window_pattern": 2}))
    assert given.sliding_window == (512, 0, 512, 0)
    assert given.rope_base_local == 5e3
    listed = np.array([True, False, False, True])
    assert describe(make("gemma3", 4, keys={**keys, "attention.sliding_window_pattern": listed})).sliding_window == (
        512,
        0,
        0,
        512,
    )


def test_other_families_have_no_window_whatever_the_file_says() -> None:
    assert describe(make("llama", keys={"attention.sliding_window": 128})).sliding_window == (0, 0, 0, 0)


def test_gemma3s_27b_has_a_scale_of_its_own() -> None:
    small = describe(make("gemma3", 6, head=128))
    assert small.attention_scale == 1 / math.sqrt(128)
    large = describe(make("gemma3", 62, head=128))
    assert large.attention_scale == 1 / math.sqrt(WIDTH // HEADS)


def test_soft_caps() -> None:
    assert describe(make("gemma3", keys={"final_logit_softcapping": 30.0})).final_softcap == 30.0
    assert describe(make()).final_softcap == 0.0
    with pytest.raises(ModelError, match="attn_logit_softcapping"):
        describe(make("gemma3", keys={"attn_logit_softcapping": 50.0}))


def test_llama_may_have_biases_in_all_layers_or_none() -> None:
    assert describe(make(biases=True)).qkv_bias is True
    assert describe(make(biases=False)).qkv_bias is False
    with pytest.raises(ModelError, match=r"no tensor 'blk\.2\.attn_k\.bias'"):
        describe(make(biases=True, drop=("blk.2.attn_k.bias",)))
    with pytest.raises(ModelError, match=r"no tensor 'blk\.0\.attn_q\.bias'"):
        describe(make("qwen2", biases=False))


def test_rope_factors_come_with_every_stage() -> None:
    facts = make(more={"rope_freqs.weight": (HEAD // 2,)})
    parameters = describe(facts)
    assert parameters.rope_factors is True
    for first in range(4):
        assert ModelRole.ROPE_FACTORS.value in stage_tensors(facts, parameters, first, first + 1)
    with pytest.raises(ModelError, match="rope_freqs"):
        describe(make("qwen2", more={"rope_freqs.weight": (HEAD // 2,)}))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (lambda: make("bert"), "architecture 'bert' is not served"),
        (lambda: make(keys={"expert_count": 8}), "mixture of experts"),
        (lambda: make(keys={"attention.causal": False}), "not causal"),
        (lambda: make(keys={"block_count": None}), r"no key 'llama\.block_count'"),
        (lambda: make(keys={"block_count": 0}), r"'llama\.block_count' is 0"),
        (lambda: make(keys={"block_count": 2**40}), "is 1099511627776"),
        (lambda: make(keys={"block_count": 2**30}), "claims 1073741824 layers"),
        (lambda: make(keys={"block_count": 5}), r"no tensor 'blk\.4\.attn_norm\.weight'"),
        (lambda: make(keys={"block_count": 3}), r"a tensor 'blk\.3\."),
        (lambda: make(keys={"block_count": "4"}), "not a whole number"),
        (lambda: make(keys={"attention.head_count_kv": 3}), "can't share 3"),
        (lambda: make(keys={"attention.layer_norm_rms_epsilon": float("nan")}), "not a finite number"),
        (lambda: make(keys={"attention.layer_norm_rms_epsilon": 0.0}), "is 0.0"),
        (lambda: make(keys={"rope.freq_base": -1.0}), "is -1.0"),
        (lambda: make(keys={"rope.dimension_count": 63}), "rotates 63"),
        (lambda: make(keys={"rope.dimension_count": 128}), "rotates 128"),
        (lambda: make(keys={"context_length": None}), "context_length"),
        (lambda: make(keys={"feed_forward_length": 500}), r"'blk\.0\.ffn_gate\.weight' has the shape 512×256"),
        (lambda: make(drop=("token_embd.weight",)), "no tensor 'token_embd.weight'"),
        (lambda: make(drop=("output_norm.weight",)), "no tensor 'output_norm.weight'"),
        (lambda: make(drop=("blk.1.ffn_up.weight",)), r"no tensor 'blk\.1\.ffn_up\.weight'"),
        (lambda: make(more={"output.weight": (VOCAB, WIDTH // 2)}), r"'output\.weight' has the shape 300×128"),
        (lambda: make(more={"blk.0.attn_q.weight": (4, 64, 256)}), "has 3 dimensions"),
        (lambda: make(more={"blk.0.attn_sinks.weight": (4,)}), "blk.0.attn_sinks.weight"),
        (lambda: make(types={"blk.1.ffn_up.weight": GgmlType.I8}), r"'blk\.1\.ffn_up\.weight' is of type I8"),
        (lambda: make(types={"blk.1.ffn_norm.weight": GgmlType.Q8_0}), r"'blk\.1\.ffn_norm\.weight' is of type Q8_0"),
        (
            lambda: make(keys={"tokenizer.ggml.tokens": StringArray.of(["a"] * 299)}),
            "299 tokens, and embeddings for 300",
        ),
    ],
)
def test_what_is_refused_is_named(facts: Callable[[], ModelFacts], said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        describe(facts())
    assert caught.value.hint
    assert caught.value.reason != "model"


def test_cuts_are_between_any_two_layers() -> None:
    parameters = describe(make())
    assert legal_cuts(parameters) == (1, 2, 3)
    assert legal_cuts(replace(parameters, n_layers=1)) == ()


@given(
    st.sampled_from(sorted(ARCHITECTURES)),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 8), min_size=0, max_size=5, unique=True),
)
def test_stages_cover_the_model_and_share_only_what_several_need(
    architecture: str, tied: bool, factors: bool, cuts: list[int]
) -> None:
    layers = 9
    more: dict[str, tuple[int, ...]] = {"rope_freqs.weight": (32,)} if factors and architecture == "llama" else {}
    facts = make(architecture, layers, tied=tied, more=more)
    parameters = describe(facts)
    bounds = [0, *sorted(cuts), layers]
    stages = [stage_tensors(facts, parameters, a, b) for a, b in pairwise(bounds)]
    counts = {name: sum(name in stage for stage in stages) for name in facts.tensors}
    for name, count in counts.items():
        if name == "rope_freqs.weight":
            assert count == len(stages)
        elif name == "token_embd.weight":
            assert count == (2 if tied and len(stages) > 1 else 1)
        else:
            assert count == 1
    order = list(facts.tensors)
    for stage, first, end in zip(stages, bounds[:-1], bounds[1:], strict=True):
        assert list(stage) == sorted(stage, key=order.index)
        needed = {layer_tensor(layer, role) for layer in range(first, end) for role in layer_roles(parameters)}
        assert needed <= set(stage)
    assert "token_embd.weight" in stages[0]
    assert {output_tensor(parameters), "output_norm.weight"} <= set(stages[-1])


@pytest.mark.parametrize(("first", "end"), [(0, 0), (2, 1), (-1, 2), (0, 5)])
def test_stages_of_other_layers_are_refused(first: int, end: int) -> None:
    facts = make()
    with pytest.raises(ValueError, match="layers"):
        stage_tensors(facts, describe(facts), first, end)


def test_facts_of_any_kind_give_parameters_or_the_error() -> None:
    odd: list[Any] = [None, True, -1, 0, 1.5, "x", np.array([1, 2]), np.array([]), np.array([1.0] * 4), float("inf")]
    keys = [key for key in make().metadata if key != "general.architecture"]
    keys += [f"llama.{key}" for key in ("rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "expert_count")]
    for key in keys:
        for item in odd:
            facts = make(keys={key.removeprefix("llama."): item})
            try:
                parameters = describe(facts)
            except ModelError:
                continue
            assert parameters.n_layers == 4
