"""All that a run tells of itself and of its nodes: opened with its first phase, closed after its last.

Where no sink is configured and nobody watches, nothing is imported, started or kept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue
from pydantic import SecretStr

from myelin import __version__
from myelin.errors import MyelinError
from myelin.orchestrator.background import in_thread
from myelin.orchestrator.events import Observer
from myelin.orchestrator.note_taker import NoteTaker
from myelin.orchestrator.request import RunRequest
from myelin.plugins.specs import TelemetryContext
from myelin.telemetry import attributes
from myelin.telemetry.redaction import Redactor, environment_secrets, secret_values
from myelin.telemetry.signals import Signal
from myelin.telemetry.tracing import ORCHESTRATOR_SERVICE, WORKER_SERVICE, Tracing, configure_tracing
from myelin.transport.contract import ORCHESTRATOR, TELEMETRY_PROTOCOL, Endpoint, Transport
from myelin.values import Attempt, NodeId

if TYPE_CHECKING:
    from myelin.plugins.registry import Registry
    from myelin.telemetry.hub import TelemetryHub
    from myelin.telemetry.logbook import Logbook as LogbookType
    from myelin.telemetry.logbook import LogbookHandler, LogEntry
    from myelin.telemetry.metrics import Metrics
    from myelin.telemetry.relay import RelayClient
    from myelin.telemetry.signals import OtlpRequest
    from myelin.telemetry.sink import SinkCheck

NODE_VARIABLE = "MYELIN_NODE_TELEMETRY"
"""Which signals a node is to relay, separated by commas; none where it isn't set."""
LAST_WORDS_S = 1.0
"""How long the nodes' last telemetry may take to arrive."""
METRICS_INTERVAL_S = 60.0
MOST_LOG_RECORDS = 1000
"""Lines that go to sinks in one tick of the hub (a quarter of a second); more are dropped and counted."""

KEPT_ANNOUNCEMENTS = 1024
"""Requests that a node which comes later is told of: those that it is going to serve are among them."""

_PASSED_ON = (
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_TRACES_SAMPLER",
    "OTEL_BSP_",
    "OTEL_SPAN_",
    "OTEL_ATTRIBUTE_",
    "OTEL_EVENT_",
    "OTEL_LINK_",
)
"""Variables that mean something to a node, which exports nothing by itself: never an endpoint, never a header."""


