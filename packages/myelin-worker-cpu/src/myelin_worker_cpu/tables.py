"""Names for the places in the integer tables through which a compiled stage knows its model, its buffers and its step.

Compiled code takes a few plain arrays (one signature, whatever the model); these are the meanings of their entries.
Addresses are bytes in memory, strides are in bytes, a *vector* is 16 float32.
"""

from __future__ import annotations

# --- context: int64[CONTEXT_SIZE], addresses of the other tables, and of kernels -------------------------------------
SHAPE = 0
CONSTANTS = 1
FREQUENCIES = 2
"""float64[2, rope_dims/2]: radians for each position; of global layers, then of those with a window."""
LAYER_TABLE = 3
MATRIX_TABLE = 4
BUFFERS = 5
STEP = 6
TOKENS = 7
"""int32[rows]."""
POSITIONS = 8
"""int64[rows]."""
SEGMENT_TABLE = 9
OUTPUT_ROWS = 10
"""int64[outputs]: rows whose logits are wanted."""
CHOSEN = 11
"""int64[outputs]: the likeliest token of each."""
LOGPROBS = 12
"""float64[outputs]: its log-probability."""
SYNC = 13
THREADS = 14
"""Of the step: all, or 1."""
LAYER_KERNEL = 15
REMEMBER_KERNEL = 16
ATTEND_KERNEL = 17
OUTPUT_SEGMENTS = 18
"""The segments table of a narrowed batch: one entry of a single row for each output row."""
NARROWED_ROWS = 19
"""int64[16]: 0, 1, 2, …: where the output rows are after narrowing."""
CONTEXT_SIZE = 20

# --- shape: int64[SHAPE_SIZE], fixed after loading -------------------------------------------------------------------
LAYERS = 0
WIDTH = 1
WIDTH_STRIDE = 2
HEADS = 3
KV_HEADS = 4
HEAD_DIM = 5
HEAD_DIM_PADDED = 6
VALUE_DIM = 7
VALUE_DIM_PADDED = 8
QUERY_STRIDE = 9
"""Strides of queries, keys and values follow one another, as do their buffers, and those of gates and ups."""
KEY_STRIDE = 10
VALUE_STRIDE = 11
ATTENDED = 12
"""Columns of the attention's output: heads times value_dim."""
ATTENDED_STRIDE = 13
FFN_WIDTH = 14
FFN_STRIDE = 15
ROPE_DIMS = 16
ROPE_HALVES = 17
"""1 where elements ``i`` and ``i + rope_dims/2`` turn together, 0 where ``2i`` and ``2i+1`` do."""
GATE_KIND = 18
IS_HEAD = 19
IS_TAIL = 20
VOCABULARY = 21
LOGIT_STRIDE = 22
KV_BLOCK_BYTES = 23
"""See :class:`myelin_worker_cpu.kvcache.CacheLayout` for these four."""
KV_LAYER_BYTES = 24
KV_HEAD_BYTES = 25
KV_VALUES = 26
PRIVATE_BYTES = 27
"""Bytes of one thread's own memory."""
EMBEDDING = 28
"""Row of the matrices table that is the token embedding."""
OUTPUT_HEAD = 29
OUTPUT_NORM = 30
"""Address of its weights."""
OUTPUT_NEEDS = 31
PRIVATE_X = 32
"""In a thread's own memory: a copy of the row, its records and floats, a normalised row, attention's scratch."""
PRIVATE_RECORDS = 33
PRIVATE_FLOATS = 34
PRIVATE_ROW = 35
PRIVATE_ATTENTION = 36
ROPE_ROW_BYTES = 37
ROPE_KIND_BYTES = 38
CHUNKS = 39
"""See :mod:`myelin_worker_cpu.choice`."""
KV_KEY_SCALES = 40
"""Where a head's key scales and value scales begin, for q8_0."""
KV_VALUE_SCALES = 41
SHAPE_SIZE = 48

# --- constants: float32[CONSTANTS_SIZE] ------------------------------------------------------------------------------
NORM_EPSILON = 0
ATTENTION_SCALE = 1
EMBEDDING_SCALE = 2
SOFT_CAP = 3
CONSTANTS_SIZE = 4

# --- layers: int64[n, LAYER_SIZE]; vectors are addresses of f32, 0 where the model has none --------------------------
WINDOW = 0
ROPE_KIND = 1
"""0 global, 1 local."""
ATTENTION_NORM = 2
QUERY_BIAS = 3
KEY_BIAS = 4
VALUE_BIAS = 5
QUERY_NORM = 6
KEY_NORM = 7
POST_ATTENTION_NORM = 8
FFN_NORM = 9
POST_FFN_NORM = 10
NEEDS_QKV = 11
"""What a matrix input is needed as: NEEDS_RECORDS, NEEDS_FLOATS, or both."""
NEEDS_OUT = 12
NEEDS_FFN = 13
NEEDS_DOWN = 14
LAYER_SIZE = 16

NEEDS_RECORDS = 1
NEEDS_FLOATS = 2

# --- matrices: int64[n, MATRIX_SIZE]; those of layer i are rows 7*i … 7*i+6 ------------------------------------------
KERNEL_1 = 0
"""Addresses of the compiled products for blocks of 1, 4, 8 and 16."""
KERNEL_4 = 1
KERNEL_8 = 2
KERNEL_16 = 3
WEIGHTS = 4
TILE_BYTES = 5
TILES = 6
SLABS = 7
COLUMNS = 8
LOW_BITS = 9
"""From here on: what :mod:`myelin_worker_cpu.embedding` must know of the format."""
HIGH_BITS = 10
OFFSET = 11
SCALES = 12
ELEMENT = 13
"""0 for quantised ones; 1 f32, 2 f16, 3 bf16."""
SLAB_BYTES = 14
MATRIX_SIZE = 15

QUERY = 0
KEY = 1
VALUE = 2
ATTENTION_OUT = 3
FFN_GATE = 4
FFN_UP = 5
FFN_DOWN = 6
LAYER_MATRICES = 7

# --- buffers: int64[BUFFER_SIZE], addresses --------------------------------------------------------------------------
X = 0
RECORDS = 1
FLOATS = 2
QUERIES = 3
KEYS = 4
VALUES = 5
ATTENTION = 6
GATES = 7
UPS = 8
PROJECTED = 9
LOGITS = 10
ROPE = 11
PRIVATE = 12
HIDDEN_IN = 13
"""``f32[rows, width]`` unpadded: where a stage that isn't the head reads, and where one that isn't the tail writes."""
HIDDEN_OUT = 14
CHUNK_NOTES = 15
BUFFER_SIZE = 16

# --- step: int64[STEP_SIZE] ------------------------------------------------------------------------------------------
ROWS = 0
SEGMENTS = 1
OUTPUTS = 2
STEP_SIZE = 4

# --- segments: int64[n, SEGMENT_SIZE] --------------------------------------------------------------------------------
FIRST_ROW = 0
COUNT = 1
START = 2
SLOT = 3
"""Address of the sequence's keys and values."""
SEGMENT_SIZE = 4

QUERY_BLOCK = 16
"""Queries (row and head) that share what they read of keys and values."""
SCORE_STRIDE = 256
STATE_STRIDE = 16
"""Bytes of a query's softmax state."""
