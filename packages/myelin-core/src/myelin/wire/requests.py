"""What the orchestrator and the head say to each other on the token-in edge: submit, cancel, tokens, finished, fault.

Each has a ``to_meta``/``from_meta`` pair for a record's meta, and a pair of functions for whole records
(``submit_record``/``read_submit`` and so on); the prompt travels as the record's ``int32[1, n]`` payload. Every number
from a peer is range-checked; :class:`~myelin.errors.WireError` otherwise, and nothing else is raised for its bytes.

A record's ``object_id`` is the sequence it is about, and 0 where it is about several or none. Metas are little-endian::

    SUBMIT    max_tokens u32, temperature f64, top_k u32, top_p f64, seed u64, ignore_end u8
    CANCEL    (empty)
    TOKENS    one entry for each token: sequence u64, position u32, token i32, logprob f64
    FINISHED  generated u32, reason u8 (1 stop, 2 length, 3 cancelled)
    FAULT     has_sequence u8, then reason, message, hint, each a u32 length and UTF-8
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from myelin.errors import WireError
from myelin.values import GREEDY, Epoch, FinishReason, SamplingParams, SequenceId
from myelin.wire.record import PayloadType, Record, RecordFlags, RecordKind

MAX_PROMPT_TOKENS = 1 << 22
"""Far above any context; bounds what a peer can make us hold."""
MAX_TOKENS_IN_RECORD = 1 << 16
MAX_FAULT_TEXT_BYTES = 1 << 14
"""For each of a fault's texts; a longer one is cut when it is packed, and refused when it is read."""
MAX_TEMPERATURE = 1e6
MAX_LOGPROB = 1e-3
"""A log-probability is at most 0; rounding may lift a certain token's slightly above."""

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1
_I32 = (1 << 31) - 1

_SUBMIT = struct.Struct("<IdIdQB")
_TOKEN = struct.Struct("<QIid")
_FINISHED = struct.Struct("<IB")
_LENGTH = struct.Struct("<I")
_REASONS = {1: FinishReason.STOP, 2: FinishReason.LENGTH, 3: FinishReason.CANCELLED}
_REASON_CODES = {reason: code for code, reason in _REASONS.items()}


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a sequence: its prompt and how to go on.

    Attributes:
        sequence: A number never used before in this run.
        prompt: Token ids; at least one.
        max_tokens: New tokens at most, at least 1.
        sampling: How each is chosen.
        ignore_end: Go on past end-of-generation tokens (benchmarks).
    """

    sequence: SequenceId
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    ignore_end: bool = False

    def to_meta(self) -> bytes:
        """All but the sequence and the prompt.

        Raises:
            WireError: A number is out of range; also for the prompt's.
        """
        _check_submit(self)
        sampling = self.sampling
        return _SUBMIT.pack(
            self.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, self.ignore_end
        )

    @classmethod
    def from_meta(cls, meta: bytes | memoryview, sequence: SequenceId, prompt: tuple[int, ...]) -> Submit:
        """The request in ``meta``, for a sequence and a prompt that the record holds elsewhere.

        Raises:
            WireError: It isn't one, or a number is out of range.
        """
        _exact(meta, _SUBMIT.size, RecordKind.SUBMIT)
        max_tokens, temperature, top_k, top_p, seed, ignore_end = _SUBMIT.unpack(meta)
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        submit = cls(sequence, prompt, max_tokens, sampling, _flag(ignore_end, "ignore_end"))
        _check_submit(submit)
        return submit


@dataclass(frozen=True, slots=True)
class NewToken:
    """A chosen token, for position ``position`` of its sequence, with its log-probability."""

    sequence: SequenceId
    position: int
    token: int
    logprob: float

    def to_meta(self) -> bytes:
        """One entry of a TOKENS record's meta.

        Raises:
            WireError: A number is out of range.
        """
        _check_token(self)
        return _TOKEN.pack(self.sequence, self.position, self.token, self.logprob)

    @classmethod
    def from_meta(cls, meta: bytes | memoryview) -> NewToken:
        """The token in one entry.

        Raises:
            WireError: It isn't one, or a number is out of range.
        """
        _exact(meta, _TOKEN.size, RecordKind.TOKENS)
        sequence, position, token, logprob = _TOKEN.unpack(meta)
        found = cls(SequenceId(sequence), position, token, logprob)
        _check_token(found)
        return found


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence has ended at the head; ``generated`` tokens were sent before."""

    sequence: SequenceId
    reason: FinishReason
    generated: int

    def to_meta(self) -> bytes:
        """All but the sequence.

        Raises:
            WireError: The count is out of range.
        """
        _in_range("generated", self.generated, 0, _U32)
        return _FINISHED.pack(self.generated, _REASON_CODES[self.reason])

    @classmethod
    def from_meta(cls, meta: bytes | memoryview, sequence: SequenceId) -> Finished:
        """What is in ``meta``.

        Raises:
            WireError: It isn't one, or the reason is unknown.
        """
        _exact(meta, _FINISHED.size, RecordKind.FINISHED)
        generated, code = _FINISHED.unpack(meta)
        if code not in _REASONS:
            raise WireError(f"a FINISHED record has an unknown reason: {code}")
        return cls(sequence, _REASONS[code], generated)


