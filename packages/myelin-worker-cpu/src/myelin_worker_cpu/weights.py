"""A stage's tensors, read through its shard and repacked, a chunk of rows at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from myelin.engine_api import EngineError, GgmlType, ShardReader, TensorInfo
from myelin_worker_cpu.formats import FORMATS, TILE_ROWS, TileFormat
from myelin_worker_cpu.memory import Arena, aligned
from myelin_worker_cpu.repack import TileWriter

CHUNK_BYTES = 4 << 20
LAYER_TENSORS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""In the order of the rows of the matrices table."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix in tiles. ``rows`` and ``columns`` are the model's, without padding."""

    format: TileFormat
    rows: int
    columns: int
    tiles: NDArray[np.uint8]


@dataclass(slots=True)
class Weights:
    """Everything that a stage holds, by name; vectors are float32, padded with zeros to a multiple of 64."""

    matrices: dict[str, Matrix] = field(default_factory=dict)
    vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(matrix.tiles.nbytes for matrix in self.matrices.values()) + sum(
            vector.nbytes for vector in self.vectors.values()
        )


def planned_bytes(shard: ShardReader) -> int:
    """What :func:`load` will hold, before it is read."""
    total = 0
    for name in shard.names:
        info = shard.info(name)
        if len(info.shape) == 2:
            total += _format_of(info).matrix_bytes(*info.shape)
        else:
            total += 4 * int(np.prod(info.shape))
    return total


def matrix_types(shard: ShardReader) -> set[GgmlType]:
    """The types of the stage's matrices.

    Raises:
        EngineError: One is of a type that has no kernels.
    """
    return {_format_of(shard.info(name)).ggml_type for name in shard.names if len(shard.info(name).shape) == 2}


def load(shard: ShardReader, progress: Callable[[int, int], None]) -> Weights:
    """Read and repack all tensors of the stage; ``progress(done, total)`` in bytes of the file.

    Matrices lie one after the other in the order in which a step reads them, whatever their order in the file.
    """
    weights = Weights()
    rooms = _rooms(shard)
    total = sum(shard.info(name).nbytes for name in shard.names)
    done = 0
    progress(0, total)
    for name in shard.names:
        info = shard.info(name)
        if len(info.shape) != 2:
            weights.vectors[name] = _vector(shard, info)
            done += info.nbytes
            continue
        rows, columns = info.shape
        writer = TileWriter(_format_of(info).ggml_type, rows, columns, rooms[name])
        step = max(TILE_ROWS, CHUNK_BYTES // info.row_bytes // TILE_ROWS * TILE_ROWS)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            writer.put(first, shard.read_rows(name, first, count))
            done += count * info.row_bytes
            progress(done, total)
        weights.matrices[name] = Matrix(writer.format, rows, columns, writer.tiles)
    progress(total, total)
    return weights


def _rooms(shard: ShardReader) -> dict[str, NDArray[np.uint8]]:
    """Where each matrix is to be."""
    sizes = {
        name: _format_of(shard.info(name)).matrix_bytes(*shard.info(name).shape)
        for name in shard.names
        if len(shard.info(name).shape) == 2
    }
    arena = Arena(sum(sizes.values()))  # each is a multiple of a cache line
    return {name: arena.take(sizes[name]) for name in sorted(sizes, key=_reading_order)}


def _reading_order(name: str) -> tuple[int, int, str]:
    """Layers in order, each layer's matrices as they are used; embedding and output head last."""
    parts = name.split(".")
    if parts[0] != "blk":
        return sys.maxsize, 0, name
    known = parts[2] in LAYER_TENSORS
    return int(parts[1]), LAYER_TENSORS.index(parts[2]) if known else len(LAYER_TENSORS), name


def _format_of(info: TensorInfo) -> TileFormat:
    fmt = FORMATS.get(info.ggml_type)
    if fmt is None:
        names = ", ".join(kind.name for kind in FORMATS)
        raise EngineError(
            f"tensor {info.name} is of type {info.ggml_type.name}, which the CPU engine does not compute",
            f"Use a file of these types: {names}.",
            reason="tensor-type",
        )
    return fmt


def _vector(shard: ShardReader, info: TensorInfo) -> NDArray[np.float32]:
    raw = np.ascontiguousarray(shard.read(info.name)).reshape(-1)
    if info.ggml_type is GgmlType.F32:
        values = raw.view("<f4")
    elif info.ggml_type is GgmlType.F16:
        values = raw.view("<f2").astype(np.float32)
    elif info.ggml_type is GgmlType.BF16:
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        raise EngineError(
            f"tensor {info.name} is a vector of type {info.ggml_type.name}",
            "Vectors must be F32, F16 or BF16.",
            reason="tensor-type",
        )
    padded = aligned(-(-len(values) // 64) * 256).view(np.float32)
    padded[: len(values)] = values
    return padded
