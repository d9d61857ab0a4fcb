"""What the orchestrator and the head say to each other: round trips, range checks, and fuzzed bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import WireError
from myelin.values import GREEDY, Epoch, FinishReason, SamplingParams, SequenceId
from myelin.wire.record import PayloadType, Record, RecordFlags, RecordKind, pack, unpack
from myelin.wire.requests import (
    MAX_FAULT_TEXT_BYTES,
    Fault,
    Finished,
    NewToken,
    Submit,
    cancel_record,
    fault_record,
    finished_record,
    read_cancel,
    read_fault,
    read_finished,
    read_submit,
    read_tokens,
    submit_record,
    tokens_record,
)

EPOCH = Epoch(3)
sequences = st.integers(0, 2**64 - 1).map(SequenceId)
token_ids = st.integers(0, 2**31 - 1)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0.0, 100.0),
    top_k=st.integers(0, 2**32 - 1),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    seed=st.integers(0, 2**64 - 1),
)
submits = st.builds(
    Submit,
    sequence=sequences,
    prompt=st.lists(token_ids, min_size=1, max_size=20).map(tuple),
    max_tokens=st.integers(1, 2**32 - 1),
    sampling=samplings,
    ignore_end=st.booleans(),
)
new_tokens = st.builds(
    NewToken,
    sequence=sequences,
    position=st.integers(0, 2**32 - 1),
    token=token_ids,
    logprob=st.floats(max_value=0.0, allow_nan=False),
)
finisheds = st.builds(
    Finished, sequence=sequences, reason=st.sampled_from(FinishReason), generated=st.integers(0, 2**32 - 1)
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
faults = st.builds(Fault, reason=texts, message=texts, hint=texts, sequence=st.one_of(st.none(), sequences))

Reader = Callable[[Record], object]
messages = st.one_of(
    submits.map(lambda given: (submit_record(given, epoch=EPOCH, sequence=1), read_submit, given)),
    sequences.map(lambda given: (cancel_record(given, epoch=EPOCH, sequence=1), read_cancel, given)),
    st.lists(new_tokens, min_size=1, max_size=5)
    .map(tuple)
    .map(lambda given: (tokens_record(given, epoch=EPOCH, sequence=1), read_tokens, given)),
    finisheds.map(lambda given: (finished_record(given, epoch=EPOCH, sequence=1), read_finished, given)),
    faults.map(lambda given: (fault_record(given, epoch=EPOCH, sequence=1), read_fault, given)),
)


@given(messages)
def test_each_comes_back_as_it_was(message: tuple[Record, Reader, object]) -> None:
    record, read, given_value = message
    found = unpack(pack(record))
    assert (found.epoch, found.sequence) == (EPOCH, 1)
    assert read(found) == given_value


@given(messages, st.data())
def test_damaged_bytes_give_a_value_or_a_wire_error(
    message: tuple[Record, Reader, object], data: st.DataObject
) -> None:
    record, read, _ = message
    damaged = bytearray(pack(record))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        read(unpack(bytes(damaged)))
    except WireError:
        pass


@given(st.sampled_from(RecordKind), st.binary(max_size=80), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6))
def test_any_meta_gives_a_value_or_a_wire_error(kind: RecordKind, meta: bytes, payload: list[int]) -> None:
    data = b"".join(value.to_bytes(4, "little", signed=True) for value in payload)
    record = Record(kind, EPOCH, 1, 1, meta, data, PayloadType.INT32, 1, len(payload))
    for read in (read_submit, read_cancel, read_tokens, read_finished, read_fault):
        for candidate in (record, dataclasses.replace(record, payload=b"", dtype=PayloadType.NONE)):
            try:
                read(candidate)
            except WireError:
                pass


@given(messages)
def test_a_record_of_another_kind_is_refused(message: tuple[Record, Reader, object]) -> None:
    record, read, _ = message
    with pytest.raises(WireError, match="BATCH"):
        read(dataclasses.replace(record, kind=RecordKind.BATCH))


def submit(**changes: Any) -> Submit:
    return dataclasses.replace(Submit(SequenceId(1), (1, 2, 3), 10), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ()},
        {"prompt": (1, -1)},
        {"prompt": (2**31,)},
        {"max_tokens": 0},
        {"max_tokens": 2**32},
        {"sequence": 2**64},
        {"sequence": -1},
        {"sampling": SamplingParams(temperature=-0.1)},
        {"sampling": SamplingParams(temperature=math.nan)},
        {"sampling": SamplingParams(temperature=math.inf)},
        {"sampling": SamplingParams(top_k=-1)},
        {"sampling": SamplingParams(top_p=0.0)},
        {"sampling": SamplingParams(top_p=1.5)},
        {"sampling": SamplingParams(top_p=math.nan)},
        {"sampling": SamplingParams(seed=-1)},
        {"sampling": SamplingParams(seed=2**64)},
    ],
)
def test_a_request_out_of_range_is_not_packed(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        submit_record(submit(**changes), epoch=EPOCH, sequence=0)


def test_a_peers_numbers_are_checked_as_well() -> None:
    good = submit_record(submit(), epoch=EPOCH, sequence=0)
    assert read_submit(good) == submit()
    negative = dataclasses.replace(good, payload=b"\xff" * 12)
    no_tokens = dataclasses.replace(good, meta=b"\0\0\0\0" + bytes(good.meta)[4:])
    no_prompt = dataclasses.replace(good, payload=b"", columns=0)
    two_rows = dataclasses.replace(good, payload=bytes(24), rows=2)
    floats = dataclasses.replace(good, dtype=PayloadType.FLOAT32)
    for bad in (negative, no_tokens, no_prompt, two_rows, floats):
        with pytest.raises(WireError):
            read_submit(bad)


@pytest.mark.parametrize(
    "token",
    [
        NewToken(SequenceId(1), 0, -1, -1.0),
        NewToken(SequenceId(1), 0, 2**31, -1.0),
        NewToken(SequenceId(1), -1, 1, -1.0),
        NewToken(SequenceId(1), 2**32, 1, -1.0),
        NewToken(SequenceId(1), 0, 1, math.nan),
        NewToken(SequenceId(1), 0, 1, 0.1),
        NewToken(SequenceId(1), 0, 1, math.inf),
    ],
)
def test_a_token_out_of_range_is_not_packed(token: NewToken) -> None:
    with pytest.raises(WireError):
        tokens_record([token], epoch=EPOCH, sequence=0)


def test_a_record_of_tokens_has_some() -> None:
    with pytest.raises(WireError):
        tokens_record([], epoch=EPOCH, sequence=0)
    with pytest.raises(WireError):
        read_tokens(Record(RecordKind.TOKENS, EPOCH, 0, 0))


def test_the_flags_of_a_probe_are_kept() -> None:
    probe = RecordFlags.PROBE
    assert unpack(pack(submit_record(submit(), epoch=EPOCH, sequence=0, flags=probe))).flags == probe
    token = NewToken(SequenceId(1), 3, 4, -0.5)
    assert unpack(pack(tokens_record([token], epoch=EPOCH, sequence=0, flags=probe))).flags == probe


def test_an_unknown_reason_is_refused() -> None:
    record = finished_record(Finished(SequenceId(1), FinishReason.STOP, 5), epoch=EPOCH, sequence=0)
    for code in (0, 4, 255):
        with pytest.raises(WireError):
            read_finished(dataclasses.replace(record, meta=bytes(record.meta)[:-1] + bytes([code])))


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3))
def test_a_long_fault_is_cut_and_stays_text(piece: str) -> None:
    fault = Fault("engine", piece * MAX_FAULT_TEXT_BYTES, "hint")
    found = read_fault(unpack(pack(fault_record(fault, epoch=EPOCH, sequence=0))))
    assert fault.message.startswith(found.message)
    assert MAX_FAULT_TEXT_BYTES - 4 < len(found.message.encode()) <= MAX_FAULT_TEXT_BYTES
    assert (found.reason, found.hint, found.sequence) == ("engine", "hint", None)


def test_a_fault_of_one_sequence_names_it() -> None:
    fault = Fault("request", "too long", sequence=SequenceId(0))
    assert read_fault(unpack(pack(fault_record(fault, epoch=EPOCH, sequence=0)))) == fault


def test_greedy_is_what_a_request_is_without_more() -> None:
    assert read_submit(submit_record(Submit(SequenceId(1), (5,), 1), epoch=EPOCH, sequence=0)).sampling == GREEDY
