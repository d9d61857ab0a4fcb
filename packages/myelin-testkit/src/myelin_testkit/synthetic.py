"""Synthetic models: small GGUF files of any architecture, with any mix of tensor types, that llama.cpp loads too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from myelin.model.quant import GgmlType, row_bytes
from myelin_testkit.blocks import can_encode, encode, random_blocks
from myelin_testkit.vocabulary import Vocabulary, byte_level, sentence_piece


@dataclass(frozen=True)
class Recipe:
    """What a synthetic model is like. The defaults are a small llama whose widths suit every block size.

    Attributes:
        architecture: ``llama``, ``qwen2``, ``qwen3`` or ``gemma3``.
        n_layers, width, n_heads, n_kv_heads, head_dim, ffn_width: Sizes. A matrix's columns must be a whole number of
            blocks of its type (256 elements for K-types); they are ``width``, ``n_heads * head_dim`` for
            ``attn_output`` and ``ffn_width`` for ``ffn_down``.
        vocab_size: Rows of the embedding; any number from 260 up, odd ones included.
        context_length: What the header says.
        types: Tensor types by name pattern (``fnmatch``), the first that matches wins; a tensor that none matches is
            F16. Norms, biases and ``rope_freqs`` are always F32.
        tied: No ``output.weight``: the head is the embedding.
        qkv_bias: ``attn_{q,k,v}.bias``; None is what the family usually has.
        rope_freqs: A ``rope_freqs.weight`` (llama).
        rope_base: Frequency base.
        rope_scaling: Linear scaling factor; 1 is none.
        sliding_window: Positions that a windowed layer sees; 0 is none (gemma3).
        window_pattern: Every n-th layer attends globally (gemma3); 0 leaves the key out, which means 6.
        final_softcap: On the logits; 0 is none (gemma3).
        tokenizer: ``gpt2`` or ``llama``; empty is what the family usually has.
        chat_template: Jinja text; empty is none.
        seed: Of all random numbers.
        quick: Fill quantized tensors with random blocks instead of quantizing random numbers: for large models.
    """

    architecture: str = "llama"
    n_layers: int = 2
    width: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    ffn_width: int = 512
    vocab_size: int = 301
    context_length: int = 512
    types: Mapping[str, GgmlType] = field(default_factory=dict)
    tied: bool = False
    qkv_bias: bool | None = None
    rope_freqs: bool = False
    rope_base: float = 10000.0
    rope_scaling: float = 1.0
    sliding_window: int = 0
    window_pattern: int = 0
    final_softcap: float = 0.0
    tokenizer: str = ""
    chat_template: str = ""
    seed: int = 0
    quick: bool = False

    @property
    def has_bias(self) -> bool:
        """Whether the projections carry biases."""
        return self.architecture == "qwen2" if self.qkv_bias is None else self.qkv_bias

    def vocabulary(self) -> Vocabulary:
        """Its tokenizer."""
        kind = self.tokenizer or ("llama" if self.architecture == "gemma3" else "gpt2")
        if kind == "llama":
            return sentence_piece(self.vocab_size)
        return byte_level(self.vocab_size, "qwen2" if self.architecture.startswith("qwen") else "gpt-2")


_MORE_BITS = ("blk.[0147].", "blk.1[0345].")
"""Of 16 layers, those whose most sensitive tensors Q4_K_M gives more bits (``use_more_bits`` in llama.cpp)."""

LLAMA_1B = Recipe(
    n_layers=16,
    width=2048,
    n_heads=32,
    n_kv_heads=8,
    head_dim=64,
    ffn_width=8192,
    vocab_size=128256,
    context_length=131072,
    types={
        "token_embd.weight": GgmlType.Q6_K,
        **{f"{layers}{name}.weight": GgmlType.Q6_K for layers in _MORE_BITS for name in ("attn_v", "ffn_down")},
        "*": GgmlType.Q4_K,
    },
    tied=True,
    rope_freqs=True,
    rope_base=500000.0,
    quick=True,
)
"""The shape of Llama 3.2 1B in Q4_K_M, filled with random blocks in seconds: for speed and memory, not for sense."""


def write_model(recipe: Recipe, path: Path, *, parts: int = 1) -> list[Path]:
    """Write the model.

    Args:
        recipe: What it is like.
        path: The file; for a split model ``name.gguf`` becomes ``name-00001-of-0000N.gguf`` and so on.
        parts: Files; with more than one, the first holds metadata only, as ``gguf-split`` can do it.

    Returns:
        The files, in order.

    Raises:
        ValueError: A tensor's columns don't suit its type, or the vocabulary is too small.
    """
    if parts == 1:
        tensors = list(_tensors(recipe))
        _write(path, recipe, recipe_metadata(recipe), tensors)
        return [path]
    tensors = list(_tensors(recipe))
    share = -(-len(tensors) // (parts - 1))
    paths = [path.with_name(f"{path.stem}-{number + 1:05d}-of-{parts:05d}.gguf") for number in range(parts)]
    for number, part in enumerate(paths):
        metadata: dict[str, Any] = recipe_metadata(recipe) if number == 0 else {}
        own = [] if number == 0 else tensors[(number - 1) * share : number * share]
        split = {"split.no": np.uint16(number), "split.count": np.uint16(parts)}
        split_total = {"split.tensors.count": np.int32(len(tensors))}
        _write(part, recipe, metadata | split | split_total, own)
    return paths


def recipe_metadata(recipe: Recipe) -> dict[str, Any]:
    """The header's keys. NumPy scalars carry their own width; a plain int is ``uint32``, a plain float ``float32``."""
    name = recipe.architecture
    vocabulary = recipe.vocabulary()
    keys: dict[str, Any] = {
        "general.name": f"synthetic {name}",
        f"{name}.block_count": recipe.n_layers,
        f"{name}.context_length": recipe.context_length,
        f"{name}.embedding_length": recipe.width,
        f"{name}.feed_forward_length": recipe.ffn_width,
        f"{name}.attention.head_count": recipe.n_heads,
        f"{name}.attention.head_count_kv": recipe.n_kv_heads,
        f"{name}.attention.key_length": recipe.head_dim,
        f"{name}.attention.value_length": recipe.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-6 if name != "llama" else 1e-5,
        f"{name}.rope.freq_base": recipe.rope_base,
    }
    if name == "llama":
        keys[f"{name}.rope.dimension_count"] = recipe.head_dim
        keys[f"{name}.vocab_size"] = recipe.vocab_size
    if recipe.rope_scaling != 1:
        keys[f"{name}.rope.scaling.type"] = "linear"
        keys[f"{name}.rope.scaling.factor"] = recipe.rope_scaling
    if recipe.sliding_window:
        keys[f"{name}.attention.sliding_window"] = recipe.sliding_window
    if recipe.window_pattern:
        keys[f"{name}.attention.sliding_window_pattern"] = recipe.window_pattern
    if recipe.final_softcap:
        keys[f"{name}.final_logit_softcapping"] = recipe.final_softcap
    keys |= {
        "tokenizer.ggml.model": vocabulary.model,
        "tokenizer.ggml.tokens": list(vocabulary.tokens),
        "tokenizer.ggml.token_type": list(vocabulary.types),
        "tokenizer.ggml.bos_token_id": vocabulary.bos,
        "tokenizer.ggml.eos_token_id": vocabulary.eos,
        "tokenizer.ggml.add_bos_token": vocabulary.add_bos,
    }
    if vocabulary.model == "gpt2":
        keys |= {"tokenizer.ggml.pre": vocabulary.pre, "tokenizer.ggml.merges": list(vocabulary.merges)}
    else:
        keys |= {
            "tokenizer.ggml.scores": list(vocabulary.scores),
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": recipe.architecture != "gemma3",
        }
    if recipe.chat_template:
        keys["tokenizer.chat_template"] = recipe.chat_template
    return keys


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to be written: ``shape`` in NumPy order; its numbers are drawn when it is written."""

    name: str
    ggml_type: GgmlType
    shape: tuple[int, ...]
    mean: float
    deviation: float

    @property
    def nbytes(self) -> int:
        rows = int(np.prod(self.shape[:-1]))
        return rows * row_bytes(self.ggml_type, self.shape[-1])


def _tensors(recipe: Recipe) -> Iterator[_Tensor]:
    """The model's tensors, in the order in which converters write them."""
    heads, kv_heads = recipe.n_heads * recipe.head_dim, recipe.n_kv_heads * recipe.head_dim
    width = recipe.width

    def matrix(name: str, rows: int, columns: int, deviation: float = 0.0) -> _Tensor:
        chosen = next((kind for pattern, kind in recipe.types.items() if fnmatchcase(name, pattern)), GgmlType.F16)
        return _Tensor(name, chosen, (rows, columns), 0.0, deviation or columns**-0.5)

    def vector(name: str, size: int, mean: float, deviation: float) -> _Tensor:
        return _Tensor(name, GgmlType.F32, (size,), mean, deviation)

    def norm(name: str, size: int = width) -> _Tensor:
        return vector(name, size, 1.0, 0.1)

    # The scales keep logits within a few units, so that neither the softmax saturates nor every token is alike. Gemma
    # multiplies its embedding by sqrt(width): smaller numbers keep the blocks' part of the residual stream visible.
    gemma = recipe.architecture == "gemma3"
    yield matrix("token_embd.weight", recipe.vocab_size, width, 0.02 if gemma else 0.15)
    if recipe.rope_freqs:
        yield vector("rope_freqs.weight", recipe.head_dim // 2, 4.0, 1.0)
    for layer in range(recipe.n_layers):
        block = f"blk.{layer}"
        yield norm(f"{block}.attn_norm.weight")
        for letter, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield matrix(f"{block}.attn_{letter}.weight", rows, width)
            if recipe.has_bias:
                yield vector(f"{block}.attn_{letter}.bias", rows, 0.0, 0.2)
        if recipe.architecture in ("qwen3", "gemma3"):
            yield norm(f"{block}.attn_q_norm.weight", recipe.head_dim)
            yield norm(f"{block}.attn_k_norm.weight", recipe.head_dim)
        yield matrix(f"{block}.attn_output.weight", width, heads)
        if gemma:
            yield norm(f"{block}.post_attention_norm.weight")
        yield norm(f"{block}.ffn_norm.weight")
        yield matrix(f"{block}.ffn_gate.weight", recipe.ffn_width, width)
        yield matrix(f"{block}.ffn_up.weight", recipe.ffn_width, width)
        yield matrix(f"{block}.ffn_down.weight", width, recipe.ffn_width)
        if gemma:
            yield norm(f"{block}.post_ffw_norm.weight")
    yield vector("output_norm.weight", width, 7.0 if gemma and recipe.tied else 1.0, 0.1)
    if not recipe.tied:
        yield matrix("output.weight", recipe.vocab_size, width, 0.15)


def _content(tensor: _Tensor, recipe: Recipe, generator: np.random.Generator) -> NDArray[np.uint8]:
    """The tensor's bytes, ``uint8[rows, row_bytes]``."""
    rows, columns = int(np.prod(tensor.shape[:-1])), tensor.shape[-1]
    random = tensor.ggml_type is not GgmlType.F32 and (recipe.quick or not can_encode(tensor.ggml_type))
    if random:
        return random_blocks(tensor.ggml_type, rows, columns, generator, deviation=tensor.deviation)
    values = generator.normal(tensor.mean, tensor.deviation, (rows, columns)).astype(np.float32)
    if tensor.name == "rope_freqs.weight":
        values = np.maximum(values, 1)
    return encode(values, tensor.ggml_type)


def _write(path: Path, recipe: Recipe, metadata: Mapping[str, Any], tensors: list[_Tensor]) -> None:
    """One file: the header with every tensor announced, then their bytes one after the other."""
    from gguf import GGMLQuantizationType, GGUFWriter

    # The writer's own constructor would add the architecture's key to every part; only the first has it.
    writer = GGUFWriter(None, recipe.architecture)
    if "general.name" not in metadata:
        writer.kv_data[0].clear()
    for key, value in metadata.items():
        _add(writer, key, value)
    for tensor in tensors:
        shape = (*tensor.shape[:-1], row_bytes(tensor.ggml_type, tensor.shape[-1]))
        kind = GGMLQuantizationType(int(tensor.ggml_type))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        # Seeded by name, so that a tensor's numbers don't depend on the others.
        generator = np.random.default_rng([recipe.seed, *tensor.name.encode()])
        writer.write_tensor_data(_content(tensor, recipe, generator))
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a key with the value type that llama.cpp expects of it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, np.uint16):
        writer.add_uint16(key, int(value))
    elif isinstance(value, np.int32):
        writer.add_int32(key, int(value))
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
