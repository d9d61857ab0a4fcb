"""The scheduler: rules by example, and a state machine that submits, cancels and completes at random."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from myelin.engine.contract import Sample
from myelin.errors import RequestError, WireError
from myelin.values import FinishReason, SamplingParams, SequenceId
from myelin.wire.requests import Finished, NewToken, Submit
from myelin.worker.scheduler import MicroBatch, Scheduler, SchedulerLimits

VOCABULARY = 97
END = 13


def limits(**changes: int) -> SchedulerLimits:
    fields: dict[str, int] = {
        "max_context": 64,
        "max_sequences": 4,
        "max_batch_tokens": 32,
        "vocab_size": VOCABULARY,
        "stages": 1,
    }
    return SchedulerLimits(**{**fields, **changes}, end_tokens=frozenset({END}))


def submit(sequence: int, length: int = 3, max_tokens: int = 4, *, ignore_end: bool = True) -> Submit:
    prompt = tuple((sequence + index) % VOCABULARY for index in range(length))
    return Submit(SequenceId(sequence), prompt, max_tokens, ignore_end=ignore_end)


def token_at(sequence: int, position: int) -> int:
    """What the model of these tests says for a position."""
    return (sequence * 31 + position * 7) % VOCABULARY


def results(batch: MicroBatch) -> list[Sample]:
    return [
        Sample(one.sequence, one.start + one.count, token_at(one.sequence, one.start + one.count), -1.0)
        for one in batch.segments
        if one.output
    ]


def everything(scheduler: Scheduler) -> list[MicroBatch]:
    return list(iter(scheduler.next_batch, None))


def test_one_sequence_from_its_prompt_to_its_end() -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(submit(1, length=3, max_tokens=2))
    (first,) = everything(scheduler)
    assert [(one.start, one.count, one.output) for one in first.segments] == [(0, 3, True)]
    assert first.tokens.tolist() == [1, 2, 3]
    assert first.tokens.dtype == np.int32

    assert scheduler.complete(first.id, results(first)) == [NewToken(SequenceId(1), 3, token_at(1, 3), -1.0)]
    (second,) = everything(scheduler)
    assert [(one.start, one.count, one.output) for one in second.segments] == [(3, 1, True)]
    assert second.tokens.tolist() == [token_at(1, 3)]
    assert scheduler.complete(second.id, results(second)) == [
        NewToken(SequenceId(1), 4, token_at(1, 4), -1.0),
        Finished(SequenceId(1), FinishReason.LENGTH, 2),
    ]
    (last,) = everything(scheduler)
    assert (last.segments, last.releases, len(last.tokens)) == ((), (1,), 0)
    assert scheduler.next_batch() is None


def test_an_end_token_ends_and_is_not_passed_on() -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(submit(1, ignore_end=False))
    batch = scheduler.next_batch()
    assert batch is not None
    assert scheduler.complete(batch.id, [Sample(SequenceId(1), 3, END, -0.5)]) == [
        Finished(SequenceId(1), FinishReason.STOP, 0)
    ]


def test_an_end_token_may_be_ignored() -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(submit(1, ignore_end=True))
    batch = scheduler.next_batch()
    assert batch is not None
    assert scheduler.complete(batch.id, [Sample(SequenceId(1), 3, END, -0.5)]) == [
        NewToken(SequenceId(1), 3, END, -0.5)
    ]


def test_the_context_ends_a_sequence() -> None:
    scheduler = Scheduler(limits(max_context=5))
    scheduler.submit(submit(1, length=3, max_tokens=100))
    events = []
    while batch := scheduler.next_batch():
        if batch.segments:
            events += scheduler.complete(batch.id, results(batch))
    assert events[-1] == Finished(SequenceId(1), FinishReason.LENGTH, 2)


def test_prompts_are_chunked_the_same_whatever_else_runs() -> None:
    def chunks(others: int, stages: int) -> list[tuple[int, int]]:
        scheduler = Scheduler(limits(stages=stages, max_sequences=4))
        for other in range(others):
            scheduler.submit(submit(10 + other, length=5, max_tokens=30))
        flying: deque[MicroBatch] = deque()
        scheduler.submit(submit(1, length=45, max_tokens=1))
        found = []
        for _ in range(200):
            flying += everything(scheduler)
            if not flying:
                break
            batch = flying.popleft()
            found += [(one.start, one.count) for one in batch.segments if one.sequence == 1]
            if batch.segments:
                scheduler.complete(batch.id, results(batch))
        return found

    alone = chunks(0, 1)
    assert alone == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 8), (40, 5)]
    for others, stages in itertools.product((0, 1, 3), (1, 2, 3)):
        assert chunks(others, stages) == alone


def test_chunks_are_whole_blocks_where_they_can_be() -> None:
    assert limits(max_batch_tokens=512).prefill_chunk == 128
    assert limits(max_batch_tokens=200).prefill_chunk == 32
    assert limits(max_batch_tokens=32).prefill_chunk == 8
    assert limits(max_batch_tokens=1).prefill_chunk == 1


def test_chunks_of_one_prompt_follow_each_other_through_the_stages() -> None:
    scheduler = Scheduler(limits(stages=3))
    scheduler.submit(submit(1, length=30))
    assert [batch.segments[0].start for batch in everything(scheduler)] == [0, 8, 16]


@pytest.mark.parametrize(("sequences", "stages"), [(2, 2), (3, 2), (4, 2), (3, 3), (4, 3)])
def test_two_streams_keep_two_stages_busy(sequences: int, stages: int) -> None:
    scheduler = Scheduler(limits(stages=stages))
    for number in range(sequences):
        scheduler.submit(submit(number + 1, length=2, max_tokens=50))
    flying = deque(everything(scheduler))
    for _ in range(40):
        assert len(flying) == min(stages, -(-sequences // -(-sequences // stages)))
        batch = flying.popleft()
        scheduler.complete(batch.id, results(batch))
        flying += everything(scheduler)


def test_a_cancelled_sequence_is_dropped_and_released_in_order() -> None:
    scheduler = Scheduler(limits(max_sequences=1))
    scheduler.submit(submit(1))
    scheduler.submit(submit(2))
    batch = scheduler.next_batch()
    assert batch is not None
    assert scheduler.cancel(SequenceId(1)) == Finished(SequenceId(1), FinishReason.CANCELLED, 0)
    assert scheduler.cancel(SequenceId(1)) is None
    assert scheduler.next_batch() is None  # the one place in flight is taken
    assert scheduler.complete(batch.id, results(batch)) == []
    following = scheduler.next_batch()
    assert following is not None
    assert following.releases == (1,)
    assert [one.sequence for one in following.segments] == [2]


def test_a_sequence_that_waits_is_cancelled_without_a_release() -> None:
    scheduler = Scheduler(limits(max_sequences=1))
    scheduler.submit(submit(1))
    scheduler.submit(submit(2))
    scheduler.next_batch()
    assert scheduler.cancel(SequenceId(2)) == Finished(SequenceId(2), FinishReason.CANCELLED, 0)
    assert (scheduler.running, scheduler.waiting) == (1, 0)


def test_sampling_travels_with_every_output() -> None:
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=3)
    scheduler = Scheduler(limits())
    scheduler.submit(Submit(SequenceId(1), (1, 2), 4, sampling))
    batch = scheduler.next_batch()
    assert batch is not None
    scheduler.complete(batch.id, results(batch))
    batch = scheduler.next_batch()
    assert batch is not None
    assert batch.segments[0].sampling == sampling


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Submit(SequenceId(1), (), 1), "prompt-empty"),
        (submit(1, length=64), "prompt-too-long"),
        (submit(1, max_tokens=0), "max-tokens"),
        (Submit(SequenceId(1), (1, VOCABULARY), 1), "token-out-of-range"),
        (Submit(SequenceId(1), (-1,), 1), "token-out-of-range"),
    ],
)
def test_what_cannot_be_served_is_refused(request_: Submit, reason: str) -> None:
    scheduler = Scheduler(limits())
    with pytest.raises(RequestError) as caught:
        scheduler.submit(request_)
    assert caught.value.reason == reason
    assert scheduler.next_batch() is None


def test_the_longest_prompt_gives_one_token() -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(submit(1, length=63, max_tokens=9))
    events = []
    while batch := scheduler.next_batch():
        if batch.segments:
            events += scheduler.complete(batch.id, results(batch))
    assert events == [
        NewToken(SequenceId(1), 63, token_at(1, 63), -1.0),
        Finished(SequenceId(1), FinishReason.LENGTH, 1),
    ]


def test_results_must_be_those_that_are_due() -> None:
    scheduler = Scheduler(limits(stages=2))
    scheduler.submit(submit(1))
    scheduler.submit(submit(2))
    first, second = everything(scheduler)
    with pytest.raises(WireError, match="out of order"):
        scheduler.complete(second.id, results(second))
    with pytest.raises(WireError, match="0 tokens, not 1"):
        scheduler.complete(first.id, [])
    with pytest.raises(WireError, match="not 3 of 1"):
        scheduler.complete(first.id, [Sample(SequenceId(1), 4, 0, 0.0)])
    assert len(scheduler.complete(first.id, results(first))) == 1
    with pytest.raises(WireError, match="twice"):
        scheduler.submit(submit(1))


class Pipeline(RuleBasedStateMachine):
    """A scheduler in front of a model of the pipeline that checks every micro-batch against what it already saw."""

    @initialize(
        stages=st.integers(1, 4),
        max_sequences=st.integers(1, 5),
        max_batch_tokens=st.integers(1, 24),
        max_context=st.integers(2, 40),
    )
    def begin(self, stages: int, max_sequences: int, max_batch_tokens: int, max_context: int) -> None:
        self.limits = limits(
            stages=stages, max_sequences=max_sequences, max_batch_tokens=max_batch_tokens, max_context=max_context
        )
        self.scheduler = Scheduler(self.limits)
        self.numbers = itertools.count(1)
        self.submitted: dict[int, Submit] = {}
        self.finished: dict[int, Finished] = {}
        self.tokens: dict[int, list[int]] = {}
        self.held: dict[int, int] = {}  # positions that the engines hold of a sequence
        self.released: set[int] = set()
        self.flying: deque[MicroBatch] = deque()
        self.awaiting: set[int] = set()
        self.idle_rounds: dict[int, int] = {}

    @rule(length=st.integers(1, 45), max_tokens=st.integers(1, 12), ignore_end=st.booleans())
    def submit(self, length: int, max_tokens: int, ignore_end: bool) -> None:
        request = submit(next(self.numbers), length, max_tokens, ignore_end=ignore_end)
        if length + 1 > self.limits.max_context:
            with pytest.raises(RequestError):
                self.scheduler.submit(request)
        else:
            self.scheduler.submit(request)
            self.submitted[request.sequence] = request
            self.tokens[request.sequence] = []

    @rule(data=st.data())
    @precondition(lambda self: self.submitted)
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.submitted)))
        finished = self.scheduler.cancel(SequenceId(sequence))
        assert (finished is None) == (sequence in self.finished)
        if finished is not None:
            self.finish(finished)
            assert finished.reason is FinishReason.CANCELLED

    @rule()
    def send(self) -> None:
        batch = self.scheduler.next_batch()
        if batch is not None:
            self.accept(batch)

    @rule()
    @precondition(lambda self: self.flying)
    def complete(self) -> None:
        self.take_result()

    def take_result(self) -> None:
        batch = self.flying.popleft()
        for segment in batch.segments:
            self.awaiting.discard(segment.sequence)
        for event in self.scheduler.complete(batch.id, results(batch)):
            assert event.sequence not in self.finished, "nothing comes after the end"
            if isinstance(event, Finished):
                self.finish(event)
            else:
                request, tokens = self.submitted[event.sequence], self.tokens[event.sequence]
                assert event.position == len(request.prompt) + len(tokens), "positions are consecutive"
                assert event.token == token_at(event.sequence, event.position)
                tokens.append(event.token)

    def finish(self, finished: Finished) -> None:
        assert finished.sequence not in self.finished, "a sequence ends once"
        self.finished[finished.sequence] = finished
        request, tokens = self.submitted[finished.sequence], self.tokens[finished.sequence]
        assert finished.generated == len(tokens) <= request.max_tokens
        if finished.reason is FinishReason.STOP:
            assert not request.ignore_end
        if finished.reason is FinishReason.LENGTH:
            assert len(tokens) == request.max_tokens or len(request.prompt) + len(tokens) == self.limits.max_context

    def accept(self, batch: MicroBatch) -> None:
        bounds = self.limits
        assert len(self.flying) < bounds.stages
        for sequence in batch.releases:
            assert sequence in self.finished
            assert sequence not in self.released, "released once"
            self.released.add(sequence)
            del self.held[sequence]
        assert len(batch.releases) <= bounds.max_sequences
        rows = sum(segment.count for segment in batch.segments)
        assert rows == len(batch.tokens) <= bounds.max_batch_tokens
        assert len({segment.sequence for segment in batch.segments}) == len(batch.segments)
        offset = 0
        for segment in batch.segments:
            sequence = segment.sequence
            request = self.submitted[sequence]
            assert sequence not in self.finished
            assert sequence not in self.awaiting, "one awaited token for each sequence"
            assert segment.start == self.held.get(sequence, 0), "no gap, no rewind"
            assert segment.count >= 1
            end = segment.start + segment.count
            assert end <= bounds.max_context
            assert segment.output == (end >= len(request.prompt))
            assert segment.sampling == request.sampling
            known = [*request.prompt, *self.tokens[sequence]]
            assert batch.tokens[offset : offset + segment.count].tolist() == known[segment.start : end]
            offset += segment.count
            self.held[sequence] = end
            if segment.output:
                self.awaiting.add(sequence)
        assert len(self.held) <= bounds.max_sequences, "the engines have a place for each"
        if batch.segments:
            self.flying.append(batch)
            for held in list(self.held):
                seen = any(segment.sequence == held for segment in batch.segments)
                busy = held in self.awaiting or held in self.finished
                self.idle_rounds[held] = 0 if seen or busy else self.idle_rounds.get(held, 0) + 1
                assert self.idle_rounds[held] <= 2 * bounds.stages * bounds.max_sequences + 2, "starved"
        else:
            assert batch.releases

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "limits"):
            return
        assert self.scheduler.running <= self.limits.max_sequences
        alive = len(self.submitted) - len(self.finished)
        assert self.scheduler.running + self.scheduler.waiting == alive
        assert self.scheduler.in_flight == len(self.flying)

    def teardown(self) -> None:
        if not hasattr(self, "limits"):
            return
        for _ in range(10_000):
            while batch := self.scheduler.next_batch():
                self.accept(batch)
            if not self.flying:
                break
            self.take_result()
        assert set(self.finished) == set(self.submitted), "every submitted sequence ends"
        assert not self.held, "every sequence that the engines saw is released"
        assert self.scheduler.running == self.scheduler.waiting == 0


TestPipeline = Pipeline.TestCase
TestPipeline.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)


def test_a_running_sequence_is_not_starved_by_prompts_that_fill_every_batch() -> None:
    scheduler = Scheduler(
        SchedulerLimits(
            max_context=64, max_sequences=3, max_batch_tokens=1, vocab_size=97, stages=1, end_tokens=frozenset()
        )
    )
    for number, length in ((1, 1), (2, 40), (3, 40)):
        scheduler.submit(Submit(SequenceId(number), (5,) * length, 30))
    served = []
    for _ in range(30):
        batch = scheduler.next_batch()
        assert batch is not None
        (segment,) = batch.segments
        served.append(segment.sequence)
        position = segment.start + segment.count
        samples = [Sample(segment.sequence, position, 7, -1.0)] if segment.output else []
        scheduler.complete(batch.id, samples)
    assert served.count(1) >= 9
    assert served.count(2) >= 5
    assert served.count(3) >= 5
