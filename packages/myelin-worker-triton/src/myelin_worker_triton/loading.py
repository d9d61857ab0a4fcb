"""Reading a stage's tensors piece by piece: the disk is read while the device repacks what came before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from myelin.engine_api import ShardReader, dequantize
from myelin_worker_triton import planes
from myelin_worker_triton.planes import Matrix

PIECE_BYTES = 32 << 20
"""Raw bytes that are read, sent and repacked at once."""


def load_floats(shard: ShardReader, name: str) -> NDArray[np.float32]:
    """A vector (a norm, a bias) as ``float32``."""
    info = shard.info(name)
    return np.ascontiguousarray(dequantize(info.ggml_type, shard.read(name)).reshape(info.shape), np.float32)


def load_matrix(shard: ShardReader, names: Sequence[str], device: torch.device) -> Matrix:
    """Matrices of one type and width as one, one below the other, in planes on the device."""
    first = shard.info(names[0])
    rows = sum(math.prod(shard.info(name).shape[:-1]) for name in names)
    pieces = chain.from_iterable(_pieces(shard, name, device) for name in names)
    return planes.repack(first.ggml_type.name, rows, first.shape[-1], pieces, device)


def _pieces(shard: ShardReader, name: str, device: torch.device) -> Iterator[torch.Tensor]:
    """The tensor's rows in pieces, the next one being read meanwhile. Memory is pinned where that lets copies
    overlap."""
    rows = math.prod(shard.info(name).shape[:-1])
    at_once = max(1, PIECE_BYTES // shard.info(name).row_bytes)

    def read(first: int) -> torch.Tensor:
        piece = torch.from_numpy(shard.read_rows(name, first, min(at_once, rows - first)))
        return piece.pin_memory() if device.type == "cuda" else piece

    with ThreadPoolExecutor(1, thread_name_prefix="myelin-triton-load") as reader:
        coming = reader.submit(read, 0)
        for first in range(0, rows, at_once):
            piece = coming.result()
            if first + at_once < rows:
                coming = reader.submit(read, first + at_once)
            yield piece


def planned_bytes(shard: ShardReader) -> int:
    """What the stage's weights will take on the device."""
    total = 0
    for name in shard.names:
        info = shard.info(name)
        if len(info.shape) > 1:
            total += planes.planned_bytes(info.ggml_type.name, math.prod(info.shape[:-1]), info.shape[-1])
        else:
            total += 4 * math.prod(info.shape)
    return total
