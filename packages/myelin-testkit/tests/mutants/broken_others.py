"""Planners, sinks and transports that break their contract in one point each. test_other_suites.py runs it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from myelin.plugin import (
    Endpoint,
    Listener,
    MessageStream,
    NodeId,
    PlanRequest,
    RunPlan,
    Signal,
    SinkCheck,
    StreamHandler,
    TelemetrySink,
    Transport,
    TransportOptions,
    plan_pipeline,
)
from myelin.transport.memory import MemoryTransport
from myelin_testkit.planner_compliance import PlannerCompliance
from myelin_testkit.telemetry_compliance import TelemetryCompliance, record_names
from myelin_testkit.transport_compliance import TransportCompliance


class TestSoundPlanner(PlannerCompliance):
    """Without a mistake."""

    def plan(self, request: PlanRequest) -> RunPlan | None:
        return plan_pipeline(request)


class TestDeclinesAll(TestSoundPlanner):
    def plan(self, request: PlanRequest) -> RunPlan | None:
        return None


class TestForgetsTheHead(TestSoundPlanner):
    """The embedding and the output head aren't counted, and the last node runs out of memory."""

    def plan(self, request: PlanRequest) -> RunPlan | None:
        plan = plan_pipeline(request)
        tail = replace(plan.stages[-1], weight_bytes=plan.stages[-1].weight_bytes - 4096)
        return replace(plan, stages=(*plan.stages[:-1], tail))


class TestIgnoresMemory(TestSoundPlanner):
    def plan(self, request: PlanRequest) -> RunPlan | None:
        return plan_pipeline(replace(request, nodes=tuple(replace(node, memory_bytes=0) for node in request.nodes)))


class TestIgnoresTheSplit(TestSoundPlanner):
    def plan(self, request: PlanRequest) -> RunPlan | None:
        return plan_pipeline(replace(request, split=()))


class TestForgetsTheWayBack(TestSoundPlanner):
    def plan(self, request: PlanRequest) -> RunPlan | None:
        plan = plan_pipeline(request)
        return replace(plan, edges=plan.edges[:-1] if len(plan.edges) > 1 else plan.edges)


class TestChangesItsMind(TestSoundPlanner):
    def plan(self, request: PlanRequest) -> RunPlan | None:
        plan = plan_pipeline(request)
        self.count = getattr(self, "count", 0) + 1
        return replace(plan, notes=(f"plan {self.count}",))


class Keeping(SpanExporter):
    """Keeps names."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.ended = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.ended:
            return SpanExportResult.FAILURE
        self.names.update(span.name for span in spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.ended = True


class Dropping(Keeping):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return super().export(spans[:1])


class RaisingAtTheEnd(Keeping):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.ended:
            raise ValueError("the file is closed")
        return super().export(spans)


class LeavingAThread(Keeping):
    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=threading.main_thread().join).start()


class KeepingAll(TelemetrySink):
    """Keeps names of every signal."""

    signals = frozenset(Signal)

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.ended = False

    def export(self, signal: Signal, request: Any) -> bool:
        if self.ended:
            return False
        self.names |= record_names(request)
        return True

    def close(self) -> None:
        self.ended = True


class ChangingRequests(KeepingAll):
    def export(self, signal: Signal, request: Any) -> bool:
        taken = super().export(signal, request)
        request.Clear()
        return taken


class RaisingInItsCheck(KeepingAll):
    def check(self, signal: Signal, request: Any, timeout_s: float) -> SinkCheck:
        raise ConnectionError("nobody is there")


class TestSoundSink(TelemetryCompliance):
    """Without a mistake."""

    kind: type[Keeping] = Keeping

    def exporters(self, service: str) -> Sequence[SpanExporter] | None:
        self.made = self.kind()
        return (self.made,)

    def unconfigured(self) -> Sequence[SpanExporter] | None:
        return ()

    def arrived(self) -> set[str]:
        return self.made.names


class TestSoundSinkOfAllSignals(TestSoundSink):
    """Without a mistake."""

    kind = KeepingAll  # type: ignore[assignment]  # either kind of sink will do


class TestChangesRequests(TestSoundSink):
    kind = ChangingRequests  # type: ignore[assignment]  # likewise


class TestRaisesInItsCheck(TestSoundSink):
    kind = RaisingInItsCheck  # type: ignore[assignment]  # likewise


class TestAlwaysOn(TestSoundSink):
    def unconfigured(self) -> Sequence[SpanExporter] | None:
        return self.exporters("myelin-worker")


class TestDropsSpans(TestSoundSink):
    kind = Dropping


class TestRaisesAtTheEnd(TestSoundSink):
    kind = RaisingAtTheEnd


class TestLeavesAThread(TestSoundSink):
    kind = LeavingAThread


class TestSoundTransport(TransportCompliance):
    """Without a mistake."""

    def make_transport(self, options: TransportOptions) -> Transport:
        return MemoryTransport(options)


class Wrapped:
    """A transport that passes everything on."""

    def __init__(self, options: TransportOptions) -> None:
        self.inner = MemoryTransport(options)

    async def listen(self, bind: str, accept: Mapping[str, StreamHandler]) -> Listener:
        return await self.inner.listen(bind, accept)

    async def connect(self, endpoint: Endpoint, protocol: str, *, expect: NodeId | None = None) -> MessageStream:
        return await self.inner.connect(endpoint, protocol, expect=expect)

    async def close(self) -> None:
        await self.inner.close()


class Trusting(Wrapped):
    async def connect(self, endpoint: Endpoint, protocol: str, *, expect: NodeId | None = None) -> MessageStream:
        return await self.inner.connect(endpoint, protocol)


class FirstAddressOnly(Wrapped):
    async def connect(self, endpoint: Endpoint, protocol: str, *, expect: NodeId | None = None) -> MessageStream:
        return await self.inner.connect(Endpoint(endpoint.candidates[:1]), protocol, expect=expect)


class TestTrustsAnyNode(TestSoundTransport):
    def make_transport(self, options: TransportOptions) -> Transport:
        return Trusting(options)


class TestTriesOneAddress(TestSoundTransport):
    def make_transport(self, options: TransportOptions) -> Transport:
        return FirstAddressOnly(options)


class TestHasNoLimit(TestSoundTransport):
    def make_transport(self, options: TransportOptions) -> Transport:
        return MemoryTransport(replace(options, max_message_bytes=1 << 30))
