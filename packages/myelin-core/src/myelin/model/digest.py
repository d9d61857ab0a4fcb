"""A fingerprint of a model's header, by which a node notices that it opened another file than the orchestrator."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from myelin.model.facts import ModelFacts
from myelin.model.shard import ByteSource

_PIECE = 1 << 22


def header_digest(facts: ModelFacts, sources: Sequence[ByteSource]) -> bytes:
    """SHA-256 (32 bytes) over the header bytes of all parts, one after another, each preceded by its length and its
    part's size as unsigned 64-bit little-endian integers.

    Raises:
        ModelError: A source can't be read.
        ValueError: There aren't as many sources as parts.
    """
    digest = hashlib.sha256()
    for part, source in zip(facts.parts, sources, strict=True):
        digest.update(part.header_bytes.to_bytes(8, "little") + part.size.to_bytes(8, "little"))
        for start in range(0, part.header_bytes, _PIECE):
            digest.update(source.read_at(start, min(_PIECE, part.header_bytes - start)))
    return digest.digest()
