"""The table of architectures: what tells one decoder family from another, and where it may be cut.

A new family of the same kind is one entry of :data:`ARCHITECTURES`. Everything that an engine must know of a model
beyond its tensors is in :class:`Hyperparameters`; the tensors' names are in :class:`LayerRole` and :class:`ModelRole`.

Every family here is the same decoder, whose block is, with the optional steps in brackets::

    h = attn_norm(x);  q, k, v = attn_q(h), attn_k(h), attn_v(h) [+ biases]
    [q, k = attn_q_norm(q), attn_k_norm(k) over each head];  q, k = rotate(q, k)
    a = attn_output(attention(q, k, v) · v);      x = x + [post_attention_norm](a)
    f = ffn_down(act(ffn_gate(ffn_norm(x))) * ffn_up(ffn_norm(x)));  x = x + [post_ffw_norm](f)

Norms are RMS norms, their weights as stored (Gemma's converters have already added the 1). What each key defaults to
follows llama.cpp (``src/llama-model.cpp``), so that a file means the same to both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from myelin.errors import ModelError
from myelin.model.facts import ModelFacts, TensorInfo
from myelin.model.quant import FLOATS, READABLE


class RopeStyle(StrEnum):
    """Which elements of a head are rotated together.

    Files of the ``llama`` family have the rows of ``attn_q`` and ``attn_k`` permuted by the converter, so that their
    rotation is interleaved although the original model's is not.
    """

    INTERLEAVED = "interleaved"
    """Element ``2i`` with ``2i+1`` (ggml's NORM; llama)."""
    HALVES = "halves"
    """Element ``i`` with ``i + rope_dims/2`` (ggml's NEOX; qwen2, qwen3, gemma3)."""


class Activation(StrEnum):
    """The gate's function in the feed-forward block: ``down(act(gate(x)) * up(x))``."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class ModelRole(StrEnum):
    """The tensors outside ``blk.*``, by what they are for; the value is the tensor's name."""

    TOKEN_EMBEDDING = "token_embd.weight"
    """``(vocab_size, width)``."""
    OUTPUT_NORM = "output_norm.weight"
    """``(width,)``."""
    OUTPUT = "output.weight"
    """``(vocab_size, width)``; missing where the output is tied to the embedding."""
    ROPE_FACTORS = "rope_freqs.weight"
    """``(rope_dims / 2,)``: each rotation frequency is *divided* by its factor (Llama 3.1 and later)."""


class LayerRole(StrEnum):
    """The tensors of a block, by what they are for; the value is the name's end (see :func:`layer_tensor`)."""

    ATTENTION_NORM = "attn_norm.weight"
    """``(width,)``."""
    QUERY = "attn_q.weight"
    """``(n_heads * head_dim, width)``."""
    KEY = "attn_k.weight"
    """``(n_kv_heads * head_dim, width)``."""
    VALUE = "attn_v.weight"
    """``(n_kv_heads * value_dim, width)``."""
    QUERY_BIAS = "attn_q.bias"
    KEY_BIAS = "attn_k.bias"
    VALUE_BIAS = "attn_v.bias"
    QUERY_NORM = "attn_q_norm.weight"
    """``(head_dim,)``."""
    KEY_NORM = "attn_k_norm.weight"
    """``(head_dim,)``."""
    ATTENTION_OUTPUT = "attn_output.weight"
    """``(width, n_heads * value_dim)``."""
    POST_ATTENTION_NORM = "post_attention_norm.weight"
    """``(width,)``."""
    FFN_NORM = "ffn_norm.weight"
    """``(width,)``."""
    FFN_GATE = "ffn_gate.weight"
    """``(ffn_width, width)``."""
    FFN_UP = "ffn_up.weight"
    """``(ffn_width, width)``."""
    FFN_DOWN = "ffn_down.weight"
    """``(width, ffn_width)``."""
    POST_FFN_NORM = "post_ffw_norm.weight"
    """``(width,)``."""


_BIASES = (LayerRole.QUERY_BIAS, LayerRole.KEY_BIAS, LayerRole.VALUE_BIAS)
_QK_NORMS = (LayerRole.QUERY_NORM, LayerRole.KEY_NORM)
_POST_NORMS = (LayerRole.POST_ATTENTION_NORM, LayerRole.POST_FFN_NORM)


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
        rope_factors: The model has ``rope_freqs.weight``, by which the rotation frequencies of every layer are divided.
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
    rope_factors: bool = False


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The sizes from which a family's own scales follow."""

    n_layers: int
    width: int
    n_heads: int
    head_dim: int


class Presence(StrEnum):
    """Whether a family's files have some optional tensors."""

    NEVER = "never"
    OPTIONAL = "optional"
    ALWAYS = "always"


def _head_scale(dimensions: Dimensions) -> float:
    return 1.0 / math.sqrt(dimensions.head_dim)


def _gemma3_scale(dimensions: Dimensions) -> float:
    # query_pre_attn_scalar is the head's size in all Gemma 3 models but the 27B (62 layers), where it is width / heads.
    per_head = dimensions.width // dimensions.n_heads if dimensions.n_layers == 62 else dimensions.head_dim
    return 1.0 / math.sqrt(per_head)


def _everywhere(parameters: Hyperparameters) -> tuple[int, ...]:
    return tuple(range(1, parameters.n_layers))


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family: what its files have, and what they leave unsaid.

    Attributes:
        rope_style: How heads are rotated.
        activation: The feed-forward gate's.
        qkv_bias: Whether the projections have biases.
        qk_norm, post_norms: As in :class:`Hyperparameters`.
        rope_factors: Its files may have ``rope_freqs.weight``.
        attention_scale: From the sizes.
        embedding_scale: From the width.
        window_period: Every so many layers, the last sees all positions and the others the sliding window; 0 where the
            family has no window (a window key is then without meaning).
        rope_base_local: Frequency base of window layers unless the file says otherwise.
        cuts: The legal cuts (see :func:`legal_cuts`).
    """

    rope_style: RopeStyle
    activation: Activation = Activation.SILU
    qkv_bias: Presence = Presence.OPTIONAL
    qk_norm: bool = False
    post_norms: bool = False
    rope_factors: bool = False
    attention_scale: Callable[[Dimensions], float] = _head_scale
    embedding_scale: Callable[[int], float] = lambda width: 1.0
    window_period: int = 0
    rope_base_local: float = 10000.0
    cuts: Callable[[Hyperparameters], tuple[int, ...]] = _everywhere


ARCHITECTURES: Mapping[str, Architecture] = {
    # Llama 1 to 3.3, Mistral, SmolLM2 and others under the same name.
    "llama": Architecture(RopeStyle.INTERLEAVED, rope_factors=True),
    "qwen2": Architecture(RopeStyle.HALVES, qkv_bias=Presence.ALWAYS),
    "qwen3": Architecture(RopeStyle.HALVES, qk_norm=True),
    "gemma3": Architecture(
        RopeStyle.HALVES,
        activation=Activation.GELU_TANH,
        qkv_bias=Presence.NEVER,
        qk_norm=True,
        post_norms=True,
        attention_scale=_gemma3_scale,
        embedding_scale=math.sqrt,
        window_period=6,
    ),
}
"""Every family that Myelin serves, by GGUF's name."""

# A model may not ask for more than this, whatever its header says: it keeps arithmetic and loops over layers bounded.
_LARGEST = 1 << 31
_MOST_LAYERS = 4096

_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)")


