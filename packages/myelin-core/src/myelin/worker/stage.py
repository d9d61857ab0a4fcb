"""A loaded stage at work: records come in, the engine computes them on its thread, records go out.

The path of a token through a stage is: a link's reader hands a record to :meth:`Stage.receive`, which checks it and
posts it to the engine's thread; there it is computed and packed for the next node, and, where the outgoing link is a
direct one, sent; otherwise the packed bytes are pushed to the link on the event loop. No task is made for a record, and
the event loop never computes.

Records belong to an epoch. Those of an older one are dropped wherever they are met: on arrival, before they are
computed, and before they are sent. A new epoch begins with empty caches on every stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from myelin.engine.contract import Engine, LoadReport, Sample, Segment, StageBatch, StageOutput
from myelin.errors import EngineError, MyelinError, NodeError, TransportError, WireError
from myelin.model.shard import ShardPlan, StageSlice
from myelin.telemetry.stage_recorder import StageRecorder
from myelin.values import Epoch, SequenceId
from myelin.wire.record import PayloadType, Record, RecordFlags, RecordKind, beginning, pack
from myelin.wire.requests import Fault, fault_record, read_fault
from myelin.worker.edge import EdgeLink
from myelin.worker.engine_thread import EngineThread
from myelin.worker.rehearsal import HeadRehearsal, StageRehearsal
from myelin.worker.segments import BatchLimits, pack_batch, pack_samples, unpack_batch, unpack_samples


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """An engine with its stage loaded, and what else its node must know to serve it.

    Attributes:
        engine: Owned by the thread that loaded it.
        slice: Its layers.
        index, count: Which stage of how many.
        width: Columns of the hidden rows that cross an edge.
        vocab_size: Token ids are below it.
        limits: What a batch may be.
        end_tokens: Ids that end a generation.
        report: The engine's, from loading.
        fetched_bytes: Tensor bytes that were read of the model.
        threads: Compute threads.
        close_model: Frees the model's files, once the engine is closed: engines may read them as long as they live.
        shard: Which bytes of the model it needs.
        network_bytes: What of them came over the network; the rest was on this host already.
    """

    engine: Engine
    slice: StageSlice
    index: int
    count: int
    width: int
    vocab_size: int
    limits: BatchLimits
    end_tokens: frozenset[int]
    report: LoadReport
    fetched_bytes: int
    threads: int
    close_model: Callable[[], None] = lambda: None
    shard: ShardPlan | None = None
    network_bytes: int = 0

    def close(self) -> None:
        """Free the engine, then the model's files. On the engine's thread."""
        self.engine.close()
        self.close_model()


class Work:
    """One micro-batch for the engine's thread.

    It has ``tokens`` for a head, and ``hidden`` (the payload's bytes) for any other stage. ``on_start``, if given, is
    called on the event loop once the engine's thread has it in hand.
    """

    __slots__ = ("flags", "hidden", "object_id", "on_start", "releases", "rows", "segments", "tokens")

    def __init__(
        self,
        object_id: int,
        flags: RecordFlags,
        segments: tuple[Segment, ...],
        releases: tuple[SequenceId, ...],
        rows: int,
        *,
        tokens: NDArray[np.int32] | None = None,
        hidden: bytes | memoryview = b"",
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self.object_id = object_id
        self.flags = flags
        self.segments = segments
        self.releases = releases
        self.rows = rows
        self.tokens = tokens
        self.hidden = hidden
        self.on_start = on_start


class Route(Protocol):
    """Where a stage's results go within one epoch.

    Attributes:
        epoch: The epoch.
        direct: Whether :meth:`deliver` is called on the engine's thread, too.
    """

    epoch: Epoch
    direct: bool

    def begin(self, work: Work, width: int) -> bytes:
        """On the engine's thread, before the step: what can be packed of its result, whose rows have ``width`` columns.

        After the step, the processor's caches hold weights and little else; before it, the same takes a fraction.
        """

    def finish(self, work: Work, output: StageOutput, begun: bytes) -> object:
        """On the engine's thread: what :meth:`deliver` needs, none of it in the engine's buffers; or None."""

    def deliver(self, finished: object) -> None:
        """On the event loop, or where the route is direct on the engine's thread.

        Raises:
            TransportError: It can't be sent.
        """

    def close(self) -> None:
        """The epoch is over."""


class ActivationRoute:
    """Hidden rows, as the engine gives them, to the next stage; releases too, with or without rows."""

    def __init__(self, epoch: Epoch, link: EdgeLink) -> None:
        self.epoch = epoch
        self.link = link
        self.direct = link.direct

    def begin(self, work: Work, width: int) -> bytes:
        """The record up to the hidden rows."""
        return beginning(
            RecordKind.BATCH,
            self.epoch,
            work.object_id,
            self.link.number(),
            meta=pack_batch(work.segments, work.releases),
            dtype=PayloadType.FLOAT32 if work.rows else PayloadType.NONE,
            rows=work.rows,
            columns=width if work.rows else 0,
            flags=work.flags,
        )

    def finish(self, work: Work, output: StageOutput, begun: bytes) -> bytes:
        """The BATCH record for the next stage."""
        return begun if output.hidden is None else b"".join((begun, output.hidden.data.cast("B")))

    def deliver(self, finished: object) -> None:
        """Push it."""
        assert isinstance(finished, bytes)
        self.link.push(finished)

    def close(self) -> None:
        """Close the link."""
        self.link.close()


class SamplesRoute:
    """Chosen tokens from the tail to the head: one record for each micro-batch, also where no token was due."""

    def __init__(self, epoch: Epoch, link: EdgeLink) -> None:
        self.epoch = epoch
        self.link = link
        self.direct = link.direct

    def begin(self, work: Work, width: int) -> bytes:
        """Nothing is known yet."""
        return b""

    def finish(self, work: Work, output: StageOutput, begun: bytes) -> bytes | None:
        """The SAMPLES record; none for releases alone."""
        if not work.segments:
            return None
        return beginning(
            RecordKind.SAMPLES,
            self.epoch,
            work.object_id,
            self.link.number(),
            meta=pack_samples(output.samples),
            flags=work.flags,
        )

    def deliver(self, finished: object) -> None:
        """Push it."""
        assert isinstance(finished, bytes)
        self.link.push(finished)

    def close(self) -> None:
        """Close the link."""
        self.link.close()


class LocalRoute:
    """Chosen tokens to the head in the same process: a pipeline of one stage."""

    def __init__(self, epoch: Epoch, on_samples: Callable[[int, tuple[Sample, ...]], None]) -> None:
        self.epoch = epoch
        self.direct = False  # the scheduler is the event loop's
        self._on_samples = on_samples

    def begin(self, work: Work, width: int) -> bytes:
        """Nothing is packed."""
        return b""

    def finish(self, work: Work, output: StageOutput, begun: bytes) -> tuple[int, tuple[Sample, ...]] | None:
        """The micro-batch and its tokens; none for releases alone."""
        return (work.object_id, output.samples) if work.segments else None

    def deliver(self, finished: object) -> None:
        """Hand them over."""
        assert isinstance(finished, tuple)
        self._on_samples(*finished)

    def close(self) -> None:
        """Nothing to close."""


class Stage:
    """One stage and its edges, within one epoch after another.

    Args:
        loaded: The engine and its stage.
        thread: The thread that loaded it.
        on_fault: Told once an epoch, at most, that the pipeline can't go on: why, and whether the fault is this node's
            own (and not one that another node has told of).
        on_samples: Head only: told of the results of a micro-batch.

    Attributes:
        epoch: The current one; None before the first.
        steps, rows, busy_seconds: Steps computed, their rows, and the time the engine took for them.
        dead: The engine has failed; no epoch can be opened any more.
        recorder: Notes what is done for whom; None where nobody wants to know.
    """

    def __init__(
        self,
        loaded: LoadedStage,
        thread: EngineThread,
        *,
        on_fault: Callable[[MyelinError, bool], None],
        on_samples: Callable[[int, tuple[Sample, ...]], None],
    ) -> None:
        self.loaded = loaded
        self.epoch: Epoch | None = None
        self.steps = 0
        self.rows = 0
        self.busy_seconds = 0.0
        self.dead = False
        self.recorder: StageRecorder | None = None
        self._thread = thread
        self._on_fault = on_fault
        self._on_samples = on_samples
        self._route: Route | None = None
        self._upstream: EdgeLink | None = None
        self._posted = 0  # micro-batches given to the engine's thread
        self._computed = 0  # those that it is through with; the engine's thread's own
        self._rehearse = HeadRehearsal(loaded.count) if loaded.index == 0 else StageRehearsal(loaded.width)
        self._alive: set[SequenceId] = set()  # the engine's thread's own

    @property
    def is_head(self) -> bool:
        """Whether this is stage 0."""
        return self.loaded.index == 0

    def open(self, route: Route) -> None:
        """Begin the route's epoch: older work is dropped, the engine forgets every sequence.

        Raises:
            WireError: The epoch isn't newer than the current one.
            EngineError: The engine has failed before.
        """
        if self.dead:
            raise EngineError("the engine has failed", "start the node anew", reason="engine-dead")
        if self.epoch is not None and route.epoch <= self.epoch:
            raise WireError(f"epoch {route.epoch} was to be opened after {self.epoch}")
        if self._route is not None:
            self._route.close()
        self.epoch = route.epoch
        self._route = route
        self._thread.post(self._forget_all, (), _nothing, self._engine_failed)

    def close(self) -> None:
        """Leave the pipeline: nothing goes out any more."""
        if self._route is not None:
            self._route.close()
            self._route = None

    def attach_upstream(self, link: EdgeLink) -> EdgeLink | None:
        """Take ``link`` as the one that records come from; the one before it, if there was any."""
        before, self._upstream = self._upstream, link
        return before

    def detach_upstream(self, link: EdgeLink) -> bool:
        """``link`` has ended; whether it was the current one."""
        if self._upstream is not link:
            return False
        self._upstream = None
        return True

    def sends_on(self, link: EdgeLink) -> bool:
        """Whether ``link`` is where the current epoch's results go."""
        return getattr(self._route, "link", None) is link

    @property
    def working(self) -> bool:
        """Whether an epoch is open and has met no fault."""
        return self._route is not None

    @property
    def idle(self) -> bool:
        """Whether the engine's thread has nothing to compute."""
        return self._posted == self._computed

    def receive(self, record: Record) -> None:
        """A record came from the stage before (or, at the head, from the tail).

        Raises:
            WireError: It isn't one that is due here.
        """
        if self.epoch is None or record.epoch > self.epoch:
            raise WireError(f"a record of epoch {record.epoch} came where {self.epoch} is open")
        route = self._route
        if record.epoch < self.epoch or route is None:
            return
        if self.is_head:
            if record.kind is not RecordKind.SAMPLES:
                raise WireError(f"a {record.kind.name} record came to the head")
            loaded = self.loaded
            samples = unpack_samples(record.meta, vocab_size=loaded.vocab_size, limits=loaded.limits)
            if self.recorder is not None:
                self.recorder.returned(record.object_id)
            self._on_samples(record.object_id, samples)
            return
        if record.kind is not RecordKind.BATCH:
            raise WireError(f"a {record.kind.name} record came to stage {self.loaded.index}")
        rows = record.rows
        segments, releases = unpack_batch(record.meta, rows, self.loaded.limits)
        if segments and (record.dtype is not PayloadType.FLOAT32 or record.columns != self.loaded.width):
            raise WireError(
                f"{rows} hidden rows came as {record.columns} {record.dtype.name}, not {self.loaded.width} float32"
            )
        self.submit(Work(record.object_id, record.flags, segments, releases, rows, hidden=record.payload))

    def receive_from_downstream(self, record: Record) -> None:
        """A record came back from the node that this one sends to: only a fault may.

        Raises:
            WireError: It is something else.
        """
        if record.kind is not RecordKind.FAULT:
            raise WireError(f"a {record.kind.name} record came back from the next stage")
        if self.epoch == record.epoch:
            fault = read_fault(record)
            self.fail(NodeError(fault.message, fault.hint, reason=fault.reason), told=True)

    def submit(self, work: Work) -> None:
        """Have the engine compute ``work``; its result goes the way of the current route."""
        route = self._route
        if route is not None:
            self._posted += 1
            if self.recorder is not None and work.segments and self.is_head:
                self.recorder.sent(work.object_id)
            self._thread.post(self._compute, (work, route), None, self._engine_failed)

    def fail(self, error: MyelinError, *, fatal: bool = False, told: bool = False) -> None:
        """The pipeline can't go on in this epoch. Tells the stage before, and :attr:`on_fault`; the first one counts.

        Args:
            fatal: The engine can't go on either.
            told: The fault is another node's, which has told the orchestrator itself.
        """
        self.dead = self.dead or fatal
        route, self._route = self._route, None
        if route is None:
            return
        if self._upstream is not None and not self.is_head:
            fault = Fault(error.reason, error.message, error.hint)
            number = self._upstream.number()
            self._upstream.push(pack(fault_record(fault, epoch=route.epoch, sequence=number)))
        route.close()
        self._on_fault(error, not told)

    def _engine_failed(self, error: BaseException) -> None:
        """The engine raised."""
        if not isinstance(error, MyelinError):
            error = EngineError(
                f"the engine failed: {type(error).__name__}: {error}",
                "--log-level debug shows what it wrote",
                reason="engine-fault",
            )
        self.fail(error, fatal=True)

    def _deliver(self, route: Route, finished: object) -> None:
        """A result is ready, of this epoch or an older one. On the event loop, or the engine's thread."""
        if route is not self._route:
            return
        try:
            route.deliver(finished)
        except TransportError as error:
            self._thread.notify(self.fail, error)
        else:
            if self.recorder is not None and isinstance(finished, bytes):
                self.recorder.bytes_out += len(finished)

    # What follows runs on the engine's thread.

    def _forget_all(self) -> None:
        for sequence in self._alive:
            self.loaded.engine.release(sequence)
        if self.recorder is not None:
            self.recorder.released(self._alive)
            self.recorder.new_epoch()
        self._alive.clear()

    def _compute(self, work: Work, route: Route) -> None:
        if work.on_start is not None:
            self._thread.notify(work.on_start)
        try:
            # None where a new epoch, or a fault, came meanwhile.
            finished = self._finished(work, route) if route is self._route else None
        finally:
            self._computed += 1
        if finished is None:
            return
        if route.direct:
            self._deliver(route, finished)
            if self._posted == self._computed:
                self._rehearse()
        else:
            self._thread.notify(self._deliver, route, finished)

    def _finished(self, work: Work, route: Route) -> object:
        """Compute it, and make what the route sends of the result."""
        engine, alive, recorder = self.loaded.engine, self._alive, self.recorder
        for sequence in work.releases:
            alive.discard(sequence)
            engine.release(sequence)
        if recorder is not None and work.releases:
            recorder.released(work.releases)
        output = _NOTHING
        begun = route.begin(work, self.loaded.width)
        if work.segments:
            began = time.perf_counter()
            began_ns = time.time_ns() if recorder is not None else 0
            hidden = None
            if work.tokens is None:
                # A copy: the engine may overwrite it, and it is aligned, which bytes within a record need not be.
                hidden = np.frombuffer(work.hidden, dtype="<f4").reshape(work.rows, self.loaded.width).copy()
            for segment in work.segments:
                alive.add(segment.sequence)
            output = engine.step(StageBatch(work.segments, work.tokens, hidden))
            self.busy_seconds += time.perf_counter() - began
            self.steps += 1
            self.rows += work.rows
            if recorder is not None:
                recorder.step(work.segments, began_ns, time.time_ns())
            if not self.loaded.slice.is_tail:
                _check_hidden(output.hidden, work.rows, self.loaded.width)
        return route.finish(work, output, begun)


_NOTHING = StageOutput()


def _nothing(_: object) -> None:
    """Nothing follows."""


def _check_hidden(hidden: NDArray[np.float32] | None, rows: int, width: int) -> None:
    """What an engine gave must be what goes on an edge."""
    if hidden is None or hidden.shape != (rows, width) or hidden.dtype != np.float32 or not hidden.flags.c_contiguous:
        given = "nothing" if hidden is None else f"{hidden.dtype} of shape {hidden.shape}"
        raise EngineError(
            f"the engine gave {given} where float32 of shape ({rows}, {width}) was due",
            "report this to the engine's authors",
            reason="engine-output",
        )
