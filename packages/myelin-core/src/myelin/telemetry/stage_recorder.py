"""What a stage did for each sequence: little arithmetic on the engine's thread, spans made of it elsewhere, afterwards.

A sequence gets at most two spans on each stage: one for its prompt, one that sums up all its new tokens. A traceparent
comes by the relay, not in the records of the edge, whose path stays as it is.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from opentelemetry import trace
from opentelemetry.trace import Link, Tracer
from opentelemetry.util.types import AttributeValue

from myelin.telemetry import attributes
from myelin.telemetry.tracing import context_from

KEPT_SEQUENCES = 4096
"""Sequences whose end, or whose submission, is remembered until it is told."""
MOST_LINKS = 16
PREFILL_SPAN = "myelin.stage.prefill"
DECODE_SPAN = "myelin.stage.decode"


class Piece(Protocol):
    """A segment of a batch."""

    @property
    def sequence(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def output(self) -> bool: ...


@dataclass(slots=True)
class Part:
    """The steps of one kind: Unix nanoseconds of the first one's begin and the last one's end, how many, their rows of
    this sequence, and the time that the engine took for them (whole batches)."""

    began_ns: int = 0
    ended_ns: int = 0
    steps: int = 0
    rows: int = 0
    busy_ns: int = 0

    def add(self, began_ns: int, ended_ns: int, rows: int) -> None:
        """One more step."""
        if not self.steps:
            self.began_ns = began_ns
        self.ended_ns = ended_ns
        self.steps += 1
        self.rows += rows
        self.busy_ns += ended_ns - began_ns


@dataclass(slots=True)
class SequenceRecord:
    """One sequence on one stage: its prompt, its new tokens, how many positions it holds, and with whom it shared a
    batch."""

    sequence: int
    prefill: Part = field(default_factory=Part)
    decode: Part = field(default_factory=Part)
    positions: int = 0
    prefilled: bool = False
    shared: set[int] = field(default_factory=set)


class StageRecorder:
    """Notes what a stage does. :meth:`step` and :meth:`released` belong to the engine's thread.

    Attributes:
        bytes_out: Bytes of records that went to the next node.
        rounds, round_ns: Micro-batches that went all around (seen by the head), and the time they took.
        queue_seconds: Waiting times of sequences that were admitted since :meth:`take_queue_seconds` was last called.
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self.bytes_out = 0
        self.rounds = 0
        self.round_ns = 0
        self._clock = clock
        self._live: dict[int, SequenceRecord] = {}
        self._done: deque[SequenceRecord] = deque(maxlen=KEPT_SEQUENCES)
        self._submitted: OrderedDict[int, tuple[str, int]] = OrderedDict()
        self._queued: deque[float] = deque(maxlen=KEPT_SEQUENCES)
        self._sent: dict[int, int] = {}

    @property
    def held_positions(self) -> int:
        """Positions whose keys and values are held."""
        return sum(record.positions for record in tuple(self._live.values()))

    def submitted(self, sequence: int, traceparent: str) -> None:
        """A sequence was submitted to the pipeline, for a request with this ``traceparent`` (empty: it isn't
        traced)."""
        self._submitted[sequence] = (traceparent, self._clock())
        while len(self._submitted) > KEPT_SEQUENCES:
            self._submitted.popitem(last=False)

    def step(self, segments: Sequence[Piece], began_ns: int, ended_ns: int) -> None:
        """A batch was computed."""
        live = self._live
        for segment in segments:
            record = live.get(segment.sequence)
            if record is None:
                record = live[segment.sequence] = self._admitted(segment.sequence, began_ns)
            part = record.decode if record.prefilled else record.prefill
            part.add(began_ns, ended_ns, segment.count)
            record.prefilled = record.prefilled or segment.output
            record.positions = segment.start + segment.count
        if len(segments) > 1:
            for segment in segments:
                shared = live[segment.sequence].shared
                if len(shared) <= MOST_LINKS:
                    shared.update(other.sequence for other in segments)

    def _admitted(self, sequence: int, now_ns: int) -> SequenceRecord:
        submitted = self._submitted.get(sequence)
        if submitted is not None:
            self._queued.append(max(0, now_ns - submitted[1]) / 1e9)
        return SequenceRecord(sequence)

    def released(self, sequences: Iterable[int]) -> None:
        """Sequences have ended."""
        for sequence in sequences:
            record = self._live.pop(sequence, None)
            if record is not None:
                self._done.append(record)

    def sent(self, object_id: int) -> None:
        """The head sends a micro-batch on its way."""
        if len(self._sent) < KEPT_SEQUENCES:
            self._sent[object_id] = self._clock()

    def returned(self, object_id: int) -> None:
        """A micro-batch's tokens are back at the head."""
        sent = self._sent.pop(object_id, None)
        if sent is not None:
            self.rounds += 1
            self.round_ns += max(0, self._clock() - sent)

    def new_epoch(self) -> None:
        """What was under way won't come back."""
        self._sent.clear()

    def take_queue_seconds(self) -> list[float]:
        """Waiting times that were not taken yet."""
        taken = []
        while self._queued:
            taken.append(self._queued.popleft())
        return taken

    def emit(self, tracer: Tracer, fields: Mapping[str, AttributeValue], *, last: bool = False) -> None:
        """Make spans of sequences that have ended, with ``last`` also of those that have not.

        A sequence whose request isn't traced gets none.
        """
        while self._done:
            self._spans_of(self._done.popleft(), tracer, fields)
        if last:
            for record in tuple(self._live.values()):
                self._spans_of(record, tracer, fields)

    def _spans_of(self, record: SequenceRecord, tracer: Tracer, fields: Mapping[str, AttributeValue]) -> None:
        parent = context_from(self._submitted.get(record.sequence, ("", 0))[0])
        if parent is None:
            return
        links = self._links(record)
        for name, part in ((PREFILL_SPAN, record.prefill), (DECODE_SPAN, record.decode)):
            if not part.steps:
                continue
            span = tracer.start_span(name, context=parent, start_time=part.began_ns, links=links)
            span.set_attributes(
                {
                    **fields,
                    attributes.SEQUENCE: record.sequence,
                    attributes.STEPS: part.steps,
                    attributes.ROWS: part.rows,
                    attributes.BUSY_SECONDS: part.busy_ns / 1e9,
                }
            )
            span.end(part.ended_ns)

    def _links(self, record: SequenceRecord) -> list[Link]:
        """Links to the requests that shared a batch with this one."""
        links = []
        for other in sorted(record.shared - {record.sequence})[:MOST_LINKS]:
            context = context_from(self._submitted.get(other, ("", 0))[0])
            if context is not None:
                where = trace.get_current_span(context).get_span_context()
                links.append(Link(where, {attributes.SEQUENCE: other}))
        return links