@dataclass(frozen=True, slots=True)
class Fault:
    """A stage could not go on, with the whole pipeline or, where ``sequence`` is given, with that sequence only.

    Attributes:
        reason, message, hint: As in :class:`~myelin.errors.MyelinError`.
        sequence: Which sequence it ends; None ends all.
    """

    reason: str
    message: str
    hint: str = ""
    sequence: SequenceId | None = None

    def to_meta(self) -> bytes:
        """All but the sequence's number; a text above :data:`MAX_FAULT_TEXT_BYTES` is cut."""
        parts = [bytes((self.sequence is not None,))]
        for text in (self.reason, self.message, self.hint):
            data = text.encode(errors="replace")[:MAX_FAULT_TEXT_BYTES].decode(errors="ignore").encode()
            parts += (_LENGTH.pack(len(data)), data)
        return b"".join(parts)

    @classmethod
    def from_meta(cls, meta: bytes | memoryview, sequence: SequenceId) -> Fault:
        """What is in ``meta``; ``sequence`` is the record's and counts only if the meta says so.

        Raises:
            WireError: It isn't one.
        """
        data = bytes(meta)
        if not data:
            raise WireError("a FAULT record has no meta")
        has_sequence, offset, texts = _flag(data[0], "has_sequence"), 1, []
        for name in ("reason", "message", "hint"):
            if len(data) < offset + _LENGTH.size:
                raise WireError(f"a FAULT record ends before its {name}")
            (length,) = _LENGTH.unpack_from(data, offset)
            offset += _LENGTH.size
            if length > MAX_FAULT_TEXT_BYTES or len(data) < offset + length:
                raise WireError(f"a FAULT record claims {length} bytes for its {name}")
            try:
                texts.append(data[offset : offset + length].decode())
            except UnicodeDecodeError:
                raise WireError(f"a FAULT record's {name} is not text") from None
            offset += length
        if offset != len(data):
            raise WireError(f"a FAULT record has {len(data) - offset} bytes too many")
        return cls(texts[0], texts[1], texts[2], sequence if has_sequence else None)


def submit_record(submit: Submit, *, epoch: Epoch, sequence: int, flags: RecordFlags = RecordFlags.NONE) -> Record:
    """The record for ``submit``; ``sequence`` is the record's place in the edge's stream, here and below."""
    meta = submit.to_meta()
    prompt = struct.pack(f"<{len(submit.prompt)}i", *submit.prompt)
    return Record(
        kind=RecordKind.SUBMIT,
        epoch=epoch,
        object_id=submit.sequence,
        sequence=sequence,
        meta=meta,
        payload=prompt,
        dtype=PayloadType.INT32,
        rows=1,
        columns=len(submit.prompt),
        flags=flags,
    )


def read_submit(record: Record) -> Submit:
    """The request in a SUBMIT record.

    Raises:
        WireError: It isn't one.
    """
    _expect(record, RecordKind.SUBMIT)
    if record.dtype != PayloadType.INT32 or record.rows != 1 or not 1 <= record.columns <= MAX_PROMPT_TOKENS:
        raise WireError(f"a prompt came as {record.rows}×{record.columns} {record.dtype.name}")
    if memoryview(record.payload).nbytes != 4 * record.columns:
        raise WireError(f"a prompt of {record.columns} tokens has {memoryview(record.payload).nbytes} bytes")
    prompt = struct.unpack(f"<{record.columns}i", record.payload)
    return Submit.from_meta(record.meta, SequenceId(record.object_id), prompt)


def cancel_record(target: SequenceId, *, epoch: Epoch, sequence: int) -> Record:
    """The record that ends the sequence ``target``."""
    return Record(kind=RecordKind.CANCEL, epoch=epoch, object_id=target, sequence=sequence)


def read_cancel(record: Record) -> SequenceId:
    """Which sequence a CANCEL record ends.

    Raises:
        WireError: It isn't one.
    """
    _expect(record, RecordKind.CANCEL)
    _exact(record.meta, 0, RecordKind.CANCEL)
    _no_payload(record)
    return SequenceId(record.object_id)


