"""Telling what a run does: each phase is a span under the run's root span, and a pair of events for the observer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from myelin.errors import MyelinError
from myelin.orchestrator.events import Observer, PhaseEvent
from myelin.telemetry import attributes
from myelin.telemetry.phases import RECOVERY, RECOVERY_SPAN, ROOT_SPAN, Phase
from myelin.telemetry.tracing import Tracing, mark_failed, span, traceparent
from myelin.values import Attempt, NodeId, RunId


class Story:
    """The spans and events of one run.

    Phases are children of the root span by their context, not by what happens to be current: a run lives across a
    ``yield``, where a current span would leak into the caller.
    """

    def __init__(self, tracing: Tracing, observer: Observer, run: RunId, began_ns: int) -> None:
        self.tracing = tracing
        self._observer = observer
        self._root = tracing.tracer.start_span(
            ROOT_SPAN, context=trace.set_span_in_context(trace.INVALID_SPAN), start_time=began_ns
        )
        self._root.set_attribute(attributes.RUN, run)

    @property
    def root(self) -> Span:
        """The root span."""
        return self._root

    def past(self, phase: Phase, began_ns: int, ended_ns: int) -> None:
        """Tell of a phase that was over before there was anybody to tell."""
        past = self.tracing.tracer.start_span(
            phase.span_name, context=trace.set_span_in_context(self._root), start_time=began_ns
        )
        past.end(ended_ns)
        self._observer.phase(PhaseEvent(phase.value, "started"))
        self._observer.phase(PhaseEvent(phase.value, "done", (ended_ns - began_ns) / 1e9))

    @contextmanager
    def phase(
        self, phase: Phase, fields: Mapping[str, AttributeValue] | None = None, *, start_ns: int | None = None
    ) -> Iterator[Span]:
        """A phase around a block: its span is current inside. It began at ``start_ns`` (Unix nanoseconds), if not
        now."""
        began = time.perf_counter()
        self._observer.phase(PhaseEvent(phase.value, "started"))
        try:
            with (
                trace.use_span(self._root, record_exception=False, set_status_on_exception=False),
                span(self.tracing.tracer, phase.span_name, fields, start_ns=start_ns) as current,
            ):
                yield current
        except BaseException as error:
            detail = error.message if isinstance(error, MyelinError) else type(error).__name__
            self._observer.phase(PhaseEvent(phase.value, "failed", time.perf_counter() - began, detail))
            raise
        self._observer.phase(PhaseEvent(phase.value, "done", time.perf_counter() - began))

    @contextmanager
    def node(
        self, phase: Phase, node: NodeId, attempt: Attempt | None, fields: Mapping[str, AttributeValue] | None = None
    ) -> Iterator[Span]:
        """One node's part of the phase that is current."""
        own: dict[str, AttributeValue] = {attributes.NODE: node, **(fields or {})}
        if attempt is not None:
            own[attributes.ATTEMPT] = attempt
        with span(self.tracing.tracer, phase.node_span_name, own) as current:
            yield current

    @contextmanager
    def recovery(self) -> Iterator[Span]:
        """One recovery around a block, told as a phase of its own: it may come any number of times, or never."""
        began = time.perf_counter()
        self._observer.phase(PhaseEvent(RECOVERY, "started"))
        try:
            with (
                trace.use_span(self._root, record_exception=False, set_status_on_exception=False),
                span(self.tracing.tracer, RECOVERY_SPAN) as current,
            ):
                yield current
        except BaseException as error:
            detail = error.message if isinstance(error, MyelinError) else type(error).__name__
            self._observer.phase(PhaseEvent(RECOVERY, "failed", time.perf_counter() - began, detail))
            raise
        self._observer.phase(PhaseEvent(RECOVERY, "done", time.perf_counter() - began))

    def begin_serving(self) -> Serving:
        """The serving phase, which lasts across the caller's own code and is therefore current nowhere."""
        return Serving(self.tracing, self._observer, self._root)

    def end(self, error: BaseException | None) -> None:
        """The run is over."""
        if error is not None:
            mark_failed(self._root, error)
        self._root.end()


class Serving:
    """The span of the serving phase. ``trace_parent`` is its W3C form, for spans of requests."""

    def __init__(self, tracing: Tracing, observer: Observer, root: Span) -> None:
        self._observer = observer
        self._began = time.perf_counter()
        self._span = tracing.tracer.start_span(Phase.SERVING.span_name, context=trace.set_span_in_context(root))
        self.trace_parent = traceparent(self._span)
        observer.phase(PhaseEvent(Phase.SERVING.value, "started"))

    def end(self, requests: int, error: MyelinError | None) -> None:
        """Serving is over, because the pipeline was lost (``error``) or because nobody wants more of it."""
        self._span.set_attribute(attributes.REQUESTS, requests)
        if error is not None:
            mark_failed(self._span, error)
        self._span.end()
        state, detail = ("failed", error.message) if error is not None else ("done", "")
        self._observer.phase(PhaseEvent(Phase.SERVING.value, state, time.perf_counter() - self._began, detail))
