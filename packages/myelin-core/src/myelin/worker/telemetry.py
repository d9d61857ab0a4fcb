"""What a node tells of itself: spans and, once a second, figures, into the outbox of its relay.

Made only where the orchestrator has asked for it. One daemon thread samples and makes the stages' spans; the event loop
and the engine's thread do no more than count.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import Span, Tracer
from opentelemetry.util.types import AttributeValue

from myelin import __version__
from myelin.cluster.provider import BootSpec
from myelin.telemetry import attributes
from myelin.telemetry import node_figures as names
from myelin.telemetry.otlp_metrics import Buckets, Point, gauge, histogram, metrics_request, total
from myelin.telemetry.relay import NodeRelay, Outbox, Stream
from myelin.telemetry.signals import Signal
from myelin.telemetry.stage_recorder import StageRecorder
from myelin.telemetry.tracing import WORKER_SERVICE, Tracing, configure_tracing, mark_failed
from myelin.worker.machine import MachineSampler

if TYPE_CHECKING:
    from myelin.worker.head import Head
    from myelin.worker.stage import Stage

NODE_VARIABLE = "MYELIN_NODE_TELEMETRY"
"""Which signals to relay, separated by commas."""
SAMPLE_SECONDS = 1.0
FINISH_SECONDS = 2.0
"""How long the last of it may take to leave, at the end."""


class NodeTelemetry:
    """See the module's text.

    Args:
        boot: Who this node is.
        signals: What to relay.
        environment: The SDK's limits.

    Attributes:
        tracing: The node's tracer.
        recorder: Notes what the stage does.
    """

    def __init__(self, boot: BootSpec, signals: frozenset[Signal], environment: Mapping[str, str]) -> None:
        self.recorder = StageRecorder()
        self._outbox = Outbox()
        self._relay = NodeRelay(self._outbox, self.recorder.submitted)
        self._signals = signals
        self._instance = f"{boot.run}.{boot.node}.{boot.attempt}"
        self._fields: dict[str, str | int] = {attributes.NODE: str(boot.node), attributes.ATTEMPT: int(boot.attempt)}
        self._stage: Stage | None = None
        self._head: Head | None = None
        self._queue = Buckets(names.QUEUE_BUCKETS)
        self._machine = MachineSampler()
        self._began_ns = time.time_ns()
        self._last: dict[str, float] = {}
        self._spans_lost = 0
        self._ended = threading.Event()
        self._sampling = threading.Lock()
        self.tracing: Tracing = configure_tracing("", ())
        if Signal.TRACES in signals:
            from myelin.telemetry.relay_exporter import into_outbox

            self.tracing = configure_tracing(
                WORKER_SERVICE,
                (into_outbox(self._outbox),),
                instance=self._instance,
                fixed=True,
                environment=environment,
            )
        self._thread = threading.Thread(target=self._run, name="myelin-figures", daemon=True)
        self._thread.start()

    async def serve(self, stream: Stream) -> None:
        """Serve the orchestrator's telemetry stream until it ends."""
        await self._relay.serve(stream)

    def attach(self, stage: Stage, head: Head | None) -> None:
        """The node has loaded its stage."""
        stage.recorder = self.recorder
        self._stage, self._head = stage, head
        self._fields[attributes.STAGE] = stage.loaded.index

    async def finish(self) -> None:
        """Send the last of it, within :data:`FINISH_SECONDS`."""
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await asyncio.to_thread(self._gather, True)
                await self._relay.finish(FINISH_SECONDS)
        except TimeoutError:
            pass

    def close(self) -> None:
        """End the threads. Blocking, for a moment."""
        self._ended.set()
        self.tracing.shutdown(0.5)

    # In the sampling thread.

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._gather(False)

    def _gather(self, last: bool) -> None:
        with self._sampling:
            if self.tracing.recording:
                self.recorder.emit(self.tracing.tracer, self._span_fields(), last=last)
                if last:
                    self.tracing.flush()
                lost = self.tracing.dropped
                self._outbox.count_dropped(Signal.TRACES, lost - self._spans_lost)
                self._spans_lost = lost
            if Signal.METRICS in self._signals:
                self._sample()

    def _span_fields(self) -> dict[str, AttributeValue]:
        fields: dict[str, AttributeValue] = dict(self._fields)
        if self._stage is not None:
            piece = self._stage.loaded.slice
            fields[attributes.FIRST_LAYER], fields[attributes.END_LAYER] = piece.first_layer, piece.end_layer
        return fields

    def _sample(self) -> None:
        now = time.time_ns()
        resource = {
            attributes.SERVICE_NAME: WORKER_SERVICE,
            attributes.SERVICE_VERSION: __version__,
            attributes.SERVICE_INSTANCE_ID: self._instance,
        }
        points = self._points()
        request = metrics_request(resource, points, began_ns=self._began_ns, now_ns=now, version=__version__)
        self._outbox.put(Signal.METRICS, request.SerializeToString(), len(points))

    def _points(self) -> list[Point]:
        fields = dict(self._fields)
        points = [
            gauge(each.name, each.unit, each.value, {**fields, **each.attributes}, each.description)
            for each in self._machine.sample()
        ]
        stage, recorder = self._stage, self.recorder
        if stage is None:
            return points
        steps, rows, busy = stage.steps, stage.rows, stage.busy_seconds
        passed, stepped, worked = (
            self._since("time", time.monotonic()),
            self._since("steps", steps),
            self._since("busy", busy),
        )
        limits = stage.loaded.limits
        points += [
            total(names.STEPS, "{step}", steps, fields, "batches that the stage has computed"),
            total(names.ROWS, "{row}", rows, fields, "rows of hidden state that it has computed"),
            total(names.BUSY, "s", busy, fields, "time that its engine took for them"),
            gauge(
                names.BUSY_SHARE,
                "1",
                min(1.0, worked / passed) if passed > 0 else 0.0,
                fields,
                "share of the last second",
            ),
            total(names.RECORD_BYTES, "By", recorder.bytes_out, fields, "bytes of records that went to the next node"),
            gauge(
                names.KV_USAGE,
                "1",
                recorder.held_positions / (limits.max_sequences * limits.max_context),
                fields,
                "share of the positions for keys and values that are in use",
            ),
        ]
        if stepped > 0:
            points.append(gauge(names.STEP_DURATION, "s", worked / stepped, fields, "one step, on average"))
        if self._head is not None:
            points += self._head_points(self._head, fields)
        return points

    def _head_points(self, head: Head, fields: Mapping[str, str | int]) -> list[Point]:
        recorder = self.recorder
        for seconds in recorder.take_queue_seconds():
            self._queue.add(seconds)
        points = [
            gauge(names.RUNNING, "{sequence}", head.running, fields, "sequences that hold a place"),
            gauge(names.WAITING, "{sequence}", head.waiting, fields, "sequences that wait for a place"),
            histogram(names.QUEUE_DURATION, "s", self._queue, fields, "from submission to the first step"),
        ]
        rounds, took = self._since("rounds", recorder.rounds), self._since("round", recorder.round_ns)
        if rounds > 0:
            points.append(gauge(names.ROUND_DURATION, "s", took / rounds / 1e9, fields, "a micro-batch, all around"))
        return points

    def _since(self, name: str, value: float) -> float:
        """What ``value`` has grown by since this was last asked."""
        before, self._last[name] = self._last.get(name, value if name == "time" else 0.0), value
        return value - before


