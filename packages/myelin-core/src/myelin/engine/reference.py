"""The reference engine: NumPy, ``float32``, slow and obvious. Every other engine is measured against it.

Weights are dequantized by the ``gguf`` package, of whichever type it knows. The formulas are those of
:mod:`myelin.engine.formulas`; which of them a family uses is said by
:class:`~myelin.model.architecture.Hyperparameters`. A layer is::

    x += post_attention_norm?( attn_output( attention( rope(q_norm?(q)), rope(k_norm?(k)), v ) ) )   of attn_norm(x)
    x += post_ffw_norm?( ffn_down( act(ffn_gate) * ffn_up ) )                                       of ffn_norm(x)

and the tail adds ``output(output_norm(x))``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from myelin.engine.contract import (
    EngineOptions,
    LoadReport,
    Progress,
    Sample,
    Segment,
    StageBatch,
    StageOutput,
)
from myelin.engine.formulas import Floats, Tiles, activate, attend, rms_norm, rope_angles, rotate, softcap
from myelin.engine.kvcache import SlotCache
from myelin.engine.sampling import choose
from myelin.errors import EngineError
from myelin.model.quant import GgmlType
from myelin.model.shard import ShardReader
from myelin.values import SequenceId

REFERENCE_TYPES = frozenset(
    {
        *(GgmlType.F32, GgmlType.F16, GgmlType.BF16),
        *(GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q5_0, GgmlType.Q5_1, GgmlType.Q8_0),
        *(GgmlType.Q2_K, GgmlType.Q3_K, GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q6_K),
        *(GgmlType.IQ1_S, GgmlType.IQ1_M, GgmlType.IQ2_XXS, GgmlType.IQ2_XS, GgmlType.IQ2_S),
        *(GgmlType.IQ3_XXS, GgmlType.IQ3_S, GgmlType.IQ4_NL, GgmlType.IQ4_XS),
        *(GgmlType.TQ1_0, GgmlType.TQ2_0, GgmlType.MXFP4),
    }
)
"""All types that hold weights and that the ``gguf`` package dequantizes."""

EMBEDDING = "token_embd.weight"
LOAD_ROWS = 4096
"""Rows dequantized at once, which bounds what loading needs beside the result."""


class ReferenceEngine:
    """See the module's text. ``options.threads`` is left to NumPy's own BLAS."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._shard: ShardReader | None = None
        self._layers: dict[int, dict[str, Floats]] = {}
        self._shared: dict[str, Floats] = {}
        self._cache: SlotCache | None = None

    def load(self, shard: ShardReader, progress: Progress) -> LoadReport:
        """Dequantize the stage's tensors. The embedding alone stays as it is: a step needs few of its rows."""
        began = time.perf_counter()
        stage, parameters = shard.stage, shard.parameters
        cache = SlotCache(parameters, stage.end_layer - stage.first_layer, self._options)
        output = EMBEDDING if parameters.tied_output else "output.weight"
        names = [name for name in shard.names if name != EMBEDDING or (stage.is_tail and output == EMBEDDING)]
        weight_bytes = sum(4 * int(np.prod(shard.info(name).shape)) for name in names)
        needed = weight_bytes + cache.nbytes
        if 0 < self._options.memory_bytes < needed:
            raise EngineError(
                f"the stage needs {needed:,} bytes dequantized, and may use {self._options.memory_bytes:,}",
                "use more stages, a shorter context, or an engine that keeps weights quantized",
                reason="out-of-memory",
            )

        total = sum(shard.info(name).nbytes for name in names)
        done = 0
        progress("load", done, total)
        for name in names:
            weight = _dequantized(shard, name)
            if name.startswith("blk."):
                _, layer, rest = name.split(".", 2)
                self._layers.setdefault(int(layer), {})[rest] = weight
            else:
                self._shared["output.weight" if name == output else name] = weight
            done += shard.info(name).nbytes
            progress("load", done, total)
        self._shard = shard
        self._cache = cache
        return LoadReport(weight_bytes, cache.nbytes, time.perf_counter() - began)

    def step(self, batch: StageBatch) -> StageOutput:
        """Run the stage's layers over a batch, row by row where rows could feel each other."""
        if self._shard is None or self._cache is None:
            raise EngineError("the engine has no stage loaded", reason="not-loaded")
        shard, cache = self._shard, self._cache
        stage = shard.stage
        rows = sum(segment.count for segment in batch.segments)
        if not batch.segments or rows > self._options.max_batch_tokens:
            raise EngineError(
                f"a batch of {rows} rows, where 1 to {self._options.max_batch_tokens} are possible", reason="batch-size"
            )
        cache.check(batch.segments)
        hidden = self._embed(shard, batch, rows) if stage.is_head else self._received(shard, batch, rows)

        cache.begin(batch.segments)
        starts = [np.arange(segment.start, segment.start + segment.count) for segment in batch.segments]
        positions = np.concatenate(starts).astype(np.int64)
        tiles = Tiles(positions)
        for layer in range(stage.first_layer, stage.end_layer):
            hidden = self._layer(shard, cache, layer, hidden, batch.segments, positions, tiles)
        cache.commit(batch.segments)
        return self._output(shard, batch, hidden, positions) if stage.is_tail else StageOutput(hidden=hidden)

    def release(self, sequence: SequenceId) -> None:
        """Forget a sequence."""
        if self._cache is not None:
            self._cache.release(sequence)

    def close(self) -> None:
        """Drop weights and cache."""
        self._layers.clear()
        self._shared.clear()
        self._shard = None
        self._cache = None

    def _embed(self, shard: ShardReader, batch: StageBatch, rows: int) -> Floats:
        """Rows of the token embedding, scaled."""
        if batch.tokens is None or batch.tokens.shape != (rows,):
            raise EngineError(f"the head needs {rows} token ids", reason="bad-batch")
        vocab_size = shard.parameters.vocab_size
        if ((batch.tokens < 0) | (batch.tokens >= vocab_size)).any():
            raise EngineError(f"a token id is outside the vocabulary of {vocab_size}", reason="bad-token")
        kind = shard.info(EMBEDDING).ggml_type
        looked_up = [_floats(shard.read_rows(EMBEDDING, int(token), 1), kind) for token in batch.tokens]
        return np.concatenate(looked_up) * np.float32(shard.parameters.embedding_scale)

    def _received(self, shard: ShardReader, batch: StageBatch, rows: int) -> Floats:
        """The residual stream that the stage before has sent."""
        width = shard.parameters.width
        if batch.hidden is None or batch.hidden.shape != (rows, width):
            raise EngineError(f"this stage needs hidden states of shape ({rows}, {width})", reason="bad-batch")
        return batch.hidden

    def _layer(
        self,
        shard: ShardReader,
        cache: SlotCache,
        layer: int,
        hidden: Floats,
        segments: tuple[Segment, ...],
        positions: NDArray[np.int64],
        tiles: Tiles,
    ) -> Floats:
        """One decoder block over ``float32[rows, width]``."""
        p = shard.parameters
        weight = self._layers[layer]

        def linear(name: str, rows: Floats) -> Floats:
            result = tiles.product(weight[f"{name}.weight"], rows)
            return result + weight[f"{name}.bias"] if f"{name}.bias" in weight else result

        def norm(name: str, rows: Floats) -> Floats:
            return rms_norm(rows, weight[f"{name}.weight"], p.norm_epsilon)

        # Attention.
        normal = norm("attn_norm", hidden)
        queries = linear("attn_q", normal).reshape(-1, p.n_heads, p.head_dim)
        keys = linear("attn_k", normal).reshape(-1, p.n_kv_heads, p.head_dim)
        values = linear("attn_v", normal).reshape(-1, p.n_kv_heads, p.value_dim)
        if p.qk_norm:
            queries, keys = norm("attn_q_norm", queries), norm("attn_k_norm", keys)
        window = p.sliding_window[layer]
        base, scale = (p.rope_base_local, p.rope_scale_local) if window else (p.rope_base, p.rope_scale)
        angles = rope_angles(positions, p.rope_dims, base, scale, self._shared.get("rope_freqs.weight"))
        queries, keys = rotate(queries, *angles, p.rope_style), rotate(keys, *angles, p.rope_style)

        attended = np.empty((len(hidden), p.n_heads * p.value_dim), np.float32)
        for segment, first in _with_first_rows(segments):
            own = slice(first, first + segment.count)
            held_keys, held_values = cache.append(layer - shard.stage.first_layer, segment, keys[own], values[own])
            for row in range(own.start, own.stop):
                end = segment.start + (row - first) + 1
                oldest = max(0, end - window) if window else 0
                seen = slice(oldest, end)
                attended[row] = attend(queries[row], held_keys[:, seen], held_values[:, seen], p.attention_scale)
        block = linear("attn_output", attended)
        hidden = hidden + (norm("post_attention_norm", block) if p.post_norms else block)

        # Feed-forward.
        normal = norm("ffn_norm", hidden)
        gated = activate(linear("ffn_gate", normal), p.activation) * linear("ffn_up", normal)
        block = linear("ffn_down", gated)
        return hidden + (norm("post_ffw_norm", block) if p.post_norms else block)

    def _output(
        self, shard: ShardReader, batch: StageBatch, hidden: Floats, positions: NDArray[np.int64]
    ) -> StageOutput:
        """The output head: logits of the rows that want them, and a token for each segment that wants one."""
        p = shard.parameters
        asking = [
            (segment, first + segment.count - 1)
            for segment, first in _with_first_rows(batch.segments)
            if segment.output
        ]
        rows = list(range(len(hidden))) if batch.want_all_logits else [row for _, row in asking]
        logits = np.empty((0, p.vocab_size), np.float32)
        if rows:
            normal = rms_norm(hidden[rows], self._shared["output_norm.weight"], p.norm_epsilon)
            product = Tiles(positions[rows]).product(self._shared["output.weight"], normal)
            logits = softcap(product, p.final_softcap)

        samples = []
        for segment, row in asking:
            position = segment.start + segment.count
            token, logprob = choose(logits[rows.index(row)], segment.sampling, position)
            samples.append(Sample(segment.sequence, position, token, logprob))
        wants_logits = batch.want_logits or batch.want_all_logits
        return StageOutput(samples=tuple(samples), logits=logits if wants_logits else None)