def layer_tensor(layer: int, role: LayerRole) -> str:
    """The name of a block's tensor, such as ``blk.3.attn_q.weight``."""
    return f"blk.{layer}.{role.value}"


def output_tensor(parameters: Hyperparameters) -> str:
    """The name of the tensor that gives the logits."""
    return str(ModelRole.TOKEN_EMBEDDING if parameters.tied_output else ModelRole.OUTPUT)


def layer_roles(parameters: Hyperparameters) -> tuple[LayerRole, ...]:
    """The tensors that each block of this model has."""
    left_out: set[LayerRole] = set()
    if not parameters.qkv_bias:
        left_out.update(_BIASES)
    if not parameters.qk_norm:
        left_out.update(_QK_NORMS)
    if not parameters.post_norms:
        left_out.update(_POST_NORMS)
    return tuple(role for role in LayerRole if role not in left_out)


def role_shape(parameters: Hyperparameters, role: LayerRole | ModelRole) -> tuple[int, ...]:
    """The shape that a tensor of this role must have."""
    width, queries = parameters.width, parameters.n_heads * parameters.head_dim
    keys, values = parameters.n_kv_heads * parameters.head_dim, parameters.n_kv_heads * parameters.value_dim
    shapes: dict[LayerRole | ModelRole, tuple[int, ...]] = {
        ModelRole.TOKEN_EMBEDDING: (parameters.vocab_size, width),
        ModelRole.OUTPUT: (parameters.vocab_size, width),
        ModelRole.ROPE_FACTORS: (parameters.rope_dims // 2,),
        LayerRole.QUERY: (queries, width),
        LayerRole.KEY: (keys, width),
        LayerRole.VALUE: (values, width),
        LayerRole.QUERY_BIAS: (queries,),
        LayerRole.KEY_BIAS: (keys,),
        LayerRole.VALUE_BIAS: (values,),
        LayerRole.QUERY_NORM: (parameters.head_dim,),
        LayerRole.KEY_NORM: (parameters.head_dim,),
        LayerRole.ATTENTION_OUTPUT: (width, parameters.n_heads * parameters.value_dim),
        LayerRole.FFN_GATE: (parameters.ffn_width, width),
        LayerRole.FFN_UP: (parameters.ffn_width, width),
        LayerRole.FFN_DOWN: (width, parameters.ffn_width),
    }
    return shapes.get(role, (width,))


def describe(facts: ModelFacts) -> Hyperparameters:
    """Read the hyperparameters of ``facts`` through the table.

    Raises:
        ModelError: The architecture is unknown, a key is missing or of a wrong type, a needed tensor is missing or has
            a wrong shape, there is a tensor that the family doesn't have, or a tensor's type is one that no engine can
            read. The first thing wrong is named.
    """
    family = ARCHITECTURES.get(facts.architecture)
    if family is None:
        raise ModelError(
            f"the model's architecture '{facts.architecture[:60]}' is not served",
            f"Served are: {', '.join(sorted(ARCHITECTURES))}.",
            reason="architecture",
        )
    parameters = _parameters(facts, family)
    _check_tensors(facts, family, parameters)
    return parameters


def legal_cuts(parameters: Hyperparameters) -> tuple[int, ...]:
    """The layers before which a new stage may begin, ascending, within ``1..n_layers-1``."""
    family = ARCHITECTURES.get(parameters.architecture)
    return (family.cuts if family is not None else _everywhere)(parameters)


def stage_tensors(facts: ModelFacts, parameters: Hyperparameters, first_layer: int, end_layer: int) -> tuple[str, ...]:
    """Names of the tensors that the stage of layers ``[first_layer, end_layer)`` needs, in file order.

    Layer 0 brings ``token_embd``; the last layer brings ``output_norm`` and the output head (``token_embd`` where it is
    tied); ``rope_freqs.weight`` and other tensors outside ``blk.*`` that every layer reads come with every stage.

    Raises:
        ValueError: The layers are none, or not the model's.
    """
    if not 0 <= first_layer < end_layer <= parameters.n_layers:
        raise ValueError(f"layers {first_layer} to {end_layer} of {parameters.n_layers}")
    outside: set[str] = set()
    if parameters.rope_factors:
        outside.add(ModelRole.ROPE_FACTORS.value)
    if first_layer == 0:
        outside.add(ModelRole.TOKEN_EMBEDDING.value)
    if end_layer == parameters.n_layers:
        outside.update((ModelRole.OUTPUT_NORM.value, output_tensor(parameters)))

    def needed(name: str) -> bool:
        block = _BLOCK_NAME.fullmatch(name)
        return name in outside if block is None else first_layer <= int(block[1]) < end_layer

    return tuple(name for name in facts.tensors if needed(name))


# Reading the keys --------------------------------------------------------------------------------------------------


def _unsupported(what: str, hint: str = "") -> ModelError:
    return ModelError(what, hint or "Myelin does not serve this kind of model yet.", reason="model-unsupported")


def _size(facts: ModelFacts, key: str, default: int | None = None) -> int:
    value = facts.integer(key, default)
    if not 1 <= value < _LARGEST:
        raise ModelError(f"the model's key '{key}' is {value}", "The file is damaged.", reason="model-key")
    return value


def _positive(facts: ModelFacts, key: str, default: float | None = None) -> float:
    value = facts.number(key, default)
    if value <= 0.0:
        raise ModelError(f"the model's key '{key}' is {value}", "The file is damaged.", reason="model-key")
    return value


def _same_size(facts: ModelFacts, key: str, n_layers: int, default: int | None = None) -> int:
    """A size that a file may give once or for each layer; here all layers must have the same."""
    values = facts.metadata.get(key)
    if not isinstance(values, np.ndarray):
        return _size(facts, key, default)
    if len(values) != n_layers or values.dtype.kind not in "iu":
        raise ModelError(
            f"the model's key '{key}' has {len(values)} values for {n_layers} layers",
            "The file is damaged.",
            reason="model-key",
        )
    value = int(values[0])
    if (values != values[0]).any():
        raise _unsupported(f"the model's layers differ in '{key}' ({int(values.min())} to {int(values.max())})")
    if not 1 <= value < _LARGEST:
        raise ModelError(f"the model's key '{key}' is {value}", "The file is damaged.", reason="model-key")
    return value


def _rope_scale(facts: ModelFacts, prefix: str) -> float:
    """Positions are multiplied by this. The key's name was once ``rope.scale_linear``; a factor of 0 means none."""
    kind = facts.text(f"{prefix}.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise _unsupported(
            f"the model scales its positions by '{kind[:40]}', which Myelin does not know",
            "Take a file of the model without extended context.",
        )
    factor = facts.number(f"{prefix}.rope.scaling.factor", facts.number(f"{prefix}.rope.scale_linear", 0.0))
    if factor < 0.0:
        raise ModelError(
            f"the model's key '{prefix}.rope.scaling.factor' is {factor}", "The file is damaged.", reason="model-key"
        )
    return 1.0 if factor == 0.0 or kind == "none" else 1.0 / factor


def _parameters(facts: ModelFacts, family: Architecture) -> Hyperparameters:
    prefix = facts.architecture
    n_layers = _size(facts, f"{prefix}.block_count")
    if n_layers > _MOST_LAYERS:
        raise ModelError(f"the model claims {n_layers} layers", "The file is damaged.", reason="model-key")
    if facts.integer(f"{prefix}.expert_count", 0) > 0:
        raise _unsupported(f"the model is a mixture of experts ('{prefix}.expert_count' is above 0)")
    if not facts.flag(f"{prefix}.attention.causal", True):
        raise _unsupported("the model's attention is not causal: it is an encoder, and generates no text")
    width = _size(facts, f"{prefix}.embedding_length")
    n_heads = _same_size(facts, f"{prefix}.attention.head_count", n_layers)
    n_kv_heads = _same_size(facts, f"{prefix}.attention.head_count_kv", n_layers, n_heads)
    if n_heads % n_kv_heads:
        raise ModelError(
            f"the model's {n_heads} heads can't share {n_kv_heads} key/value heads in equal groups",
            "The file is damaged.",
            reason="model-key",
        )
    head_dim = _size(facts, f"{prefix}.attention.key_length", width // n_heads)
    value_dim = _size(facts, f"{prefix}.attention.value_length", width // n_heads)
    rope_dims = _size(facts, f"{prefix}.rope.dimension_count", head_dim)
    if rope_dims > head_dim or rope_dims % 2:
        raise ModelError(
            f"the model rotates {rope_dims} elements of heads of {head_dim}", "The file is damaged.", reason="model-key"
        )
    embedding = _tensor(facts, ModelRole.TOKEN_EMBEDDING.value)
    vocab_size = embedding.shape[0]
    rope_base = _positive(facts, f"{prefix}.rope.freq_base", 10000.0)
    rope_scale = _rope_scale(facts, prefix)

    window = facts.integer(f"{prefix}.attention.sliding_window", 0) if family.window_period else 0
    if not 0 <= window < _LARGEST:
        raise ModelError(
            f"the model's key '{prefix}.attention.sliding_window' is {window}",
            "The file is damaged.",
            reason="model-key",
        )
    windows = _windows(facts, family, n_layers, window)
    rope_base_local, rope_scale_local = rope_base, rope_scale
    if window:
        rope_base_local = _positive(facts, f"{prefix}.rope.freq_base_swa", family.rope_base_local)
        rope_scale_local = 1.0  # linear scaling is for the layers that see far
    softcap = facts.number(f"{prefix}.final_logit_softcapping", 0.0)
    if facts.number(f"{prefix}.attn_logit_softcapping", 0.0) > 0.0:
        raise _unsupported("the model caps its attention scores ('attn_logit_softcapping')")
    dimensions = Dimensions(n_layers, width, n_heads, head_dim)
    return Hyperparameters(
        architecture=prefix,
        n_layers=n_layers,
        width=width,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        ffn_width=_same_size(facts, f"{prefix}.feed_forward_length", n_layers),
        vocab_size=vocab_size,
        context_length=_size(facts, f"{prefix}.context_length"),
        norm_epsilon=_positive(facts, f"{prefix}.attention.layer_norm_rms_epsilon"),
        rope_style=family.rope_style,
        rope_dims=rope_dims,
        rope_base=rope_base,
        rope_base_local=rope_base_local,
        rope_scale=rope_scale,
        rope_scale_local=rope_scale_local,
        attention_scale=family.attention_scale(dimensions),
        embedding_scale=family.embedding_scale(width),
        activation=family.activation,
        qkv_bias=_has_biases(facts, family, n_layers),
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        sliding_window=windows,
        tied_output=ModelRole.OUTPUT.value not in facts.tensors,
        final_softcap=max(softcap, 0.0),
        rope_factors=family.rope_factors and ModelRole.ROPE_FACTORS.value in facts.tensors,
    )


def _windows(facts: ModelFacts, family: Architecture, n_layers: int, window: int) -> tuple[int, ...]:
    """Each layer's window: all layers of a period but its last, or as a pattern in the file says (true is local)."""
    if not window:
        return (0,) * n_layers
    key = f"{facts.architecture}.attention.sliding_window_pattern"
    pattern = facts.metadata.get(key)
    if isinstance(pattern, np.ndarray):
        if len(pattern) != n_layers or pattern.dtype.kind not in "biu":
            raise ModelError(
                f"the model's key '{key}' has {len(pattern)} values for {n_layers} layers",
                "The file is damaged.",
                reason="model-key",
            )
        return tuple(window if local else 0 for local in pattern.tolist())
    period = facts.integer(key, family.window_period)
    if period < 0:
        raise ModelError(f"the model's key '{key}' is {period}", "The file is damaged.", reason="model-key")
    # A period of 0 makes every layer local, 1 none.
    return tuple(window if period == 0 or layer % period < period - 1 else 0 for layer in range(n_layers))


def _has_biases(facts: ModelFacts, family: Architecture, n_layers: int) -> bool:
    if family.qkv_bias is not Presence.OPTIONAL:
        return family.qkv_bias is Presence.ALWAYS
    return any(layer_tensor(layer, role) in facts.tensors for layer in range(n_layers) for role in _BIASES)


# Checking the tensors ----------------------------------------------------------------------------------------------


def _tensor(facts: ModelFacts, name: str) -> TensorInfo:
    tensor = facts.tensors.get(name)
    if tensor is None:
        raise ModelError(
            f"the model has no tensor '{name}', which every '{facts.architecture}' model of its kind has",
            "The file is incomplete: a part of a split model may be missing, or try another file of the same model.",
            reason="tensor-missing",
        )
    if len(tensor.shape) > 2:
        raise ModelError(
            f"tensor '{name}' has {len(tensor.shape)} dimensions", "The file is damaged.", reason="tensor-shape"
        )
    return tensor


def _check_tensors(facts: ModelFacts, family: Architecture, parameters: Hyperparameters) -> None:
    model_roles: Sequence[ModelRole] = tuple(
        role
        for role in ModelRole
        if not (role is ModelRole.OUTPUT and parameters.tied_output)
        and not (role is ModelRole.ROPE_FACTORS and not parameters.rope_factors)
    )
    expected = {role.value: role_shape(parameters, role) for role in model_roles}
    roles = layer_roles(parameters)
    for layer in range(parameters.n_layers):
        expected.update((layer_tensor(layer, role), role_shape(parameters, role)) for role in roles)
    for name, shape in expected.items():
        tensor = _tensor(facts, name)
        if tensor.shape != shape:
            raise ModelError(
                f"tensor '{name}' has the shape {_times(tensor.shape)}, where its keys make it {_times(shape)}",
                "The file is damaged: fetch it again.",
                reason="tensor-shape",
            )
        if tensor.ggml_type not in (READABLE if len(shape) > 1 else FLOATS):
            raise ModelError(
                f"tensor '{name}' is of type {tensor.ggml_type.name}, which no engine reads there",
                "Take another quantization of the same model (Q4_K_M is always a good choice).",
                reason="tensor-type",
            )
    for name in facts.tensors:
        if name not in expected:
            raise _unsupported(
                f"the model has a tensor {name[:80]!r} that '{facts.architecture}' models don't have",
                "It is of a variant that Myelin does not serve; leaving the tensor out would give wrong text.",
            )
    tokens = facts.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence) and len(tokens) != parameters.vocab_size:
        raise ModelError(
            f"the model has {len(tokens)} tokens, and embeddings for {parameters.vocab_size}",
            "The file is damaged or was converted wrongly: try another file of the same model.",
            reason="tensor-shape",
        )


def _times(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
