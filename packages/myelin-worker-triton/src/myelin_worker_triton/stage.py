"""A stage on one device: weights in planes, scratch, keys and values in pages, and the launches of a step.

Knows nothing of Myelin: it needs torch, triton and numpy alone, so that it also runs in a benchmark on a bare machine.

A layer is five launches for a batch of single rows (of different sequences)::

    project     norm, quantise, queries + keys + values                        (+ the block before, normalised: Gemma)
    attend      norm and rotate heads, store the row, attention, quantise
    project     attention output, add to the residual
    gate_up     norm, quantise, gate and up, activation, quantise
    project     down, add to the residual

Where rows of one sequence follow each other, ``store_rows`` comes before ``attend``; where there are many rows and
results may depend on it, the projections become tiled matrix products (``kernels/prefill.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from myelin_worker_triton import operators as op
from myelin_worker_triton.layouts import Plain
from myelin_worker_triton.planes import Matrix
from myelin_worker_triton.tuning import Tuning

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """What a stage needs to know of its model.

    Attributes:
        width, ffn_width, vocab_size: Sizes.
        heads: The attention heads.
        epsilon: Of every norm.
        gelu: The gate's function is GELU, not SiLU.
        qk_norm, post_norms: As in the model.
        windows: For each of the stage's layers, how many positions it sees; 0 is all.
        embedding_scale, final_softcap: As in the model.
        max_context, max_sequences, max_rows: What is reserved.
        kv_kind: ``f16``, ``f32`` or ``q8_0``.
    """

    width: int
    ffn_width: int
    vocab_size: int
    heads: op.HeadShape
    epsilon: float
    gelu: bool
    qk_norm: bool
    post_norms: bool
    windows: tuple[int, ...]
    embedding_scale: float
    final_softcap: float
    max_context: int
    max_sequences: int
    max_rows: int
    kv_kind: str = "f16"


@dataclass(slots=True)
class LayerWeights:
    """The tensors of a layer: matrices in planes, vectors in float32.

    Attributes:
        qkv: Queries, keys and values, one below the other in one to three matrices (neighbours of one type are one).
        matrices: ``attn_output``, ``ffn_gate``, ``ffn_up``, ``ffn_down``.
        vectors: ``attn_norm``, ``ffn_norm``, and where the model has them ``qkv_bias``, ``attn_q_norm``,
            ``attn_k_norm``, ``post_attention_norm``, ``post_ffw_norm``.
    """

    qkv: list[Matrix] = field(default_factory=list)
    matrices: dict[str, Matrix] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        vectors = sum(vector.numel() * vector.element_size() for vector in self.vectors.values())
        return vectors + sum(matrix.nbytes for matrix in (*self.qkv, *self.matrices.values()))


@dataclass(slots=True)
class Weights:
    """Of a stage: ``embedding`` for a head; ``output_norm`` and ``output`` for a tail."""

    layers: list[LayerWeights]
    embedding: Matrix | None = None
    output: Matrix | None = None
    output_norm: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held; a matrix that is both embedding and output counts once."""
        total = sum(layer.nbytes for layer in self.layers)
        shared = {id(matrix): matrix.nbytes for matrix in (self.embedding, self.output) if matrix is not None}
        norm = self.output_norm.numel() * 4 if self.output_norm is not None else 0
        return total + sum(shared.values()) + norm


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch on the host: for each row its position and its sequence's slot.

    Attributes:
        counts: Rows of each sequence, one sequence after the other.
    """

    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    counts: tuple[int, ...]

    @property
    def single(self) -> bool:
        """Every row is of another sequence."""
        return all(count == 1 for count in self.counts)

    def runs(self, size: int) -> NDArray[np.int32]:
        """Rows following each other in a sequence, at most ``size`` together: first and number, ``int32[2, runs]``."""
        found: list[tuple[int, int]] = []
        first = 0
        for count in self.counts:
            found += [(first + at, min(size, count - at)) for at in range(0, count, size)]
            first += count
        return np.ascontiguousarray(np.array(found, np.int32).T)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Scratch of tiled products."""

    normal: op.Halves
    attended: op.Halves
    gated: op.Halves
    up: Tensor

    @classmethod
    def of(cls, shape: Shape, device: torch.device) -> Tiles:
        """For as many rows as a batch may have."""
        rows = scratch_rows(shape)
        return cls(
            op.Halves.of(rows, shape.width, device),
            op.Halves.of(rows, shape.heads.output, device),
            op.Halves.of(rows, shape.ffn_width, device),
            torch.zeros((rows, op.padded(shape.ffn_width)), dtype=torch.float32, device=device),
        )


