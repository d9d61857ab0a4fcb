"""What BATCH and SAMPLES records carry in their meta: segments, releases and chosen tokens, packed and checked.

BATCH meta, little-endian::

    segment_count u32, release_count u32
    segment_count x (sequence u64, start u32, count u32, flags u32, top_k u32, temperature f64, top_p f64, seed u64)
    release_count x (sequence u64)

SAMPLES meta::

    sample_count u32, reserved u32 (zero)
    sample_count x (sequence u64, position u32, token u32, logprob f64)

Sampling parameters travel as float64 and a 64-bit seed, so that the tail draws from the very numbers that the request
named, wherever the model is cut. Everything that comes from a peer is checked here, with :class:`WireError`; whoever
calls these functions afterwards may rely on it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from myelin.engine.contract import Sample, Segment
from myelin.errors import WireError
from myelin.values import GREEDY, SamplingParams, SequenceId

_COUNTS = struct.Struct("<II")
_SEGMENT = struct.Struct("<QIIIIddQ")
_RELEASE = struct.Struct("<Q")
_SAMPLE = struct.Struct("<QIId")
_OUTPUT = 1
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a stage accepts in one batch.

    Attributes:
        max_context: Positions of a sequence.
        max_sequences: Segments, and releases, of one record at most.
        max_batch_tokens: Rows of one record at most.
    """

    max_context: int
    max_sequences: int
    max_batch_tokens: int


def pack_batch(segments: Sequence[Segment], releases: Sequence[SequenceId]) -> bytes:
    """The meta of a BATCH record.

    Raises:
        WireError: A number doesn't fit its field.
    """
    parts = [_COUNTS.pack(len(segments), len(releases))]
    try:
        for segment in segments:
            sampling = segment.sampling
            parts.append(
                _SEGMENT.pack(
                    segment.sequence,
                    segment.start,
                    segment.count,
                    _OUTPUT if segment.output else 0,
                    sampling.top_k,
                    sampling.temperature,
                    sampling.top_p,
                    sampling.seed & _MASK_64,
                )
            )
        parts += [_RELEASE.pack(sequence) for sequence in releases]
    except struct.error as error:
        raise WireError(f"a batch has a number out of range: {error}") from None
    return b"".join(parts)


def unpack_batch(
    meta: bytes | memoryview, rows: int, limits: BatchLimits
) -> tuple[tuple[Segment, ...], tuple[SequenceId, ...]]:
    """Segments and releases of a BATCH record of ``rows`` rows.

    A record without segments (and rows) carries releases only.

    Raises:
        WireError: Its length is wrong, it is empty, it breaks ``limits``, a sequence appears twice, its rows do not add
            up to ``rows``, or a field has a value that means nothing.
    """
    size = len(meta)
    if size < _COUNTS.size:
        raise WireError(f"a batch's meta of {size} bytes is shorter than its counts")
    segment_count, release_count = _COUNTS.unpack_from(meta)
    if size != _COUNTS.size + segment_count * _SEGMENT.size + release_count * _RELEASE.size:
        raise WireError(f"a batch's meta of {size} bytes claims {segment_count} segments and {release_count} releases")
    if segment_count > limits.max_sequences or release_count > limits.max_sequences:
        raise WireError(
            f"a batch of {segment_count} segments and {release_count} releases came to a stage that serves "
            f"{limits.max_sequences} sequences"
        )
    if rows > limits.max_batch_tokens:
        raise WireError(f"a batch of {rows} rows came to a stage that takes {limits.max_batch_tokens}")
    if not segment_count and not release_count:
        raise WireError("a batch has neither segments nor releases")
    segments: list[Segment] = []
    total = 0
    offset = _COUNTS.size
    for _ in range(segment_count):
        segment = _segment(meta, offset, limits)
        offset += _SEGMENT.size
        total += segment.count
        segments.append(segment)
    if total != rows:
        raise WireError(f"a batch's segments add up to {total} rows, its record has {rows}")
    if segment_count > 1 and len({segment.sequence for segment in segments}) != segment_count:
        raise WireError("a sequence appears twice in a batch")
    releases = tuple(
        SequenceId(_RELEASE.unpack_from(meta, offset + index * _RELEASE.size)[0]) for index in range(release_count)
    )
    if release_count > 1 and len(set(releases)) != release_count:
        raise WireError("a sequence is released twice in a batch")
    return tuple(segments), releases


def _segment(meta: bytes | memoryview, offset: int, limits: BatchLimits) -> Segment:
    """The segment at ``offset``, its numbers checked."""
    sequence, start, count, flags, top_k, temperature, top_p, seed = _SEGMENT.unpack_from(meta, offset)
    if count < 1:
        raise WireError(f"a segment of sequence {sequence} has no rows")
    if start + count > limits.max_context:
        raise WireError(
            f"a segment of sequence {sequence} ends at position {start + count}, beyond the context of "
            f"{limits.max_context}"
        )
    if flags & ~_OUTPUT:
        raise WireError(f"a segment of sequence {sequence} has unknown flags: {flags:#x}")
    if top_k == 0 and temperature == 0.0 and top_p == 1.0 and seed == 0:
        sampling = GREEDY
    else:
        if not (math.isfinite(temperature) and temperature >= 0.0 and 0.0 < top_p <= 1.0):
            raise WireError(f"sampling of sequence {sequence} by temperature {temperature} and top_p {top_p}")
        sampling = SamplingParams(temperature, top_k, top_p, seed)
    return Segment(SequenceId(sequence), start, count, bool(flags), sampling)


def pack_samples(samples: Sequence[Sample]) -> bytes:
    """The meta of a SAMPLES record.

    Raises:
        WireError: A number doesn't fit its field.
    """
    parts = [_COUNTS.pack(len(samples), 0)]
    try:
        parts += [_SAMPLE.pack(sample.sequence, sample.position, sample.token, sample.logprob) for sample in samples]
    except struct.error as error:
        raise WireError(f"a sample has a number out of range: {error}") from None
    return b"".join(parts)


def unpack_samples(meta: bytes | memoryview, *, vocab_size: int, limits: BatchLimits) -> tuple[Sample, ...]:
    """The samples of a SAMPLES record.

    Raises:
        WireError: Its length is wrong, there are more samples than sequences, a token is outside the vocabulary, a
            position outside the context, or a log-probability is no number.
    """
    size = len(meta)
    if size < _COUNTS.size:
        raise WireError(f"a samples record's meta of {size} bytes is shorter than its count")
    count, reserved = _COUNTS.unpack_from(meta)
    if reserved or size != _COUNTS.size + count * _SAMPLE.size:
        raise WireError(f"a samples record's meta of {size} bytes claims {count} samples")
    if count > limits.max_sequences:
        raise WireError(f"{count} samples came to a head that serves {limits.max_sequences} sequences")
    samples = []
    for index in range(count):
        sequence, position, token, logprob = _SAMPLE.unpack_from(meta, _COUNTS.size + index * _SAMPLE.size)
        if token >= vocab_size:
            raise WireError(f"token {token} is outside the vocabulary of {vocab_size}")
        if not 1 <= position <= limits.max_context:
            raise WireError(f"a sample for position {position} is outside the context of {limits.max_context}")
        if math.isnan(logprob):
            raise WireError(f"the log-probability of token {token} is not a number")
        samples.append(Sample(SequenceId(sequence), position, token, logprob))
    return tuple(samples)
