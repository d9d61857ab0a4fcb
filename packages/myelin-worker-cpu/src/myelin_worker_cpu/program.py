"""From a stage's weights to the tables and buffers that the compiled stage runs on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from myelin.engine_api import Activation, EngineError, Hyperparameters, RopeStyle, StageSlice
from myelin_worker_cpu import records
from myelin_worker_cpu import tables as t
from myelin_worker_cpu.choice import CHUNK_TILES, NOTE_BYTES
from myelin_worker_cpu.formats import tiles
from myelin_worker_cpu.kernels import Kernels
from myelin_worker_cpu.kvcache import CacheLayout, padded
from myelin_worker_cpu.memory import aligned
from myelin_worker_cpu.row_ops import GELU_TANH, SILU
from myelin_worker_cpu.weights import LAYER_TENSORS, Matrix, Weights

ROWS_AT_ONCE = 128
"""Rows that go through all layers together; what is kept of each is small enough to stay in the processor's caches."""
OUTPUTS_AT_ONCE = 16

_ELEMENTS = {"F32": 1, "F16": 2, "BF16": 3}


class Program:
    """The tables of a stage (see :mod:`myelin_worker_cpu.tables`) and the memory that they point to.

    Attributes:
        rows_at_once: Rows of one compiled call at most.
        logits: ``float32[16, stride]``: those of the last call's output rows (tail only).
    """

    def __init__(
        self,
        parameters: Hyperparameters,
        stage: StageSlice,
        weights: Weights,
        kernels: Kernels,
        layout: CacheLayout,
        threads: int,
        sync: int,
        max_rows: int,
    ) -> None:
        self._parameters = parameters
        self._stage = stage
        self._weights = weights
        self._kernels = kernels
        self._kept: list[NDArray[np.uint8]] = []
        self.rows_at_once = min(ROWS_AT_ONCE, padded(max_rows, 16))
        self._threads = threads

        layers = stage.end_layer - stage.first_layer
        self.shape = np.zeros(t.SHAPE_SIZE, dtype=np.int64)
        self.constants = np.zeros(t.CONSTANTS_SIZE, dtype=np.float32)
        self._layers = np.zeros((layers, t.LAYER_SIZE), dtype=np.int64)
        self._matrices = np.zeros((layers * t.LAYER_MATRICES + 2, t.MATRIX_SIZE), dtype=np.int64)
        self.buffers = np.zeros(t.BUFFER_SIZE, dtype=np.int64)
        self.step = np.zeros(t.STEP_SIZE, dtype=np.int64)
        self.tokens = np.zeros(self.rows_at_once, dtype=np.int32)
        self.positions = np.zeros(self.rows_at_once, dtype=np.int64)
        self.segments = np.zeros((self.rows_at_once, t.SEGMENT_SIZE), dtype=np.int64)
        self.outputs = np.zeros(OUTPUTS_AT_ONCE, dtype=np.int64)
        self.output_segments = np.zeros((OUTPUTS_AT_ONCE, t.SEGMENT_SIZE), dtype=np.int64)
        self._narrowed = np.arange(OUTPUTS_AT_ONCE, dtype=np.int64)
        self.chosen = np.zeros(OUTPUTS_AT_ONCE, dtype=np.int64)
        self.logprobs = np.zeros(OUTPUTS_AT_ONCE, dtype=np.float64)
        self._turns = self._frequencies()
        self.logits = np.zeros((0, 0), dtype=np.float32)

        self._fill_constants()
        self._fill_shape(layers, layout)
        for index in range(layers):
            self._fill_layer(index)
        self._fill_ends(layers)
        self._fill_buffers()
        self._context = self._join(sync)

    @property
    def context(self) -> int:
        """The address of the context table, which is all that the compiled stage is given."""
        return int(self._context.ctypes.data)

    def use_threads(self, threads: int) -> None:
        """For the next step: all of them, or one."""
        self._context[t.THREADS] = threads

    # --- tables ------------------------------------------------------------------------------------------------------

    def _frequencies(self) -> NDArray[np.float64]:
        """Radians that each pair turns for each position: of global layers, and of local (sliding-window) ones."""
        parameters = self._parameters
        dims = parameters.rope_dims
        exponents = -2.0 * np.arange(dims // 2) / dims
        both = np.stack(
            [
                parameters.rope_base**exponents * parameters.rope_scale,
                parameters.rope_base_local**exponents * parameters.rope_scale_local,
            ]
        )
        factors = self._weights.vectors.get("rope_freqs.weight")
        if factors is not None:
            both[0] /= factors[: dims // 2]
        return np.ascontiguousarray(both)

    def _fill_constants(self) -> None:
        parameters = self._parameters
        self.constants[t.NORM_EPSILON] = parameters.norm_epsilon
        self.constants[t.ATTENTION_SCALE] = parameters.attention_scale
        self.constants[t.EMBEDDING_SCALE] = parameters.embedding_scale
        self.constants[t.SOFT_CAP] = parameters.final_softcap

    def _fill_shape(self, layers: int, layout: CacheLayout) -> None:
        parameters, shape = self._parameters, self.shape
        attended = parameters.n_heads * parameters.value_dim
        shape[t.LAYERS] = layers
        shape[t.WIDTH] = parameters.width
        shape[t.WIDTH_STRIDE] = _stride(parameters.width)
        shape[t.HEADS] = parameters.n_heads
        shape[t.KV_HEADS] = parameters.n_kv_heads
        shape[t.HEAD_DIM] = parameters.head_dim
        shape[t.HEAD_DIM_PADDED] = layout.head_dim
        shape[t.VALUE_DIM] = parameters.value_dim
        shape[t.VALUE_DIM_PADDED] = layout.value_dim
        shape[t.QUERY_STRIDE] = _stride(parameters.n_heads * parameters.head_dim)
        shape[t.KEY_STRIDE] = _stride(parameters.n_kv_heads * parameters.head_dim)
        shape[t.VALUE_STRIDE] = _stride(parameters.n_kv_heads * parameters.value_dim)
        shape[t.ATTENDED] = attended
        shape[t.ATTENDED_STRIDE] = _stride(attended)
        shape[t.FFN_WIDTH] = parameters.ffn_width
        shape[t.FFN_STRIDE] = _stride(parameters.ffn_width)
        shape[t.ROPE_DIMS] = parameters.rope_dims
        shape[t.ROPE_HALVES] = parameters.rope_style is RopeStyle.HALVES
        shape[t.GATE_KIND] = GELU_TANH if parameters.activation is Activation.GELU_TANH else SILU
        shape[t.IS_HEAD] = self._stage.is_head
        shape[t.IS_TAIL] = self._stage.is_tail
        shape[t.VOCABULARY] = parameters.vocab_size
        shape[t.LOGIT_STRIDE] = _stride(parameters.vocab_size)
        shape[t.KV_BLOCK_BYTES] = layout.block_bytes
        shape[t.KV_LAYER_BYTES] = layout.layer_bytes
        shape[t.KV_HEAD_BYTES] = layout.head_bytes
        shape[t.KV_VALUES] = layout.values_start
        shape[t.KV_KEY_SCALES] = layout.key_scales_start
        shape[t.KV_VALUE_SCALES] = layout.value_scales_start
        shape[t.ROPE_ROW_BYTES] = padded(parameters.rope_dims) * 4
        shape[t.ROPE_KIND_BYTES] = self.rows_at_once * shape[t.ROPE_ROW_BYTES]

    def _fill_layer(self, index: int) -> None:
        number = self._stage.first_layer + index
        row = self._layers[index]
        window = self._parameters.sliding_window[number]
        row[t.WINDOW] = window
        row[t.ROPE_KIND] = window > 0
        for place, name in (
            (t.ATTENTION_NORM, "attn_norm.weight"),
            (t.QUERY_BIAS, "attn_q.bias"),
            (t.KEY_BIAS, "attn_k.bias"),
            (t.VALUE_BIAS, "attn_v.bias"),
            (t.QUERY_NORM, "attn_q_norm.weight"),
            (t.KEY_NORM, "attn_k_norm.weight"),
            (t.POST_ATTENTION_NORM, "post_attention_norm.weight"),
            (t.FFN_NORM, "ffn_norm.weight"),
            (t.POST_FFN_NORM, "post_ffw_norm.weight"),
        ):
            vector = self._weights.vectors.get(f"blk.{number}.{name}")
            row[place] = 0 if vector is None else vector.ctypes.data
        needs = []
        for offset, name in enumerate(LAYER_TENSORS):
            matrix = self._matrix(f"blk.{number}.{name}.weight")
            self._fill_matrix(index * t.LAYER_MATRICES + offset, matrix)
            needs.append(_need(matrix))
        row[t.NEEDS_QKV] = needs[t.QUERY] | needs[t.KEY] | needs[t.VALUE]
        row[t.NEEDS_OUT] = needs[t.ATTENTION_OUT]
        row[t.NEEDS_FFN] = needs[t.FFN_GATE] | needs[t.FFN_UP]
        row[t.NEEDS_DOWN] = needs[t.FFN_DOWN]

    def _fill_ends(self, layers: int) -> None:
        embedding = layers * t.LAYER_MATRICES
        head = embedding + 1
        self.shape[t.EMBEDDING] = embedding
        self.shape[t.OUTPUT_HEAD] = head
        if self._stage.is_head:
            self._fill_matrix(embedding, self._matrix("token_embd.weight"))
        if self._stage.is_tail:
            name = "token_embd.weight" if self._parameters.tied_output else "output.weight"
            matrix = self._matrix(name)
            self._fill_matrix(head, matrix)
            self.shape[t.OUTPUT_NEEDS] = _need(matrix)
            self.shape[t.CHUNKS] = -(-tiles(matrix.rows) // CHUNK_TILES)
            self.shape[t.OUTPUT_NORM] = self._weights.vectors["output_norm.weight"].ctypes.data

    def _matrix(self, name: str) -> Matrix:
        matrix = self._weights.matrices.get(name)
        if matrix is None:
            raise EngineError(
                f"the stage has no matrix {name}", "The file is not a whole model.", reason="tensor-missing"
            )
        return matrix

    def _fill_matrix(self, index: int, matrix: Matrix) -> None:
        fmt, row = matrix.format, self._matrices[index]
        for place, width in zip((t.KERNEL_1, t.KERNEL_4, t.KERNEL_8, t.KERNEL_16), records.WIDTHS, strict=True):
            row[place] = self._kernels.matmul[fmt.ggml_type, width]
        describe_matrix(row, matrix)

    def _join(self, sync: int) -> NDArray[np.int64]:
        context = np.zeros(t.CONTEXT_SIZE, dtype=np.int64)
        for place, table in (
            (t.SHAPE, self.shape),
            (t.CONSTANTS, self.constants),
            (t.FREQUENCIES, self._turns),
            (t.LAYER_TABLE, self._layers),
            (t.MATRIX_TABLE, self._matrices),
            (t.BUFFERS, self.buffers),
            (t.STEP, self.step),
            (t.TOKENS, self.tokens),
            (t.POSITIONS, self.positions),
            (t.SEGMENT_TABLE, self.segments),
            (t.OUTPUT_ROWS, self.outputs),
            (t.OUTPUT_SEGMENTS, self.output_segments),
            (t.NARROWED_ROWS, self._narrowed),
            (t.CHOSEN, self.chosen),
            (t.LOGPROBS, self.logprobs),
        ):
            context[place] = table.ctypes.data
        context[t.SYNC] = sync
        context[t.THREADS] = self._threads
        context[t.LAYER_KERNEL] = self._kernels.layer
        context[t.REMEMBER_KERNEL] = self._kernels.remember
        context[t.ATTEND_KERNEL] = self._kernels.attend
        return context

    # --- memory ------------------------------------------------------------------------------------------------------

    def _fill_buffers(self) -> None:
        shape, rows = self.shape, padded(self.rows_at_once, 16)
        parameters = self._parameters
        widest = padded(max(parameters.width, parameters.n_heads * parameters.value_dim, parameters.ffn_width), 64)
        record_bytes = widest // 32 * records.RECORD_BYTES
        float_bytes = widest * 4
        for place, size in (
            (t.X, rows * shape[t.WIDTH_STRIDE]),
            (t.RECORDS, rows * record_bytes),
            (t.FLOATS, rows * float_bytes),
            (t.QUERIES, rows * shape[t.QUERY_STRIDE]),
            (t.KEYS, rows * shape[t.KEY_STRIDE]),
            (t.VALUES, rows * shape[t.VALUE_STRIDE]),
            (t.ATTENTION, rows * shape[t.ATTENDED_STRIDE]),
            (t.GATES, rows * shape[t.FFN_STRIDE]),
            (t.UPS, rows * shape[t.FFN_STRIDE]),
            (t.PROJECTED, rows * shape[t.WIDTH_STRIDE]),
            (t.ROPE, 2 * shape[t.ROPE_KIND_BYTES]),
        ):
            self.buffers[place] = self._allocate(int(size))
        offset = 0
        block = t.QUERY_BLOCK
        attention = block * (4 * shape[t.HEAD_DIM_PADDED] + 4 * shape[t.VALUE_DIM_PADDED])
        attention += block * (t.SCORE_STRIDE + t.STATE_STRIDE)
        for place, size in (
            (t.PRIVATE_X, shape[t.WIDTH_STRIDE]),
            (t.PRIVATE_RECORDS, record_bytes),
            (t.PRIVATE_FLOATS, float_bytes),
            (t.PRIVATE_ROW, shape[t.WIDTH_STRIDE]),
            (t.PRIVATE_ATTENTION, attention),
        ):
            shape[place] = offset
            offset += padded(int(size), 64)
        # threads must not share pages of what they write all the time
        shape[t.PRIVATE_BYTES] = padded(offset, 4096)
        self.buffers[t.PRIVATE] = self._allocate(int(shape[t.PRIVATE_BYTES]) * self._threads)
        if self._stage.is_tail:
            memory = aligned(OUTPUTS_AT_ONCE * int(shape[t.LOGIT_STRIDE]))
            self._kept.append(memory)
            self.buffers[t.LOGITS] = memory.ctypes.data
            self.logits = memory.view(np.float32).reshape(OUTPUTS_AT_ONCE, -1)
            self.buffers[t.CHUNK_NOTES] = self._allocate(OUTPUTS_AT_ONCE * int(shape[t.CHUNKS]) * NOTE_BYTES)

    def _allocate(self, size: int) -> int:
        memory = aligned(size)
        self._kept.append(memory)
        return int(memory.ctypes.data)


def describe_matrix(row: NDArray[np.int64], matrix: Matrix) -> None:
    """Fill a row of the matrices table, all but its kernels."""
    fmt = matrix.format
    row[t.WEIGHTS] = matrix.tiles.ctypes.data
    row[t.TILE_BYTES] = fmt.tile_bytes(matrix.columns)
    row[t.TILES] = tiles(matrix.rows)
    row[t.SLABS] = fmt.slabs(matrix.columns)
    row[t.COLUMNS] = matrix.columns
    row[t.LOW_BITS] = fmt.low
    row[t.HIGH_BITS] = fmt.high
    row[t.OFFSET] = fmt.offset
    row[t.SCALES] = fmt.scales
    row[t.ELEMENT] = _ELEMENTS.get(fmt.ggml_type.name, 0)
    row[t.SLAB_BYTES] = fmt.slab_bytes


def _stride(columns: int) -> int:
    """Bytes of a row of float32, padded to whole slabs (and so to whole tiles of the matrix that writes it)."""
    return padded(columns, 64) * 4


def _need(matrix: Matrix) -> int:
    return t.NEEDS_FLOATS if matrix.format.is_float else t.NEEDS_RECORDS