def _with_first_rows(segments: tuple[Segment, ...]) -> Iterator[tuple[Segment, int]]:
    """Each segment with the index of its first row in the batch."""
    first = 0
    for segment in segments:
        yield segment, first
        first += segment.count


def _floats(raw: NDArray[np.uint8], ggml_type: GgmlType) -> Floats:
    """Raw rows, ``uint8[rows, row_bytes]``, as ``float32[rows, columns]``."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        if ggml_type not in REFERENCE_TYPES:
            raise NotImplementedError
        return np.ascontiguousarray(dequantize(raw, GGMLQuantizationType(int(ggml_type))), dtype=np.float32)
    except (NotImplementedError, ValueError) as error:  # ValueError: an older gguf package has no such type
        raise EngineError(
            f"the reference engine cannot read tensors of type {ggml_type.name}",
            "use another quantization, or a newer gguf package",
            reason="unsupported-type",
        ) from error


def _dequantized(shard: ShardReader, name: str) -> Floats:
    """A whole tensor as ``float32`` of its own shape, dequantized piece by piece."""
    info = shard.info(name)
    rows = int(np.prod(info.shape[:-1]))
    result = np.empty((rows, info.shape[-1]), np.float32)
    for first in range(0, rows, LOAD_ROWS):
        count = min(LOAD_ROWS, rows - first)
        result[first : first + count] = _floats(shard.read_rows(name, first, count), info.ggml_type)
    return result.reshape(info.shape)
