"""The engine: Myelin's contract over :class:`~myelin_worker_triton.stage.DeviceStage`. See ``README.md`` for the
outline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from myelin.engine_api import (
    Activation,
    EngineError,
    EngineOptions,
    Hyperparameters,
    LayerRole,
    LoadReport,
    ModelRole,
    Progress,
    RopeStyle,
    Sample,
    Segment,
    SequenceId,
    ShardReader,
    StageBatch,
    StageOutput,
    layer_roles,
    layer_tensor,
    output_tensor,
)
from myelin_worker_triton import operators as op
from myelin_worker_triton.graphs import Graphs
from myelin_worker_triton.interpreting import speed_up
from myelin_worker_triton.loading import load_floats, load_matrix, planned_bytes
from myelin_worker_triton.planes import Matrix
from myelin_worker_triton.sampling import drawn
from myelin_worker_triton.slots import Slots
from myelin_worker_triton.stage import (
    DeviceStage,
    LayerWeights,
    Rows,
    Shape,
    Weights,
    cache_bytes,
    pages_of,
    rope_tables,
    scratch_bytes,
    splits_of,
)
from myelin_worker_triton.support import ARCHITECTURES, SUPPORTED_TYPES
from myelin_worker_triton.tuning import Tuning, interpreted, tuning_here

_VECTORS = {
    LayerRole.ATTENTION_NORM: "attn_norm",
    LayerRole.QUERY_NORM: "attn_q_norm",
    LayerRole.KEY_NORM: "attn_k_norm",
    LayerRole.POST_ATTENTION_NORM: "post_attention_norm",
    LayerRole.FFN_NORM: "ffn_norm",
    LayerRole.POST_FFN_NORM: "post_ffw_norm",
}
_MATRICES = {
    LayerRole.ATTENTION_OUTPUT: "attn_output",
    LayerRole.FFN_GATE: "ffn_gate",
    LayerRole.FFN_UP: "ffn_up",
    LayerRole.FFN_DOWN: "ffn_down",
}
_QKV = (LayerRole.QUERY, LayerRole.KEY, LayerRole.VALUE)
_BIASES = (LayerRole.QUERY_BIAS, LayerRole.KEY_BIAS, LayerRole.VALUE_BIAS)


class TritonEngine:
    """See :class:`myelin.engine_api.Engine`.

    Args:
        options: ``threads`` means nothing here; ``kv_dtype`` may also be ``q8_0``.
        tuning: How kernels are specialised; by default for this machine's device.
        invariant: Rows give the same bits however they are batched, as the contract demands, prompts included. Without
            it, prompts go through tiled matrix products, which are faster and round differently.
    """

    def __init__(self, options: EngineOptions, *, tuning: Tuning | None = None, invariant: bool = True) -> None:
        if options.kv_dtype not in op.KV_KINDS:
            raise EngineError(
                f"keys and values cannot be kept as '{options.kv_dtype}'",
                f"Use {', '.join(op.KV_KINDS)}.",
                reason="kv-dtype",
            )
        self._device = _device()
        self._options = options
        self._tuning = tuning or tuning_here()
        self._invariant = invariant
        self._shard: ShardReader | None = None
        self._stage: DeviceStage | None = None
        self._slots: Slots | None = None
        self._graphs: Graphs | None = None

    def load(self, shard: ShardReader, progress: Progress) -> LoadReport:
        """See :meth:`myelin.engine_api.Engine.load`."""
        began = time.perf_counter()
        parameters = shard.parameters
        self._check_model(shard)
        shape = self._shape(shard)
        weight_bytes, kv_bytes = planned_bytes(shard), cache_bytes(self._tuning, shape)
        self._check_memory(weight_bytes, kv_bytes, scratch_bytes(self._tuning, shape))
        try:
            weights, factors = self._load_weights(shard, progress)
            stage = DeviceStage(
                self._tuning,
                shape,
                weights,
                self._angles(parameters, factors),
                self._device,
            )
        except torch.OutOfMemoryError as error:
            raise EngineError(
                "the stage does not fit into the GPU's memory",
                "Use more stages, a shorter context, or fewer sequences.",
                reason="memory",
            ) from error
        self._shard, self._stage = shard, stage
        self._slots = Slots(self._options, self._tuning.page, pages_of(self._tuning, shape))
        self._graphs = Graphs(stage) if self._device.type == "cuda" else None
        if self._device.type == "cuda":
            progress("compile", 0, 1)
            self._warm_up(stage)
            progress("compile", 1, 1)
        return LoadReport(weights.nbytes, kv_bytes, time.perf_counter() - began)

    def step(self, batch: StageBatch) -> StageOutput:
        """See :meth:`myelin.engine_api.Engine.step`."""
        stage, slots, shard = self._stage, self._slots, self._shard
        if stage is None or slots is None or shard is None:
            raise EngineError("the engine has loaded no stage", reason="not-loaded")
        count = sum(segment.count for segment in batch.segments)
        self._check_batch(batch, count, shard)
        slots.check(batch.segments)
        for slot, pages in slots.begin(batch.segments):
            stage.assign_pages(slot, pages)
        rows = _rows(batch.segments, slots)
        tokens = batch.tokens if shard.stage.is_head else None
        stage.upload(rows, tokens, None if shard.stage.is_head else batch.hidden)
        splits = splits_of(self._tuning, int(rows.positions.max()) + 1)
        if not self._invariant and count >= self._tuning.prefill_rows and not rows.single:
            stage.run_tiled(rows)
        elif self._graphs is not None and rows.single and count <= op.MOST_COLUMNS:
            self._graphs.run(count, splits)
        else:
            stage.run(count, splits, single=rows.single)
        if not shard.stage.is_tail:
            return StageOutput(hidden=stage.x[:count].cpu().numpy())
        return self._output(batch, stage)

    def release(self, sequence: SequenceId) -> None:
        """See :meth:`myelin.engine_api.Engine.release`."""
        if self._slots is not None:
            self._slots.release(sequence)

    def close(self) -> None:
        """See :meth:`myelin.engine_api.Engine.close`."""
        self._stage = self._slots = self._shard = self._graphs = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # Loading ----------------------------------------------------------------------------------------------------------

    def _check_model(self, shard: ShardReader) -> None:
        parameters = shard.parameters
        if parameters.architecture not in ARCHITECTURES:
            raise EngineError(
                f"the Triton engine does not compute models of architecture '{parameters.architecture}'",
                f"It computes {', '.join(sorted(ARCHITECTURES))}.",
                reason="architecture",
            )
        for name in shard.names:
            info = shard.info(name)
            if len(info.shape) > 1 and info.ggml_type not in SUPPORTED_TYPES:
                raise EngineError(
                    f"the Triton engine has no kernel for type {info.ggml_type.name} (tensor '{name}')",
                    "Use another quantization of the model, or the engine 'reference'.",
                    reason="unsupported-type",
                )
        if parameters.head_dim % 32 or parameters.value_dim % 32:
            raise EngineError(
                f"heads of {parameters.head_dim} and {parameters.value_dim} elements are not whole groups of 32",
                "Use the engine 'cpu' for this model.",
                reason="head-size",
            )

    def _check_memory(self, weights: int, cache: int, scratch: int) -> None:
        bound = self._options.memory_bytes
        total = weights + cache + scratch
        if bound and total > bound:
            raise EngineError(
                f"the stage needs {total:,} bytes ({weights:,} of weights, {cache:,} of keys and values, {scratch:,} "
                f"of scratch), but may use {bound:,}",
                "Use more stages, a shorter context, or fewer sequences.",
                reason="memory",
            )

    def _shape(self, shard: ShardReader) -> Shape:
        p, stage = shard.parameters, shard.stage
        heads = op.HeadShape(
            n_heads=p.n_heads,
            kv_heads=p.n_kv_heads,
            head=p.head_dim,
            value=p.value_dim,
            rope_dims=p.rope_dims,
            halves=p.rope_style is RopeStyle.HALVES,
            epsilon=p.norm_epsilon,
            scale=p.attention_scale,
        )
        return Shape(
            width=p.width,
            ffn_width=p.ffn_width,
            vocab_size=p.vocab_size,
            heads=heads,
            epsilon=p.norm_epsilon,
            gelu=p.activation is Activation.GELU_TANH,
            qk_norm=p.qk_norm,
            post_norms=p.post_norms,
            windows=tuple(p.sliding_window[stage.first_layer : stage.end_layer]),
            embedding_scale=p.embedding_scale,
            final_softcap=p.final_softcap,
            max_context=self._options.max_context,
            max_sequences=self._options.max_sequences,
            max_rows=self._options.max_batch_tokens,
            kv_kind=self._options.kv_dtype,
        )

    def _load_weights(self, shard: ShardReader, progress: Progress) -> tuple[Weights, NDArray[np.float32] | None]:
        parameters, stage = shard.parameters, shard.stage
        total, done = shard.total_bytes, 0
        progress("load", 0, total)

        def matrix(*names: str) -> Matrix:
            nonlocal done
            found = load_matrix(shard, names, self._device)
            done += sum(shard.info(name).nbytes for name in names)
            progress("load", done, total)
            return found

        def vector(name: str) -> torch.Tensor:
            nonlocal done
            done += shard.info(name).nbytes
            progress("load", done, total)
            return torch.from_numpy(load_floats(shard, name)).to(self._device)

        layers = []
        for number in range(stage.first_layer, stage.end_layer):
            layer = LayerWeights()
            for role in layer_roles(parameters):
                name = layer_tensor(number, role)
                if role in _MATRICES:
                    layer.matrices[_MATRICES[role]] = matrix(name)
                elif role in _VECTORS:
                    layer.vectors[_VECTORS[role]] = vector(name)
            for names in _alike(shard, number):
                layer.qkv.append(matrix(*names))
            if parameters.qkv_bias:
                biases = [vector(layer_tensor(number, role)) for role in _BIASES]
                layer.vectors["qkv_bias"] = torch.cat(biases)
            layers.append(layer)
        weights = Weights(layers)
        output = output_tensor(parameters)
        if stage.is_head:
            weights.embedding = matrix(ModelRole.TOKEN_EMBEDDING.value)
        if stage.is_tail:
            shared = stage.is_head and output == ModelRole.TOKEN_EMBEDDING.value
            weights.output = weights.embedding if shared else matrix(output)
            weights.output_norm = vector(ModelRole.OUTPUT_NORM.value)
        factors = None
        if parameters.rope_factors:
            factors = load_floats(shard, ModelRole.ROPE_FACTORS.value)
            done += shard.info(ModelRole.ROPE_FACTORS.value).nbytes
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        progress("load", total, total)
        return weights, factors

    def _angles(self, parameters: Hyperparameters, factors: NDArray[np.float32] | None) -> tuple[op.Angles, op.Angles]:
        def tables(base: float, scale: float) -> op.Angles:
            cosines, sines = rope_tables(self._options.max_context, parameters.rope_dims, base, scale, factors)
            return op.Angles(torch.from_numpy(cosines).to(self._device), torch.from_numpy(sines).to(self._device))

        everywhere = tables(parameters.rope_base, parameters.rope_scale)
        if not any(parameters.sliding_window):
            return everywhere, everywhere
        return everywhere, tables(parameters.rope_base_local, parameters.rope_scale_local)

    def _warm_up(self, stage: DeviceStage) -> None:
        """Compile what a decode and a prompt need, on rows that nobody reads (slot 0, before it is anyone's)."""
        columns = 1
        while columns <= min(op.MOST_COLUMNS, self._options.max_batch_tokens, self._options.max_sequences):
            stage.run(columns, 1, single=True)
            columns *= 2
        stage.run(min(op.MOST_COLUMNS, self._options.max_batch_tokens), 1, single=False)
        torch.cuda.synchronize()

    # Stepping ---------------------------------------------------------------------------------------------------------

    def _check_batch(self, batch: StageBatch, count: int, shard: ShardReader) -> None:
        if not batch.segments or count > self._options.max_batch_tokens:
            raise EngineError(
                f"a batch of {count} rows, where 1 to {self._options.max_batch_tokens} are possible", reason="batch"
            )
        parameters = shard.parameters
        if shard.stage.is_head:
            if batch.tokens is None or batch.tokens.shape != (count,):
                raise EngineError(f"the head needs {count} token ids", reason="batch")
            if int(batch.tokens.min()) < 0 or int(batch.tokens.max()) >= parameters.vocab_size:
                raise EngineError(f"a token id is outside the vocabulary of {parameters.vocab_size:,}", reason="token")
        elif batch.hidden is None or batch.hidden.shape != (count, parameters.width):
            raise EngineError(f"the stage needs hidden states of shape ({count}, {parameters.width})", reason="batch")

    def _output(self, batch: StageBatch, stage: DeviceStage) -> StageOutput:
        """Logits of the rows that want them, and a token for each segment that wants one."""
        asking = [(segment, last) for segment, last in _last_rows(batch.segments) if segment.output]
        count = sum(segment.count for segment in batch.segments)
        wanted = list(range(count)) if batch.want_all_logits else [last for _, last in asking]
        wants_logits = batch.want_logits or batch.want_all_logits
        if not wanted:
            empty = np.empty((0, stage.shape.vocab_size), np.float32)
            return StageOutput(logits=empty if wants_logits else None)
        logits = stage.logits(torch.tensor(wanted, device=self._device))
        samples = self._samples(logits, asking, {row: number for number, row in enumerate(wanted)})
        host = logits.cpu().numpy() if wants_logits else None
        return StageOutput(samples=samples, logits=host)

    def _samples(
        self, logits: torch.Tensor, asking: Sequence[tuple[Segment, int]], index: Mapping[int, int]
    ) -> tuple[Sample, ...]:
        """A token for each segment that asks, chosen on the GPU; ``index`` tells where a row's logits are."""
        if not asking:
            return ()
        chosen = logits[[index[last] for _, last in asking]] if len(asking) < len(logits) else logits
        best, logprobs = op.launch_choose(self._tuning, chosen)
        tokens = best.long()
        hot = [number for number, (segment, _) in enumerate(asking) if segment.sampling.temperature > 0]
        if hot:
            which = torch.tensor(hot, device=logits.device)
            segments = [asking[number][0] for number in hot]
            places = [segment.start + segment.count for segment in segments]
            taken = drawn(chosen[which], [segment.sampling for segment in segments], places)
            lost = chosen[which, taken] - chosen[which, tokens[which]]
            logprobs[which] += lost
            tokens[which] = taken
        found = zip(asking, tokens.cpu().tolist(), logprobs.cpu().tolist(), strict=True)
        return tuple(
            Sample(segment.sequence, segment.start + segment.count, int(token), float(logprob))
            for (segment, _), token, logprob in found
        )


def _device() -> torch.device:
    if interpreted():
        speed_up()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EngineError(
            "there is no GPU that PyTorch can use on this machine",
            "Use the engine 'cpu', or install PyTorch with support for this machine's GPU.",
            reason="no-gpu",
        )
    return torch.device("cuda", torch.cuda.current_device())


def _alike(shard: ShardReader, layer: int) -> list[list[str]]:
    """The tensors of queries, keys and values, neighbours of one type together: those become one matrix."""
    groups: list[list[str]] = []
    for role in _QKV:
        name = layer_tensor(layer, role)
        if groups and shard.info(groups[-1][0]).ggml_type is shard.info(name).ggml_type:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _last_rows(segments: tuple[Segment, ...]) -> Iterator[tuple[Segment, int]]:
    """Each segment with the index of its last row in the batch."""
    end = 0
    for segment in segments:
        end += segment.count
        yield segment, end - 1


def _rows(segments: tuple[Segment, ...], slots: Slots) -> Rows:
    positions = np.concatenate(
        [np.arange(segment.start, segment.start + segment.count, dtype=np.int32) for segment in segments]
    )
    numbers = np.concatenate(
        [np.full(segment.count, slots.slot(segment.sequence), dtype=np.int32) for segment in segments]
    )
    return Rows(positions, numbers, tuple(segment.count for segment in segments))