def rope_tables(
    positions: int, dims: int, base: float, scale: float, factors: NDArray[np.float32] | None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines of ``p * scale * base^(-2i/dims) / factors[i]``, ``float32[positions, dims / 2]`` each, the
    angles taken in float64."""
    frequencies = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    if factors is not None:
        frequencies = frequencies / factors.astype(np.float64)
    angles = np.arange(positions, dtype=np.float64)[:, None] * scale * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def pages_of(tuning: Tuning, shape: Shape) -> int:
    """Pages that one sequence may need."""
    return -(-shape.max_context // tuning.page)


def splits_of(tuning: Tuning, positions: int) -> int:
    """Splits of a context of so many positions."""
    return max(1, -(-positions // (tuning.page * tuning.pages_a_split)))


def cache_bytes(tuning: Tuning, shape: Shape) -> int:
    """Bytes of all pages of all layers."""
    heads = shape.heads
    per_element = {"f16": 2.0, "f32": 4.0, "q8_0": 1.0 + 2.0 / 32}[shape.kv_kind]
    positions = shape.max_sequences * pages_of(tuning, shape) * tuning.page
    return int(len(shape.windows) * positions * heads.kv_heads * (heads.head + heads.value) * per_element)


def scratch_rows(shape: Shape) -> int:
    """Rows of the scratch buffers: whole launches of the projections."""
    return -(-shape.max_rows // op.MOST_COLUMNS) * op.MOST_COLUMNS


def scratch_bytes(tuning: Tuning, shape: Shape) -> int:
    """Bytes of scratch, splits of attention included."""
    heads, rows = shape.heads, scratch_rows(shape)
    row = 4 * (3 * shape.width + heads.row)
    sizes = [op.padded(size) for size in (shape.width, heads.output, shape.ffn_width)]
    row += sum(5 * size + size // 4 for size in sizes) + 2 * sum(sizes) + 4 * sizes[-1]
    splits = splits_of(tuning, shape.max_context)
    attention = attention_rows(tuning, shape) * op.Splits.row_bytes(tuning, heads, splits)
    angles = 2 * 2 * 4 * shape.max_context * (heads.rope_dims // 2)
    return int(rows * row) + attention + angles + op.Partials.nbytes(tuning) + op.MOST_COLUMNS * 4 * shape.vocab_size


def attention_rows(tuning: Tuning, shape: Shape) -> int:
    """Rows of one attention launch: at least a decode's, and as many as fit into 64 MiB of scratch."""
    row = op.Splits.row_bytes(tuning, shape.heads, splits_of(tuning, shape.max_context))
    return max(op.MOST_COLUMNS, min(scratch_rows(shape), (64 << 20) // row))


class DeviceStage:
    """Runs the stage's layers.

    Args:
        tuning, shape, weights: What it is.
        angles: Cosines and sines of global layers, and of those with a window.
        device: Where everything is.
    """

    def __init__(
        self,
        tuning: Tuning,
        shape: Shape,
        weights: Weights,
        angles: tuple[op.Angles, op.Angles],
        device: torch.device | str,
    ) -> None:
        self.tuning, self.shape, self.weights, self.angles = tuning, shape, weights, angles
        self.device = torch.device(device)
        self._tiles: Tiles | None = None
        rows, heads = scratch_rows(shape), shape.heads
        floats: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        self.x = torch.zeros((rows, shape.width), **floats)
        self._other = torch.zeros((rows, shape.width), **floats) if shape.post_norms else self.x
        self._block = torch.zeros((rows, shape.width), **floats) if shape.post_norms else self.x
        self._qkv = torch.zeros((rows, heads.row), **floats)
        self._normal = op.Activations.of(rows, shape.width, self.device)
        self._attended = op.Activations.of(rows, heads.output, self.device)
        self._gated = op.Activations.of(rows, shape.ffn_width, self.device)
        self._splits = op.Splits.of(
            tuning, heads, attention_rows(tuning, shape), splits_of(tuning, shape.max_context), self.device
        )
        self._partials = op.Partials.of(tuning, self.device)
        self.tokens = torch.zeros(rows, **ints)
        pages = pages_of(tuning, shape)
        self.places = op.Places(
            torch.zeros(rows, **ints),
            torch.zeros(rows, **ints),
            torch.zeros((shape.max_sequences, pages), **ints),
        )
        self._caches = [self._layer_cache(pages * shape.max_sequences) for _ in shape.windows]

    def _layer_cache(self, pages: int) -> op.LayerCache:
        heads, kind, page = self.shape.heads, self.shape.kv_kind, self.tuning.page
        dtype = {"f16": torch.float16, "f32": torch.float32, "q8_0": torch.int8}[kind]
        shape = (pages, heads.kv_heads, page)
        scaled = kind == "q8_0"
        keys = torch.zeros((*shape, heads.head), dtype=dtype, device=self.device)
        values = torch.zeros((*shape, heads.value), dtype=dtype, device=self.device)
        half: dict[str, Any] = {"dtype": torch.float16, "device": self.device}
        return op.LayerCache(
            kind,
            keys,
            values,
            torch.zeros((*shape, heads.head // 32) if scaled else 1, **half),
            torch.zeros((*shape, heads.value // 32) if scaled else 1, **half),
        )

    def upload(self, rows: Rows, tokens: NDArray[np.int32] | None, hidden: NDArray[np.float32] | None) -> None:
        """Put a batch's input where the launches read it."""
        count = len(rows.positions)
        self.places.positions[:count].copy_(torch.from_numpy(rows.positions))
        self.places.slots[:count].copy_(torch.from_numpy(rows.slots))
        if tokens is not None:
            self.tokens[:count].copy_(torch.from_numpy(np.ascontiguousarray(tokens)))
        if hidden is not None:
            self.x[:count].copy_(torch.from_numpy(np.ascontiguousarray(hidden)))

    def assign_pages(self, slot: int, pages: NDArray[np.int32]) -> None:
        """List the pages of a slot's sequence."""
        self.places.pages[slot, : len(pages)].copy_(torch.from_numpy(pages))

    def run(self, count: int, splits: int, *, single: bool) -> None:
        """Run every layer over the first ``count`` rows by the decode kernels; the result is in :attr:`x`.

        Args:
            splits: No row's context has more splits.
            single: Every row is of another sequence.
        """
        self._embed(count)
        pending: Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            pending = self._layer(index, layer, pending, count, splits, single)
        if pending is not None:
            self._finish_block(pending, count)

    def run_tiled(self, rows: Rows) -> None:
        """The same by tiled products: for many rows, where results may depend on that."""
        count = len(rows.positions)
        runs = torch.from_numpy(rows.runs(self.tuning.prefill_run)).to(self.device)
        listed = op.Runs(runs[0], runs[1], self.tuning.prefill_run)
        if self._tiles is None:
            self._tiles = Tiles.of(self.shape, self.device)
        self._embed(count)
        for index, layer in enumerate(self.weights.layers):
            self._tiled_layer(index, layer, count, listed, self._tiles)

    def _embed(self, count: int) -> None:
        embedding = self.weights.embedding
        if embedding is not None:
            op.launch_embed(self.tuning, self.tokens[:count], embedding, self.shape.embedding_scale, self.x[:count])

    def _tiled_layer(self, index: int, layer: LayerWeights, count: int, runs: op.Runs, tiles: Tiles) -> None:
        tuning, shape, m, v = self.tuning, self.shape, layer.matrices, layer.vectors
        op.launch_half_rows(tuning, self.x, tiles.normal, count, norm=v["attn_norm"], epsilon=shape.epsilon)
        at = 0
        bias = v.get("qkv_bias")
        for matrix in layer.qkv:
            own = slice(at, at + matrix.rows)
            part = bias[own] if bias is not None else None
            op.launch_tiled(tuning, tiles.normal, matrix, self._qkv[:, own], count, bias=part)
            at += matrix.rows
        window = shape.windows[index]
        op.launch_attend_runs(
            tuning,
            shape.heads,
            self._qkv[:count],
            self.places.rows(0, count),
            runs,
            self._caches[index],
            self.angles[1 if window else 0],
            self._norms(layer),
            self._attended.plain,
            window=window,
        )
        op.launch_half_rows(tuning, self._attended.plain, tiles.attended, count)
        self._tiled_block(tiles.attended, m["attn_output"], v.get("post_attention_norm"), count)
        op.launch_half_rows(tuning, self.x, tiles.normal, count, norm=v["ffn_norm"], epsilon=shape.epsilon)
        op.launch_tiled(tuning, tiles.normal, m["ffn_gate"], self._gated.plain, count)
        op.launch_tiled(tuning, tiles.normal, m["ffn_up"], tiles.up, count)
        op.launch_half_rows(tuning, self._gated.plain, tiles.gated, count, up=tiles.up, gelu=shape.gelu)
        self._tiled_block(tiles.gated, m["ffn_down"], v.get("post_ffw_norm"), count)

    def _tiled_block(self, x: op.Halves, matrix: Matrix, post: Tensor | None, count: int) -> None:
        """A block's last product, normalised or not, added to the residual stream."""
        if post is None:
            op.launch_tiled(self.tuning, x, matrix, self.x, count, add=True)
        else:
            op.launch_tiled(self.tuning, x, matrix, self._block, count)
            self._finish_block(post, count)

    def _norms(self, layer: LayerWeights) -> op.HeadNorms | None:
        if not self.shape.qk_norm:
            return None
        return op.HeadNorms(layer.vectors["attn_q_norm"], layer.vectors["attn_k_norm"])

    def _finish_block(self, weight: Tensor, count: int) -> None:
        """``x += rms_norm(block) * weight``."""
        x, y, out = self.x[:count], self._block[:count], self._other[:count]
        op.launch_add_normalised(self.tuning, x, y, weight, out, self.shape.epsilon)
        self.x, self._other = self._other, self.x

    def _layer(
        self,
        index: int,
        layer: LayerWeights,
        pending: Tensor | None,
        count: int,
        splits: int,
        single: bool,
    ) -> Tensor | None:
        """One layer. ``pending`` is the weight of a norm over :attr:`_block` that is still to be added; so is what it
        returns."""
        m, v = layer.matrices, layer.vectors
        qkv, bias = tuple(layer.qkv), v.get("qkv_bias")
        self._project(qkv, self._normal, self._qkv, count, norm=v["attn_norm"], pending=pending, bias=bias)
        self._attention(index, layer, count, splits, single)
        target, add = (self._block, False) if self.shape.post_norms else (self.x, True)
        self._project((m["attn_output"],), self._attended, target, count, add=add)
        pending = v.get("post_attention_norm")
        self._gate_up(m["ffn_gate"], m["ffn_up"], v["ffn_norm"], m["ffn_down"], pending, count)
        target, add = (self._block, False) if self.shape.post_norms else (self.x, True)
        self._project((m["ffn_down"],), self._gated, target, count, add=add)
        return v.get("post_ffw_norm")

    def _prologue(self, norm: Tensor, pending: Tensor | None, first: int, count: int) -> op.Prologue:
        rows = slice(first, first + count)
        if pending is None:
            return op.Prologue(self.x[rows], norm, self.shape.epsilon)
        y, out = self._block[rows], self._other[rows]
        return op.Prologue(self.x[rows], norm, self.shape.epsilon, y, pending, out)

    def _project(
        self,
        matrices: tuple[Matrix, ...],
        activations: op.Activations,
        out: Tensor,
        count: int,
        *,
        norm: Tensor | None = None,
        pending: Tensor | None = None,
        bias: Tensor | None = None,
        add: bool = False,
    ) -> None:
        for first, columns in column_blocks(count):
            op.launch_project(
                self.tuning,
                activations.rows(first, columns),
                matrices,
                out[first : first + columns],
                columns=columns,
                prologue=self._prologue(norm, pending, first, columns) if norm is not None else None,
                bias=bias,
                add=add,
                partials=self._partials,
            )
        if pending is not None:
            self.x, self._other = self._other, self.x

    def _gate_up(
        self,
        gate: Matrix,
        up: Matrix,
        norm: Tensor,
        down: Matrix,
        pending: Tensor | None,
        count: int,
    ) -> None:
        for first, columns in column_blocks(count):
            op.launch_gate_up(
                self.tuning,
                self._normal.rows(first, columns),
                gate,
                up,
                self._gated.rows(first, columns),
                self._prologue(norm, pending, first, columns),
                columns=columns,
                gelu=self.shape.gelu,
                quantise=down.layout.plain is Plain.NO,
            )
        if pending is not None:
            self.x, self._other = self._other, self.x

    def _attention(self, index: int, layer: LayerWeights, count: int, splits: int, single: bool) -> None:
        window = self.shape.windows[index]
        angles = self.angles[1 if window else 0]
        norms, cache, heads = self._norms(layer), self._caches[index], self.shape.heads
        if not single:
            op.launch_store_rows(
                self.tuning, heads, self._qkv[:count], self.places.rows(0, count), cache, angles, norms
            )
        for first in range(0, count, self._splits.rows):
            rows = min(self._splits.rows, count - first)
            op.launch_attend(
                self.tuning,
                heads,
                self._qkv[first : first + rows],
                self.places.rows(first, rows),
                cache,
                angles,
                norms,
                self._splits,
                self._attended.rows(first, rows),
                window=window,
                splits=splits,
                store=single,
            )

    def logits(self, rows: Tensor) -> Tensor:
        """``float32[k, vocab_size]`` of the rows with these indices (``int64[k]``)."""
        output, norm = self.weights.output, self.weights.output_norm
        assert output is not None
        assert norm is not None
        count = int(rows.shape[0])
        padded = -(-count // op.MOST_COLUMNS) * op.MOST_COLUMNS
        x = torch.zeros((padded, self.shape.width), dtype=torch.float32, device=self.device)
        x[:count] = self.x[rows]
        result = torch.empty((padded, self.shape.vocab_size), dtype=torch.float32, device=self.device)
        for first, columns in column_blocks(count):
            op.launch_project(
                self.tuning,
                self._normal.rows(0, columns),
                (output,),
                result[first : first + columns],
                columns=columns,
                prologue=op.Prologue(x[first : first + columns], norm, self.shape.epsilon),
                softcap=self.shape.final_softcap,
                partials=self._partials,
            )
        return result[:count]


def column_blocks(count: int) -> list[tuple[int, int]]:
    """Rows cut into launches of 1, 2, 4 or 8 columns: first row and columns; the last may go beyond ``count``."""
    blocks = [(first, op.MOST_COLUMNS) for first in range(0, count - count % op.MOST_COLUMNS, op.MOST_COLUMNS)]
    rest = count % op.MOST_COLUMNS
    if rest:
        blocks.append((count - rest, op.power_of_two(rest)))
    return blocks
