"""What a stage did for each sequence, as spans of its request."""

from __future__ import annotations

import itertools

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from myelin.engine.contract import Segment
from myelin.telemetry.stage_recorder import DECODE_SPAN, PREFILL_SPAN, StageRecorder
from myelin.telemetry.tracing import configure_tracing
from myelin.values import GREEDY, SequenceId

PARENTS = {number: f"00-{number:032x}-{number:016x}-01" for number in (1, 2, 3)}


def piece(sequence: int, start: int, count: int, output: bool) -> Segment:
    return Segment(SequenceId(sequence), start, count, output, GREEDY)


def spans_of(recorder: StageRecorder, *, last: bool = False) -> list[ReadableSpan]:
    kept = InMemorySpanExporter()
    tracing = configure_tracing("myelin-worker", (kept,))
    recorder.emit(tracing.tracer, {"myelin.node.id": "stage-0"}, last=last)
    tracing.shutdown()
    return list(kept.get_finished_spans())


def test_a_prompt_and_its_tokens_are_two_spans_however_many_steps_there_were() -> None:
    recorder = StageRecorder()
    recorder.submitted(1, PARENTS[1])
    recorder.step([piece(1, 0, 32, False)], 1_000, 1_100)
    recorder.step([piece(1, 32, 8, True)], 1_200, 1_250)
    for number in range(5):
        recorder.step([piece(1, 40 + number, 1, True)], 2_000 + 100 * number, 2_010 + 100 * number)
    assert recorder.held_positions == 45
    recorder.released([1])
    assert recorder.held_positions == 0
    prefill, decode = spans_of(recorder)
    assert (prefill.name, prefill.start_time, prefill.end_time) == (PREFILL_SPAN, 1_000, 1_250)
    assert (decode.name, decode.start_time, decode.end_time) == (DECODE_SPAN, 2_000, 2_410)
    assert (prefill.attributes or {})["myelin.stage.rows"] == 40
    assert (decode.attributes or {})["myelin.stage.rows"] == 5
    assert (decode.attributes or {})["myelin.stage.busy_seconds"] == 50e-9
    assert {span.parent.span_id for span in (prefill, decode) if span.parent} == {1}
    assert spans_of(recorder) == []


def test_a_batch_that_served_several_links_them() -> None:
    recorder = StageRecorder()
    for sequence, parent in PARENTS.items():
        recorder.submitted(sequence, parent)
    recorder.step([piece(1, 0, 4, True), piece(2, 0, 4, True)], 10, 20)
    recorder.step([piece(3, 0, 4, True)], 30, 40)
    recorder.released([1, 2, 3])
    linked = {
        span.parent.span_id: [link.context.span_id for link in span.links] for span in spans_of(recorder) if span.parent
    }
    assert linked == {1: [2], 2: [1], 3: []}


def test_a_request_that_is_not_traced_has_no_spans() -> None:
    recorder = StageRecorder()
    recorder.submitted(1, "")
    recorder.step([piece(1, 0, 4, True), piece(9, 0, 1, True)], 10, 20)
    recorder.released([1, 9])
    assert spans_of(recorder) == []


def test_a_sequence_that_has_not_ended_is_told_of_at_the_end() -> None:
    recorder = StageRecorder()
    recorder.submitted(1, PARENTS[1])
    recorder.step([piece(1, 0, 4, True)], 10, 20)
    assert spans_of(recorder) == []
    assert [span.name for span in spans_of(recorder, last=True)] == [PREFILL_SPAN]


def test_rounds_and_waiting_are_timed() -> None:
    ticks = itertools.count(0, 1_000_000)
    recorder = StageRecorder(lambda: next(ticks))
    recorder.submitted(1, "")  # at 0
    recorder.step([piece(1, 0, 4, True)], 500_000_000, 600_000_000)
    assert recorder.take_queue_seconds() == [0.5]
    assert recorder.take_queue_seconds() == []
    recorder.sent(7)  # at 1 ms
    recorder.sent(8)  # at 2 ms
    recorder.returned(7)  # at 3 ms
    recorder.new_epoch()
    recorder.returned(8)
    assert (recorder.rounds, recorder.round_ns) == (1, 2_000_000)


def test_what_is_remembered_is_bounded() -> None:
    recorder = StageRecorder()
    for sequence in range(10_000):
        recorder.submitted(sequence, PARENTS[1])
        recorder.step([piece(sequence, 0, 1, True)], 10, 20)
        recorder.released([sequence])
    assert len(spans_of(recorder)) == 4096