class RunTelemetry:
    """See the module's text. Made off; :meth:`open` turns on what is wanted.

    Attributes:
        tracing: The run's tracer.
        observer: To be told in place of the one that was given: it keeps what is said in the logbook, too.
        redactor: Takes secrets out of whatever is kept or shown; knows them once opened.
        metrics, logbook, hub: Where there is somebody for them.
        relays: The nodes' telemetry streams, by node and attempt.
    """

    def __init__(self, request: RunRequest, observer: Observer) -> None:
        self.tracing: Tracing = configure_tracing(ORCHESTRATOR_SERVICE, ())
        self.observer = observer
        self.redactor = Redactor()
        self.metrics: Metrics | None = None
        self.logbook: LogbookType | None = None
        self.hub: TelemetryHub | None = None
        self.relays: dict[tuple[NodeId, Attempt], RelayClient] = {}
        self._request = request
        self._resource: dict[str, str] = {}
        self._wanted: frozenset[Signal] = frozenset()
        self._announced: OrderedDict[int, str] = OrderedDict()
        self._handler: LogbookHandler | None = None
        self._lines: deque[LogEntry] = deque()
        self._lines_dropped = 0
        self._interval_s = METRICS_INTERVAL_S
        self._next_metrics = 0.0
        self._sampled: dict[str, OtlpRequest] = {}

    def open(self, registry: Registry, secret: SecretStr) -> None:
        """Ask the telemetry plugins for their sinks, and begin.

        Raises:
            ConfigError: A sink can't work as configured.
        """
        request = self._request
        self.redactor.learn(
            [
                secret.get_secret_value(),
                *secret_values(request),
                *environment_secrets({**os.environ, **request.environment}),
            ]
        )
        context = TelemetryContext(
            ORCHESTRATOR_SERVICE,
            request.trace_file,
            frame_log=request.frame_log,
            frame_log_bytes=request.frame_log_bytes,
        )
        given = registry.telemetry(context)
        if _disabled():
            from myelin.telemetry.sink import as_sinks

            for sink in as_sinks(given):
                sink.close()
            given = ()
        if not given and not request.live:
            return

        from myelin.telemetry.hub import TelemetryHub
        from myelin.telemetry.logbook import Logbook, LogbookHandler
        from myelin.telemetry.metrics import Metrics
        from myelin.telemetry.relay_exporter import into_hub
        from myelin.telemetry.sink import as_sinks
        from myelin.telemetry.tracing import service_resource

        sinks = as_sinks(given)
        self._wanted = frozenset(signal for sink in sinks for signal in sink.signals)
        instance = f"{request.run}.{ORCHESTRATOR}"
        self._resource = {
            str(key): str(value) for key, value in service_resource(ORCHESTRATOR_SERVICE, instance).attributes.items()
        }
        self._interval_s = _interval(os.environ)
        self._next_metrics = time.monotonic() + self._interval_s
        self.hub = TelemetryHub(sinks, self.redactor, on_tick=self._tick, keep=self._keep)
        if Signal.TRACES in self._wanted:
            self.tracing = configure_tracing(ORCHESTRATOR_SERVICE, (into_hub(self.hub),), instance=instance)
        if request.live or Signal.METRICS in self._wanted:
            self.metrics = Metrics(model_name(request.model_uri), str(request.run))
            self.metrics.watch_losses(self.hub.losses)
        if request.live or Signal.LOGS in self._wanted:
            self.logbook = Logbook(self.redactor)
            if Signal.LOGS in self._wanted:
                self.logbook.hand_over(self._line)
            self.observer = NoteTaker(self.observer, self.logbook, self._offset)
            self._handler = LogbookHandler(self.logbook, str(ORCHESTRATOR))
            logging.getLogger("myelin").addHandler(self._handler)

    def begin(self, root: Span) -> None:
        """The run's span is there."""
        if isinstance(self.observer, NoteTaker):
            self.observer.root = root

    async def preflight(self, parent: str) -> Mapping[str, AttributeValue]:
        """See whether what is configured works; what the telemetry phase's span says of it."""
        if self.hub is None or not self.hub.sinks:
            return {}
        from myelin.telemetry.preflight import preflight, summary

        sinks, resource = self.hub.sinks, self._resource
        checks = await in_thread(lambda: preflight(sinks, resource, parent))
        self._tell(checks)
        return {**summary(checks)}

    def _tell(self, checks: list[SinkCheck]) -> None:
        for check in checks:
            if not check.ok:
                logging.getLogger(__name__).warning(
                    "the telemetry sink %s has not taken a first event: %s", check.sink, check.detail or "it refused"
                )

    def watch_spend(self, executor: object) -> None:
        """Show what the nodes cost, where the executor knows."""
        spend = getattr(executor, "spend", None)
        if self.metrics is not None and spend is not None:
            ask: Callable[[], Any] = spend

            def amounts() -> tuple[float, float]:
                spent = ask()
                return spent.dollars_per_hour, spent.dollars

            self.metrics.watch_spend(amounts)

    # The nodes.

    def node_variables(self, ours: Mapping[str, str]) -> dict[str, str]:
        """What nodes are told: which signals to relay, and the SDK's own limits."""
        signals = set(self._wanted - {Signal.LOGS})  # a node's lines come as its output, which lives as long as it
        if self.metrics is not None:
            signals.add(Signal.METRICS)
        if not signals:
            return {}
        passed = {name: value for name, value in ours.items() if name.startswith(_PASSED_ON)}
        return {**passed, NODE_VARIABLE: ",".join(sorted(signals))}

    async def follow(self, transport: Transport, endpoint: Endpoint, node: NodeId, attempt: Attempt) -> None:
        """Take a node's telemetry for as long as it sends any. That there is none is no reason to end anything."""
        if self.hub is None or not self.node_variables({}):
            return
        from myelin.telemetry.relay import RelayClient

        try:
            stream = await transport.connect(endpoint, TELEMETRY_PROTOCOL, expect=node)
        except MyelinError as error:
            logging.getLogger(__name__).warning("no telemetry comes from %s: %s", node, error.message)
            return
        relay = self.relays[node, attempt] = RelayClient(stream, self.hub, str(node))
        for sequence, traceparent in self._announced.items():
            relay.announce(sequence, traceparent)
        try:
            await relay.serve()
        finally:
            if self.metrics is not None:
                self.metrics.forget(f"{self._request.run}.{node}.{attempt}")
            await relay.close()

    def announce(self, sequence: int, traceparent: str) -> None:
        """Tell the nodes of a sequence, so that their spans find their request."""
        self._announced[sequence] = traceparent
        while len(self._announced) > KEPT_ANNOUNCEMENTS:
            self._announced.popitem(last=False)
        for relay in self.relays.values():
            if not relay.ended.is_set():
                relay.announce(sequence, traceparent)

    def _offset(self, node: NodeId) -> float:
        """How far the clock of a node's latest attempt is ahead of ours, in seconds."""
        offsets = [relay.clock_estimate.offset_ns for (name, _), relay in self.relays.items() if name == node]
        return offsets[-1] / 1e9 if offsets else 0.0

    # In the hub's thread.

    def _keep(self, signal: Signal, request: OtlpRequest) -> bool:
        """A node's sample of each second is kept, and goes to sinks at the interval of metrics."""
        if signal is not Signal.METRICS:
            return False
        if self.metrics is not None:
            self.metrics.sample(request)
        if Signal.METRICS in self._wanted:
            from myelin.telemetry.otlp_metrics import resource_attributes

            self._sampled[str(resource_attributes(request).get(attributes.SERVICE_INSTANCE_ID))] = request
        return True

    def _tick(self, last: bool) -> None:
        hub = self.hub
        assert hub is not None
        if self._lines or self._lines_dropped:
            self._send_lines(hub)
        if Signal.METRICS in self._wanted and (last or time.monotonic() >= self._next_metrics):
            self._next_metrics = time.monotonic() + self._interval_s
            sampled, self._sampled = self._sampled, {}
            for request in sampled.values():
                hub.spread(Signal.METRICS, request)
            if self.metrics is not None:
                from myelin.telemetry.otlp_metrics import metrics_request

                began, now = self.metrics.began_ns, time.time_ns()
                points = list(self.metrics.points())
                hub.spread(
                    Signal.METRICS,
                    metrics_request(self._resource, points, began_ns=began, now_ns=now, version=__version__),
                )

    def _send_lines(self, hub: TelemetryHub) -> None:
        from myelin.telemetry.logbook import logs_request

        entries = [self._lines.popleft() for _ in range(min(len(self._lines), MOST_LOG_RECORDS))]
        dropped, self._lines_dropped = self._lines_dropped, 0
        hub.lost_elsewhere("logbook", Signal.LOGS, dropped)
        by_node: dict[str, list[LogEntry]] = {}
        for entry in entries:
            by_node.setdefault(entry.node, []).append(entry)
        groups = [(self._resource_of(node), lines) for node, lines in by_node.items()]
        hub.spread(Signal.LOGS, logs_request(groups, __version__))

    def _resource_of(self, node: str) -> dict[str, str]:
        if node == ORCHESTRATOR:
            return self._resource
        return {
            attributes.SERVICE_NAME: WORKER_SERVICE,
            attributes.SERVICE_VERSION: __version__,
            attributes.SERVICE_INSTANCE_ID: f"{self._request.run}.{node}",
        }

    def _line(self, entry: LogEntry) -> None:
        """From any thread: a line for the sinks."""
        if len(self._lines) >= MOST_LOG_RECORDS:
            self._lines_dropped += 1
        else:
            self._lines.append(entry)

    # The end.

    async def say_goodbye(self) -> None:
        """Wait for the nodes' last telemetry, not for long; then close their streams."""
        if not self.relays:
            return
        waiting = [asyncio.create_task(relay.ended.wait()) for relay in self.relays.values()]
        await asyncio.wait(waiting, timeout=LAST_WORDS_S)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, *(relay.close() for relay in self.relays.values()), return_exceptions=True)

    async def close(self) -> None:
        """Hand on what there is, in bounded time; twice is fine."""
        if self._handler is not None:
            logging.getLogger("myelin").removeHandler(self._handler)
        tracing, hub = self.tracing, self.hub

        def end() -> None:
            tracing.shutdown()
            if hub is not None:
                hub.lost_elsewhere("spans", Signal.TRACES, tracing.dropped)
                hub.close()
                _tell_losses(hub)

        if tracing.recording or hub is not None:
            await in_thread(end)


def model_name(uri: str) -> str:
    """What ``gen_ai.request.model`` calls a model: its file's name, without folder, revision and ending. Pure."""
    name = uri.rstrip("/").rpartition("/")[2].partition("?")[0].partition("@")[0]
    return name.removesuffix(".gguf") or uri


def _tell_losses(hub: TelemetryHub) -> None:
    lost = ", ".join(f"{each.count} of {each.signal} ({each.where})" for each in hub.losses())
    if lost:
        logging.getLogger(__name__).warning("telemetry was dropped: %s", lost)


def _disabled() -> bool:
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def _interval(environment: Mapping[str, str]) -> float:
    """``OTEL_METRIC_EXPORT_INTERVAL`` in seconds (the variable counts milliseconds); 60 where it says nothing."""
    try:
        value = float(environment.get("OTEL_METRIC_EXPORT_INTERVAL", "")) / 1000
    except ValueError:
        return METRICS_INTERVAL_S
    return value if 0.1 <= value < float("inf") else METRICS_INTERVAL_S