def node_telemetry(boot: BootSpec, environment: Mapping[str, str]) -> NodeTelemetry | None:
    """The node's telemetry, where the orchestrator wants any."""
    wanted = environment.get(NODE_VARIABLE, "")
    signals = frozenset(signal for signal in Signal if signal.value in wanted.split(","))
    if not signals or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    return NodeTelemetry(boot, signals, environment)


class LoadSpans:
    """A child span for each phase of loading a stage (``open``, ``fetch``, ``compile``, ``load``), with how much of it
    there was. Told by the engine's thread, one phase after another."""

    def __init__(self, tracer: Tracer, parent: Span, fields: Mapping[str, AttributeValue]) -> None:
        self._tracer = tracer
        self._context = trace.set_span_in_context(parent)
        self._fields = dict(fields)
        self._phase = ""
        self._span: Span | None = None
        self._told = (0, 0)

    def progress(self, phase: str, done: int, total: int) -> None:
        """The loading got further."""
        if phase != self._phase:
            self.end()
            self._phase = phase
            self._span = self._tracer.start_span(
                f"worker.load.{phase}", context=self._context, attributes={**self._fields, attributes.LOAD_PHASE: phase}
            )
        self._told = (done, total)

    def end(self, error: BaseException | None = None) -> None:
        """The phase is over."""
        if self._span is not None:
            done, total = self._told
            self._span.set_attributes({attributes.LOAD_DONE: done, attributes.LOAD_TOTAL: total})
            if error is not None:
                mark_failed(self._span, error)
            self._span.end()
            self._span, self._told = None, (0, 0)
