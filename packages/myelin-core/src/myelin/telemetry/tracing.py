"""Spans: making a tracer of a process, carrying a trace to another one, and ending in bounded time.

Nothing of OpenTelemetry's SDK is imported, and no thread is started, where no exporter is configured. A process keeps
its own :class:`Tracing`; no global provider is set, so that several runs (and tests) may live in one process.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from myelin import __version__
from myelin.errors import MyelinError
from myelin.telemetry import attributes

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

    from myelin.telemetry.batching import BatchProcessor

ORCHESTRATOR_SERVICE = "myelin-orchestrator"
WORKER_SERVICE = "myelin-worker"
SHUTDOWN_SECONDS = 1.5
"""How long the last spans may take to leave: an unreachable collector would otherwise hold the exit for over 7 s."""


class Tracing:
    """A process's tracer and what must be flushed when it ends.

    Attributes:
        tracer: Makes spans; they cost next to nothing where nothing is exported.
        recording: Whether anything is exported.
    """

    def __init__(self, tracer: Tracer, processors: Sequence[BatchProcessor] = ()) -> None:
        self.tracer = tracer
        self.recording = bool(processors)
        self._processors = tuple(processors)
        self._ended = False

    @property
    def dropped(self) -> int:
        """Spans that found a queue full, or that an exporter did not take."""
        return sum(processor.dropped for processor in self._processors)

    def flush(self) -> None:
        """Export what has ended up to now. Blocking."""
        for processor in self._processors:
            processor.flush()

    def shutdown(self, timeout_s: float = SHUTDOWN_SECONDS) -> bool:
        """Flush and end all exporters at once, each in a thread of its own; return after ``timeout_s`` at the latest.

        Whatever hangs is left to daemon threads, which don't hold the process. Blocking; twice is fine.

        Returns:
            Whether everything ended in time.
        """
        if self._ended:
            return True
        self._ended = True
        processors = self._processors
        deadline = time.monotonic() + timeout_s
        threads = [threading.Thread(target=processor.shutdown, daemon=True) for processor in processors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def configure_tracing(
    service: str,
    exporters: Sequence[SpanExporter],
    *,
    instance: str = "",
    fixed: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Tracing:
    """A tracer whose spans go to all of ``exporters``, in batches (``OTEL_BSP_*``).

    Args:
        service: ``service.name``, unless ``OTEL_SERVICE_NAME`` or ``OTEL_RESOURCE_ATTRIBUTES`` says another.
        exporters: As the telemetry plugins gave them; with none, spans go nowhere and cost nothing.
        instance: ``service.instance.id``; a random one where empty.
        fixed: The service's name is ours, whatever the environment says: that names the process that was started by
        hand.
        environment: Where ``OTEL_SDK_DISABLED`` is looked for (what the SDK reads itself, it reads from the process's).
    """
    if not exporters or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        for exporter in exporters:
            exporter.shutdown()
        return Tracing(trace.NoOpTracer())

    from opentelemetry.sdk.trace import TracerProvider

    from myelin.telemetry.batching import BatchProcessor

    resource = service_resource(service, instance or str(uuid.uuid4()), fixed=fixed)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    processors = [BatchProcessor(exporter, environment) for exporter in exporters]
    for processor in processors:
        provider.add_span_processor(processor)
    return Tracing(provider.get_tracer("myelin", __version__), processors)


def service_resource(service: str, instance: str, *, fixed: bool = False) -> Resource:
    """Who a process is: ours, unless ``OTEL_SERVICE_NAME`` or ``OTEL_RESOURCE_ATTRIBUTES`` say otherwise.

    Args:
        fixed: They have no say in the service's name and instance.
    """
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours: dict[str, AttributeValue] = {
        attributes.SERVICE_NAME: service,
        attributes.SERVICE_VERSION: __version__,
        attributes.SERVICE_INSTANCE_ID: instance,
    }
    theirs = OTELResourceDetector().detect().attributes
    return Resource.create({**theirs, **ours} if fixed else {**ours, **theirs})


@contextmanager
def span(
    tracer: Tracer,
    name: str,
    fields: Mapping[str, AttributeValue] | None = None,
    *,
    parent: str = "",
    start_ns: int | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Iterator[Span]:
    """A span around a block: current inside it, ERROR with ``error.type`` if the block raises, UNSET otherwise.

    Args:
        parent: A W3C ``traceparent`` from another process; the current span where it is empty or unreadable.
        start_ns: When it began (Unix nanoseconds), if not now.
    """
    context = context_from(parent)
    with tracer.start_as_current_span(
        name,
        context=context,
        kind=kind,
        attributes=fields,
        start_time=start_ns,
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        try:
            yield current
        except BaseException as error:
            mark_failed(current, error)
            raise


def mark_failed(current: Span, error: BaseException) -> None:
    """Set a span's status to ERROR with the error's stable label; leaving a generator (:class:`GeneratorExit`) is no
    error."""
    if isinstance(error, GeneratorExit):
        return
    if isinstance(error, MyelinError):
        current.set_attribute(attributes.ERROR_TYPE, error.reason)
        current.set_status(Status(StatusCode.ERROR, error.message))
    else:
        current.set_attribute(attributes.ERROR_TYPE, type(error).__qualname__)
        current.set_status(Status(StatusCode.ERROR))


def traceparent(current: Span | None = None) -> str:
    """The W3C ``traceparent`` of ``current`` (or of the current span); empty where nothing is recorded."""
    where = (current or trace.get_current_span()).get_span_context()
    if not where.is_valid:
        return ""
    return f"00-{where.trace_id:032x}-{where.span_id:016x}-{int(where.trace_flags):02x}"


def context_from(parent: str) -> otel_context.Context | None:
    """The context of a peer's ``traceparent``; None (the current context) where it is empty or malformed."""
    if not parent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": parent})
    return context if trace.get_current_span(context).get_span_context().is_valid else None
