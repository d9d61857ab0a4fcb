"""A model's facts in a few kilobytes: all that a stage needs of a header, without its vocabulary.

The orchestrator sends it to nodes that fetch their layers by themselves, so that none of them fetches a header (some
megabytes, for a stage of perhaps thirty) just to learn where its tensors are.
"""

from __future__ import annotations

import json
import zlib
from types import MappingProxyType

import numpy as np

from myelin.errors import ModelError
from myelin.model.facts import ModelFacts, PartInfo, TensorInfo
from myelin.model.quant import BLOCKS, GgmlType

MOST_BYTES = 512 << 10
"""A summary above it isn't sent; nodes then read the header themselves."""

_MOST_UNPACKED = 32 << 20
_LEFT_OUT = ("tokenizer.", "general.")


def pack_facts(facts: ModelFacts) -> bytes:
    """The summary of ``facts``, compressed; keys of the tokenizer and of the model's description are left out."""
    metadata: dict[str, object] = {}
    for key, value in facts.metadata.items():
        if key.startswith(_LEFT_OUT):
            continue
        if isinstance(value, np.ndarray):
            metadata[key] = [value.dtype.str, value.tolist()]
        elif isinstance(value, bool | int | float | str):
            metadata[key] = value
    document = {
        "architecture": facts.architecture,
        "metadata": metadata,
        "parts": [[part.name, part.size, part.header_bytes] for part in facts.parts],
        "tensors": [
            [tensor.name, int(tensor.ggml_type), list(tensor.shape), tensor.part, tensor.offset, tensor.nbytes]
            for tensor in facts.tensors.values()
        ],
    }
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode())


def unpack_facts(summary: bytes) -> ModelFacts:
    """The facts that :func:`pack_facts` summed up.

    Raises:
        ModelError: It is no such summary, or says what can't be.
    """
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(summary, _MOST_UNPACKED)
        if not inflater.eof:
            raise ValueError("too long")
        document = json.loads(text)
        parts = tuple(PartInfo(str(name), int(size), int(header)) for name, size, header in document["parts"])
        metadata = {
            str(key): np.array(value[1], dtype=np.dtype(str(value[0]))) if isinstance(value, list) else value
            for key, value in document["metadata"].items()
        }
        tensors = {
            str(name): _tensor(str(name), kind, shape, part, offset, nbytes, parts)
            for name, kind, shape, part, offset, nbytes in document["tensors"]
        }
        return ModelFacts(str(document["architecture"]), MappingProxyType(metadata), MappingProxyType(tensors), parts)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, zlib.error) as error:
        raise ModelError(
            f"the summary of the model's header can't be read: {str(error)[:120]}",
            "Run the same version on all nodes.",
            reason="model-header",
        ) from None


def _tensor(
    name: str, kind: int, shape: list[int], part: int, offset: int, nbytes: int, parts: tuple[PartInfo, ...]
) -> TensorInfo:
    ggml_type = GgmlType(kind)
    block_elements, block_bytes = BLOCKS[ggml_type]
    extents = tuple(int(extent) for extent in shape)
    values = 1
    for extent in extents:
        values *= extent
    fits = 0 <= int(part) < len(parts) and int(offset) >= 0 and int(offset) + int(nbytes) <= parts[int(part)].size
    if not extents or min(extents) < 1 or values // block_elements * block_bytes != int(nbytes) or not fits:
        raise ValueError(f"tensor {name[:60]}")
    return TensorInfo(name, ggml_type, extents, int(part), int(offset), int(nbytes))