def tokens_record(
    tokens: Sequence[NewToken], *, epoch: Epoch, sequence: int, flags: RecordFlags = RecordFlags.NONE
) -> Record:
    """The record that tells of new tokens, at least one, in the order in which they were chosen.

    Raises:
        WireError: There is none, there are too many, or a number is out of range.
    """
    _in_range("count of tokens", len(tokens), 1, MAX_TOKENS_IN_RECORD)
    meta = b"".join([token.to_meta() for token in tokens])
    return Record(kind=RecordKind.TOKENS, epoch=epoch, object_id=0, sequence=sequence, meta=meta, flags=flags)


def read_tokens(record: Record) -> tuple[NewToken, ...]:
    """The tokens in a TOKENS record.

    Raises:
        WireError: It isn't one.
    """
    _expect(record, RecordKind.TOKENS)
    _no_payload(record)
    meta = memoryview(record.meta)
    count, rest = divmod(meta.nbytes, _TOKEN.size)
    if rest or not 1 <= count <= MAX_TOKENS_IN_RECORD:
        raise WireError(
            f"a TOKENS record has {meta.nbytes} bytes of meta, not a multiple of {_TOKEN.size} within bounds"
        )
    return tuple(NewToken.from_meta(meta[start : start + _TOKEN.size]) for start in range(0, meta.nbytes, _TOKEN.size))


def finished_record(
    finished: Finished, *, epoch: Epoch, sequence: int, flags: RecordFlags = RecordFlags.NONE
) -> Record:
    """The record that tells of a sequence's end."""
    return Record(
        kind=RecordKind.FINISHED,
        epoch=epoch,
        object_id=finished.sequence,
        sequence=sequence,
        meta=finished.to_meta(),
        flags=flags,
    )


def read_finished(record: Record) -> Finished:
    """What a FINISHED record tells.

    Raises:
        WireError: It isn't one.
    """
    _expect(record, RecordKind.FINISHED)
    _no_payload(record)
    return Finished.from_meta(record.meta, SequenceId(record.object_id))


def fault_record(fault: Fault, *, epoch: Epoch, sequence: int) -> Record:
    """The record that tells of a fault."""
    return Record(
        kind=RecordKind.FAULT, epoch=epoch, object_id=fault.sequence or 0, sequence=sequence, meta=fault.to_meta()
    )


def read_fault(record: Record) -> Fault:
    """What a FAULT record tells.

    Raises:
        WireError: It isn't one.
    """
    _expect(record, RecordKind.FAULT)
    _no_payload(record)
    return Fault.from_meta(record.meta, SequenceId(record.object_id))


def _check_submit(submit: Submit) -> None:
    _in_range("sequence", submit.sequence, 0, _U64)
    _in_range("prompt's length", len(submit.prompt), 1, MAX_PROMPT_TOKENS)
    _in_range("lowest token of the prompt", min(submit.prompt), 0, _I32)
    _in_range("highest token of the prompt", max(submit.prompt), 0, _I32)
    _in_range("max_tokens", submit.max_tokens, 1, _U32)
    _in_range("top_k", submit.sampling.top_k, 0, _U32)
    _in_range("seed", submit.sampling.seed, 0, _U64)
    if not 0.0 <= submit.sampling.temperature <= MAX_TEMPERATURE:
        raise WireError(f"a temperature of {submit.sampling.temperature} is out of range")
    if not 0.0 < submit.sampling.top_p <= 1.0:
        raise WireError(f"a top_p of {submit.sampling.top_p} is out of range")


def _check_token(token: NewToken) -> None:
    _in_range("sequence", token.sequence, 0, _U64)
    _in_range("position", token.position, 0, _U32)
    _in_range("token", token.token, 0, _I32)
    if math.isnan(token.logprob) or token.logprob > MAX_LOGPROB:
        raise WireError(f"a log-probability of {token.logprob} is out of range")


def _in_range(name: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise WireError(f"a {name} of {value} is not within {lowest} to {highest}")


def _flag(value: int, name: str) -> bool:
    if value not in (0, 1):
        raise WireError(f"{name} is {value}, neither 0 nor 1")
    return bool(value)


def _exact(meta: bytes | memoryview, size: int, kind: RecordKind) -> None:
    if memoryview(meta).nbytes != size:
        raise WireError(f"a {kind.name} record has {memoryview(meta).nbytes} bytes of meta, not {size}")


def _expect(record: Record, kind: RecordKind) -> None:
    if record.kind != kind:
        raise WireError(f"a {record.kind.name} record came where {kind.name} was due")


def _no_payload(record: Record) -> None:
    if record.dtype != PayloadType.NONE or memoryview(record.payload).nbytes:
        raise WireError(f"a {record.kind.name} record has a payload")
