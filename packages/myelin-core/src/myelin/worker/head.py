"""The head's glue: requests from the orchestrator, the scheduler, stage 0, and tokens back.

Requests come as SUBMIT and CANCEL on the token-in edge. Each submitted sequence is answered by TOKENS and then exactly
one of: FINISHED; a FAULT that names the sequence, where its request can't be served (the pipeline is well); or a
FAULT that names none, where the pipeline can't go on and every sequence has ended with it. When an orchestrator's edge
drops, its sequences are cancelled.
"""

from __future__ import annotations

from collections.abc import Callable

from myelin.engine.contract import Sample
from myelin.errors import MyelinError, NodeError, RequestError, WireError
from myelin.values import Epoch, SequenceId
from myelin.wire.record import Record, RecordFlags, RecordKind, pack
from myelin.wire.requests import (
    Fault,
    Finished,
    NewToken,
    fault_record,
    finished_record,
    read_cancel,
    read_submit,
    tokens_record,
)
from myelin.worker.edge import EdgeLink
from myelin.worker.scheduler import Event, Scheduler, SchedulerLimits
from myelin.worker.stage import LoadedStage, Stage, Work


def scheduler_limits(loaded: LoadedStage) -> SchedulerLimits:
    """What the scheduler must keep to in front of a loaded head."""
    return SchedulerLimits(
        max_context=loaded.limits.max_context,
        max_sequences=loaded.limits.max_sequences,
        max_batch_tokens=loaded.limits.max_batch_tokens,
        vocab_size=loaded.vocab_size,
        stages=loaded.count,
        end_tokens=loaded.end_tokens,
    )


class Head:
    """Serves the orchestrator's edges in front of stage 0. The event loop owns it."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._scheduler = Scheduler(limits)
        self._stage: Stage | None = None
        self._epoch: Epoch | None = None
        self._owners: dict[SequenceId, tuple[EdgeLink, RecordFlags]] = {}
        self._links: set[EdgeLink] = set()
        self._untold: list[Event] = []

    @property
    def running(self) -> int:
        """Sequences that run."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        return self._scheduler.waiting

    def open(self, stage: Stage) -> None:
        """A new epoch has begun on ``stage``.

        Sequences of the older one are forgotten without a word: whoever opened the epoch submits them again.
        """
        self._stage = stage
        self._epoch = stage.epoch
        self._scheduler = Scheduler(self._limits)
        self._owners.clear()
        self._untold.clear()

    async def serve(self, link: EdgeLink) -> None:
        """Serve an orchestrator's edge until it ends.

        Raises:
            TransportError: It broke, or said something that isn't due.
        """
        self._links.add(link)
        try:
            await link.serve_records(lambda record: self._receive(link, record))
        finally:
            self._links.discard(link)
            self._drop(link)

    def on_samples(self, object_id: int, samples: tuple[Sample, ...]) -> None:
        """The tail's answer to a micro-batch: first keep the engine busy, then tell the orchestrator.

        An idle engine's thread needs the interpreter to begin, and would not get it while we pack and send. So the
        telling waits until that thread has its work in hand: it then happens beside the computing, not before it.
        """
        try:
            events = self._scheduler.complete(object_id, samples)
        except WireError as error:
            assert self._stage is not None
            self._stage.fail(error)
            return
        self._untold += events
        if not self._pump(on_start=self._tell):
            self._tell()

    def fail(self, error: MyelinError) -> None:
        """The pipeline can't go on: every sequence ends."""
        self._tell()
        self._scheduler = Scheduler(self._limits)
        self._owners.clear()
        fault = Fault(error.reason, error.message, error.hint)
        for link in self._links:
            self._push_fault(link, fault)

    def _receive(self, link: EdgeLink, record: Record) -> None:
        """A record came from an orchestrator."""
        if self._epoch is None or record.epoch > self._epoch:
            raise WireError(f"a record of epoch {record.epoch} came where {self._epoch} is open")
        if record.epoch < self._epoch:
            return
        if record.kind is RecordKind.SUBMIT:
            self._submit(link, record)
        elif record.kind is RecordKind.CANCEL:
            self._cancel(link, read_cancel(record))
        else:
            raise WireError(f"a {record.kind.name} record came from the orchestrator")

    def _submit(self, link: EdgeLink, record: Record) -> None:
        submit = read_submit(record)
        assert self._stage is not None
        try:
            if not self._stage.working:
                raise NodeError("the pipeline has failed", "wait for it to be rebuilt", reason="pipeline-lost")
            self._scheduler.submit(submit)
        except (RequestError, NodeError) as error:
            self._push_fault(link, Fault(error.reason, error.message, error.hint, submit.sequence))
            return
        self._owners[submit.sequence] = (link, record.flags)
        self._pump()

    def _cancel(self, link: EdgeLink, sequence: SequenceId) -> None:
        """Only its owner cancels a sequence; for one that has ended already, FINISHED is on its way."""
        owner = self._owners.get(sequence)
        if owner is not None and owner[0] is link:
            finished = self._scheduler.cancel(sequence)
            if finished is not None:
                self._untold.append(finished)
                self._tell()
            self._pump()

    def _drop(self, link: EdgeLink) -> None:
        """An orchestrator's edge has ended."""
        dropped = [sequence for sequence, owner in self._owners.items() if owner[0] is link]
        for sequence in dropped:
            self._scheduler.cancel(sequence)
            del self._owners[sequence]
        if dropped:
            self._pump()

    def _pump(self, on_start: Callable[[], None] | None = None) -> bool:
        """Send every micro-batch that may be sent now.

        Returns:
            Whether ``on_start`` will be called: when the engine's thread, which was idle, begins with the first.
        """
        stage = self._stage
        if stage is None or not stage.working:
            return False
        starts = False
        while (batch := self._scheduler.next_batch()) is not None:
            flags = RecordFlags.NONE
            for segment in batch.segments:
                owner = self._owners.get(segment.sequence)
                if owner is not None and owner[1] is not RecordFlags.NONE:
                    flags |= owner[1]
            first = stage.idle and on_start is not None
            starts = starts or first
            stage.submit(
                Work(
                    batch.id,
                    flags,
                    batch.segments,
                    batch.releases,
                    len(batch.tokens),
                    tokens=batch.tokens,
                    on_start=on_start if first else None,
                )
            )
        return starts

    def _tell(self) -> None:
        """Tell the orchestrators what they don't know yet: tokens in one record for each edge, then the ends."""
        if not self._untold:
            return
        events, self._untold = self._untold, []
        assert self._epoch is not None
        tokens: dict[EdgeLink, list[NewToken]] = {}
        ends: list[tuple[EdgeLink, Finished, RecordFlags]] = []
        for event in events:
            owner = self._owners.get(event.sequence)
            if owner is None:
                continue
            link, flags = owner
            if isinstance(event, NewToken):
                tokens.setdefault(link, []).append(event)
            else:
                del self._owners[event.sequence]
                ends.append((link, event, flags))
        for link, chosen in tokens.items():
            link.push(pack(tokens_record(chosen, epoch=self._epoch, sequence=link.number())))
        for link, finished, flags in ends:
            link.push(pack(finished_record(finished, epoch=self._epoch, sequence=link.number(), flags=flags)))

    def _push_fault(self, link: EdgeLink, fault: Fault) -> None:
        assert self._epoch is not None
        link.push(pack(fault_record(fault, epoch=self._epoch, sequence=link.number())))
