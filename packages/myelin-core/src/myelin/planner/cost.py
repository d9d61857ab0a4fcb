"""The arithmetic of planning: bytes and seconds, each in a named pure function.

Sizes are bytes, times are seconds. Formulas are written where they are computed, and ``tests/planner`` holds a table
for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from myelin.model.architecture import Hyperparameters, stage_tensors
from myelin.model.facts import ModelFacts
from myelin.wire.record import HEADER_BYTES

ACTIVATION_BYTES = 4
"""Bytes of one value of the residual stream as it crosses an edge (float32: what every engine of ours computes in)."""

TOKEN_BYTES = 4
"""Bytes of a token id in a record's payload (int32)."""

SAMPLE_BYTES = 24
"""Bytes of a chosen token on its way from the tail to the head: sequence, position, token, log-probability."""

SEGMENT_META_BYTES = 64
"""An upper bound for what a record's meta says of one segment or one sample: sequence, position, count, sampling,
token."""

RECORD_META_BYTES = 64
"""An upper bound for what a record's meta says once, whatever is in it."""


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Where a model's bytes are, summed so that any stage's can be told at once.

    Attributes:
        layer_ends: Running sum of the layers' bytes: ``layer_ends[i]`` is the bytes of layers ``[0, i)``;
            ``n_layers + 1`` long.
        shared_bytes: Tensors outside the layers that every stage reads (``rope_freqs``).
        embedding_bytes: The token embedding, which the head looks up.
        output_bytes: The output norm and, where it isn't tied, the output matrix.
        tied_output: The tail multiplies by the token embedding, so it holds that too.
    """

    layer_ends: tuple[int, ...]
    shared_bytes: int
    embedding_bytes: int
    output_bytes: int
    tied_output: bool

    @property
    def n_layers(self) -> int:
        """Decoder blocks."""
        return len(self.layer_ends) - 1


def weight_layout(facts: ModelFacts, parameters: Hyperparameters) -> WeightLayout:
    """Sort the model's tensors into layers, embedding, output and what all share, as :func:`stage_tensors` gives them
    out."""
    layers = [0] * parameters.n_layers
    shared = embedding = output = 0
    for name in stage_tensors(facts, parameters, 0, parameters.n_layers):
        nbytes = facts.tensors[name].nbytes
        if name.startswith("blk."):
            layers[int(name.split(".", 2)[1])] += nbytes
        elif name.startswith("token_embd"):
            embedding += nbytes
        elif name.startswith("output"):
            output += nbytes
        else:
            shared += nbytes
    return WeightLayout(
        layer_ends=(0, *accumulate(layers)),
        shared_bytes=shared,
        embedding_bytes=embedding,
        output_bytes=output,
        tied_output=parameters.tied_output,
    )


def layer_weight_bytes(layout: WeightLayout, first: int, end: int) -> int:
    """Bytes of the layers ``[first, end)`` alone."""
    return layout.layer_ends[end] - layout.layer_ends[first]


def stage_weight_bytes(layout: WeightLayout, first: int, end: int) -> int:
    """Bytes that the stage of layers ``[first, end)`` holds.

    ``layers + shared + [head or tied tail] embedding + [tail] output``. A tied embedding counts in the head and again
    in the tail, but once where they are the same stage.
    """
    is_head, is_tail = first == 0, end == layout.n_layers
    total = layer_weight_bytes(layout, first, end) + layout.shared_bytes
    if is_head or (is_tail and layout.tied_output):
        total += layout.embedding_bytes
    if is_tail:
        total += layout.output_bytes
    return total


def bytes_read_per_token(layout: WeightLayout, first: int, end: int) -> int:
    """Bytes of weights that decoding one token streams from memory.

    Every layer's matrices are read whole. The embedding is a lookup of one row, which costs nothing; the output head is
    a product with its whole matrix, tied or not. ``layers + shared + [tail] output + [tied tail] embedding``.
    """
    total = layer_weight_bytes(layout, first, end) + layout.shared_bytes
    if end == layout.n_layers:
        total += layout.output_bytes + (layout.embedding_bytes if layout.tied_output else 0)
    return total


def layer_kv_bytes(parameters: Hyperparameters, positions: int, bytes_per_value: float) -> int:
    """Keys and values of one layer for ``positions`` positions:
    ``positions * kv_heads * (head_dim + value_dim) * bytes``, rounded up (q8_0 has 34 bytes for 32 values)."""
    values = positions * parameters.n_kv_heads * (parameters.head_dim + parameters.value_dim)
    return math.ceil(values * bytes_per_value)


def stage_kv_bytes(
    parameters: Hyperparameters,
    first: int,
    end: int,
    *,
    max_context: int,
    max_sequences: int,
    bytes_per_value: float = 2,
    windowed: bool = False,
) -> int:
    """Keys and values that the stage reserves: the sum over its layers, times ``max_sequences``.

    Args:
        windowed: Whether a layer with a sliding window keeps only its window. Our engines keep the full context for
            every layer (a sequence may be rewound, and a slot is then plain memory), so the planner counts that:
            ``False``.
    """
    total = 0
    for layer in range(first, end):
        window = parameters.sliding_window[layer]
        positions = min(window, max_context) if windowed and window else max_context
        total += layer_kv_bytes(parameters, positions, bytes_per_value)
    return total * max_sequences


def stage_scratch_bytes(
    parameters: Hyperparameters, first: int, end: int, *, max_context: int, max_sequences: int, max_batch_tokens: int
) -> int:
    """Working memory of a step, in float32.

    ``4 * (rows * (3 width + heads * (head_dim + value_dim) + kv_heads * (head_dim + value_dim) + 2 ffn_width)
    + heads * max_context + [tail] max_sequences * vocab_size)`` and, for records under way in and out, another
    ``2 * 4 * rows * width``. The attention scores are those of one row; the logits those of each sequence's last row.
    """
    p = parameters
    row_values = 3 * p.width + (p.n_heads + p.n_kv_heads) * (p.head_dim + p.value_dim) + 2 * p.ffn_width
    values = max_batch_tokens * row_values + p.n_heads * max_context
    if end == p.n_layers:
        values += max_sequences * p.vocab_size
    records = 2 * max_batch_tokens * p.width
    return ACTIVATION_BYTES * (values + records)


def stage_seconds(read_bytes: int, bandwidth: float) -> float:
    """Seconds that a node takes to stream ``read_bytes`` at ``bandwidth`` bytes per second: what a decoded token costs
    it."""
    return read_bytes / bandwidth


def token_seconds(stages: Sequence[float], hop_seconds: float = 0.0) -> float:
    """Seconds from one token to the next of a lone sequence: every stage once, and a hop after each but a lone stage.

    ``sum(stages) + hops * hop_seconds`` with as many hops as stages (the last one closes the loop at the head), or
    none.
    """
    hops = len(stages) if len(stages) > 1 else 0
    return sum(stages) + hops * hop_seconds


def activation_token_bytes(parameters: Hyperparameters) -> int:
    """Payload bytes of one token on an activation edge: ``4 * width``."""
    return ACTIVATION_BYTES * parameters.width


def record_bytes(rows: int, token_bytes: int, *, segments: int) -> int:
    """The largest record of ``rows`` tokens in ``segments`` segments: header, an upper bound for its meta, payload."""
    return HEADER_BYTES + RECORD_META_BYTES + segments * SEGMENT_META_BYTES + rows * token_bytes
