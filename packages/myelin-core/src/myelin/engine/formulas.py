"""The formulas of a decoder layer, each as one plain function over ``float32`` rows.

A row is a position. Every function treats rows one by one: what a row gives never depends on the other rows, bit for
bit.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from myelin.model.architecture import Activation, RopeStyle

Floats = NDArray[np.float32]

TILE = 16
"""Columns of every matrix product, see :class:`Tiles`."""


class Tiles:
    """Matrix products whose rows don't feel each other.

    BLAS adds a dot product's terms in an order that depends on the shapes of the operands, so ``x @ W.T`` gives other
    last bits for one row than for twenty. Here each product has the same shape: the row of position ``p`` is always
    column ``p % TILE`` of a tile of ``TILE`` columns, the unused ones being zero. So a position takes the same path
    through BLAS whichever rows surround it, in a prompt's chunk as in a decode.

    Args:
        positions: The position of each row, in the order of the rows.
    """

    def __init__(self, positions: NDArray[np.int64]) -> None:
        taken = [0] * TILE
        places = np.empty(len(positions), np.int64)
        for row, position in enumerate(positions):
            column = int(position) % TILE
            places[row] = taken[column] * TILE + column
            taken[column] += 1
        self._places = places
        self._count = max(taken)

    def product(self, weight: Floats, rows: Floats) -> Floats:
        """``rows @ weight.T``: ``float32[n, columns]`` by ``float32[outputs, columns]`` is ``float32[n, outputs]``."""
        padded = np.zeros((self._count * TILE, weight.shape[1]), np.float32)
        padded[self._places] = rows
        result = np.empty((self._count * TILE, weight.shape[0]), np.float32)
        for first in range(0, len(padded), TILE):
            result[first : first + TILE] = (weight @ padded[first : first + TILE].T).T
        return result[self._places]


def rms_norm(rows: Floats, weight: Floats, epsilon: float) -> Floats:
    """``x / sqrt(mean(x²) + ε) * weight`` over the last axis (Zhang and Sennrich, 2019).

    Gemma's ``1 +`` is already in the weight of a GGUF file.
    """
    mean: Floats = np.mean(rows * rows, axis=-1, keepdims=True, dtype=np.float32)
    normal: Floats = rows / np.sqrt(mean + np.float32(epsilon)) * weight
    return normal


def activate(rows: Floats, activation: Activation) -> Floats:
    """SiLU, ``x / (1 + e^-x)``, or GELU in its tanh form (Hendrycks and Gimpel, 2016)."""
    if activation is Activation.SILU:
        with np.errstate(over="ignore"):  # e^-x of a very negative x is infinite, and x / infinity is the limit, 0
            return (rows / (np.float32(1) + np.exp(-rows))).astype(np.float32, copy=False)
    inner = np.float32(math.sqrt(2 / math.pi)) * (rows + np.float32(0.044715) * rows * rows * rows)
    return (np.float32(0.5) * rows * (np.float32(1) + np.tanh(inner))).astype(np.float32, copy=False)


def softcap(logits: Floats, cap: float) -> Floats:
    """``cap * tanh(logit / cap)``; a cap of 0 leaves them alone."""
    if cap <= 0:
        return logits
    capped: Floats = np.float32(cap) * np.tanh(logits / np.float32(cap))
    return capped


def rope_angles(
    positions: NDArray[np.int64], dims: int, base: float, scale: float, factors: Floats | None
) -> tuple[Floats, Floats]:
    """Cosines and sines of the rotation, ``float32[rows, dims / 2]`` each (Su et al., 2021).

    Pair ``i`` at position ``p`` turns by ``p * scale * base^(-2i/dims) / factors[i]``. Angles are taken in float64,
    since float32 has too few digits for the fast pairs of a late position.

    Args:
        factors: ``rope_freqs.weight`` of the model (Llama 3's long-context correction), or None.
    """
    frequencies = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    if factors is not None:
        frequencies = frequencies / factors.astype(np.float64)
    angles = positions[:, None].astype(np.float64) * scale * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(heads: Floats, cosines: Floats, sines: Floats, style: RopeStyle) -> Floats:
    """Turn the first ``dims`` elements of each head.

    Args:
        heads: ``float32[rows, heads, head_dim]``.
        cosines, sines: ``float32[rows, dims / 2]``, from :func:`rope_angles`.
    """
    pairs = cosines.shape[1]
    if style is RopeStyle.INTERLEAVED:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    cosine, sine = cosines[:, None, :], sines[:, None, :]
    turned = heads.copy()
    turned[..., first] = heads[..., first] * cosine - heads[..., second] * sine
    turned[..., second] = heads[..., first] * sine + heads[..., second] * cosine
    return turned


def attend(queries: Floats, keys: Floats, values: Floats, scale: float) -> Floats:
    """One position's attention over the positions it sees: ``softmax(q·k * scale) v`` for each head.

    Args:
        queries: ``float32[n_heads, head_dim]`` of one position.
        keys: ``float32[n_kv_heads, seen, head_dim]``; query heads share key heads in equal, consecutive groups.
        values: ``float32[n_kv_heads, seen, value_dim]``.

    Returns:
        ``float32[n_heads * value_dim]``.
    """
    n_kv_heads = keys.shape[0]
    grouped = queries.reshape(n_kv_heads, -1, queries.shape[1])
    scores = grouped @ keys.transpose(0, 2, 1) * np.float32(scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Floats = (weights @ values).reshape(-1)
    return mixed
