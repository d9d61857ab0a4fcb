"""The table of architectures: what tells one decoder family from another, and where it may be cut.

A new family of the same kind is one entry of :data:`ARCHITECTURES`. Everything that an engine must know of a model
beyond its tensors is in :class:`Hyperparameters`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from myelin.model.facts import ModelFacts


class RopeStyle(str, Enum):
    """Which elements of a head are rotated together."""

    INTERLEAVED = "interleaved"
    """Element ``2i`` with ``2i+1`` (ggml's NORM; llama)."""
    HALVES = "halves"
    """Element ``i`` with ``i + rope_dims/2`` (ggml's NEOX; qwen2, qwen3, gemma3)."""


class Activation(str, Enum):
    """The gate's function in the feed-forward block: ``down(act(gate(x)) * up(x))``."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Everything that an engine needs to know to compute a model's layers.

    Attributes:
        architecture: GGUF's name of the family.
        n_layers: Decoder blocks.
        width: Size of the residual stream.
        n_heads, n_kv_heads: Query heads, and key/value heads that they share in equal groups.
        head_dim: Elements of a query or key head.
        value_dim: Elements of a value head.
        ffn_width: Rows of ``ffn_gate``.
        vocab_size: Rows of ``token_embd`` (and of the output head).
        context_length: Positions the model was trained for.
        norm_epsilon: Of every RMS norm.
        rope_style, rope_dims: How, and how many leading elements of each head, are rotated.
        rope_base: Frequency base of layers that attend globally.
        rope_base_local: Frequency base of layers with a sliding window.
        rope_scale: Positions of global layers are multiplied by this (1 / linear scaling factor).
        rope_scale_local: The same for sliding-window layers.
        attention_scale: Multiplies ``q·k`` before the softmax.
        embedding_scale: Multiplies the token embedding.
        activation: The feed-forward gate's.
        qkv_bias: The projections carry ``attn_{q,k,v}.bias``.
        qk_norm: RMS norms ``attn_q_norm``/``attn_k_norm`` over each head, before the rotation.
        post_norms: ``post_attention_norm`` and ``post_ffw_norm`` over a block's output, before the residual is added.
        sliding_window: For each layer, how many positions (its own included) it sees, or 0 for all.
        tied_output: The output head is ``token_embd`` itself.
        final_softcap: ``cap * tanh(logit / cap)`` on the logits where it is above 0.
    """

    architecture: str
    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    ffn_width: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope_style: RopeStyle
    rope_dims: int
    rope_base: float
    rope_base_local: float
    rope_scale: float
    rope_scale_local: float
    attention_scale: float
    embedding_scale: float
    activation: Activation
    qkv_bias: bool
    qk_norm: bool
    post_norms: bool
    sliding_window: tuple[int, ...]
    tied_output: bool
    final_softcap: float = 0.0


def describe(facts: ModelFacts) -> Hyperparameters:
    """Read the hyperparameters of ``facts`` through the table.

    Raises:
        ModelError: The architecture is unknown, a key is missing or of a wrong type, a needed tensor is missing or has
            a wrong shape, or a tensor's type is one that no engine can read. The first thing wrong is named.
    """
    raise NotImplementedError


def legal_cuts(parameters: Hyperparameters) -> tuple[int, ...]:
    """The layers before which a new stage may begin, ascending, within ``1..n_layers-1``."""
    raise NotImplementedError


def stage_tensors(
    facts: ModelFacts, parameters: Hyperparameters, first_layer: int, end_layer: int
) -> tuple[str, ...]:
    """Names of the tensors that the stage of layers ``[first_layer, end_layer)`` needs, in file order.

    Layer 0 brings ``token_embd``; the last layer brings ``output_norm`` and the output head (``token_embd`` where it is
    tied); ``rope_freqs.weight`` and other tensors outside ``blk.*`` that every layer reads come with every stage.
    """
    raise NotImplementedError
