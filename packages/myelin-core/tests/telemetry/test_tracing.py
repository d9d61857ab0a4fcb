"""Spans: resources, parents across processes, errors, and an end in bounded time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from myelin import __version__
from myelin.errors import NodeError
from myelin.telemetry import phases
from myelin.telemetry.tracing import Tracing, configure_tracing, span, traceparent


def finished(tracing: Tracing, memory: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    assert tracing.shutdown()
    return {each.name: each for each in memory.get_finished_spans()}


def test_phases_are_in_the_documented_order() -> None:
    assert (
        *("config", "telemetry", "run_plan", "transport", "membership", "provisioner", "node_spec", "stage_shard_plan"),
        *("provider_start", "node_runtime_ready", "runtime_ready_ack", "stage_provision", "weights_loaded"),
        *("pipeline_probe", "serving", "shutdown", "provider_stop"),
    ) == phases.PHASES
    assert phases.Phase.RUN_PLAN.span_name == "myelin.bootstrap.run_plan"


def test_resource_of_the_service() -> None:
    memory = InMemorySpanExporter()
    tracing = configure_tracing("myelin-worker", (memory,), instance="node.1")
    with span(tracing.tracer, "work", {"a": 1}):
        pass
    resource = finished(tracing, memory)["work"].resource.attributes
    assert resource["service.name"] == "myelin-worker"
    assert resource["service.version"] == __version__
    assert resource["service.instance.id"] == "node.1"


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab,service.name=lost")
    memory = InMemorySpanExporter()
    tracing = configure_tracing("myelin-worker", (memory,))
    with span(tracing.tracer, "work"):
        pass
    resource = finished(tracing, memory)["work"].resource.attributes
    assert resource["service.name"] == "mine"
    assert resource["deployment.environment"] == "lab"
    assert resource["service.instance.id"]


def test_a_trace_goes_on_in_another_process() -> None:
    here, there = InMemorySpanExporter(), InMemorySpanExporter()
    ours, theirs = configure_tracing("a", (here,)), configure_tracing("b", (there,))
    with span(ours.tracer, "outer"):
        carried = traceparent()
    with span(theirs.tracer, "inner", parent=carried):
        pass
    outer, inner = finished(ours, here)["outer"], finished(theirs, there)["inner"]
    assert outer.context is not None
    assert inner.context is not None
    assert inner.parent is not None
    assert (inner.parent.span_id, inner.context.trace_id) == (outer.context.span_id, outer.context.trace_id)


@pytest.mark.parametrize("malformed", ["", "nonsense", "00-0-0-00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_malformed_parent_is_ignored(malformed: str) -> None:
    memory = InMemorySpanExporter()
    tracing = configure_tracing("a", (memory,))
    with span(tracing.tracer, "outer"), span(tracing.tracer, "inner", parent=malformed):
        pass
    spans = finished(tracing, memory)
    assert spans["inner"].parent is not None
    assert spans["outer"].context is not None
    assert spans["inner"].parent.span_id == spans["outer"].context.span_id


def test_errors_mark_the_span_and_success_stays_unset() -> None:
    memory = InMemorySpanExporter()
    tracing = configure_tracing("a", (memory,))
    with pytest.raises(NodeError), span(tracing.tracer, "bad"):
        raise NodeError("it went away", reason="node-lost")
    with pytest.raises(ZeroDivisionError), span(tracing.tracer, "worse"):
        _ = 1 // 0
    with span(tracing.tracer, "good"):
        pass
    spans = finished(tracing, memory)
    assert spans["bad"].status.status_code is StatusCode.ERROR
    assert spans["bad"].status.description == "it went away"
    assert (spans["bad"].attributes or {})["error.type"] == "node-lost"
    assert (spans["worse"].attributes or {})["error.type"] == "ZeroDivisionError"
    assert spans["good"].status.status_code is StatusCode.UNSET


class Hanging(SpanExporter):
    """An exporter whose collector never answers."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.let_go.wait(150)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.let_go.wait(150)


def test_an_unreachable_collector_neither_holds_the_exit_nor_the_other_exporters() -> None:
    memory, hanging = InMemorySpanExporter(), Hanging()
    tracing = configure_tracing("a", (hanging, memory))
    with span(tracing.tracer, "work"):
        pass
    began = time.monotonic()
    assert not tracing.shutdown(2.0)
    assert time.monotonic() - began < 60.0
    assert [each.name for each in memory.get_finished_spans()] == ["work"]
    hanging.let_go.set()


@pytest.mark.parametrize("exporters", [(), (InMemorySpanExporter(),)])
def test_disabled_means_nothing_recorded(exporters: Sequence[InMemorySpanExporter]) -> None:
    environment = {"OTEL_SDK_DISABLED": " True "} if exporters else {}
    tracing = configure_tracing("a", exporters, environment=environment)
    with span(tracing.tracer, "work"):
        assert traceparent() == ""
    assert not tracing.recording
    assert tracing.shutdown()
    assert all(not exporter.get_finished_spans() for exporter in exporters)


def test_nothing_heavy_is_imported_when_nothing_is_configured() -> None:
    code = (
        "import sys; from myelin.telemetry.tracing import configure_tracing, span; t = configure_tracing('a', ());\n"
        "with span(t.tracer, 'x'): pass\n"
        "t.shutdown(); print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_node_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
    memory = InMemorySpanExporter()
    tracing = configure_tracing("myelin-worker", (memory,), instance="n", fixed=True)
    with span(tracing.tracer, "work"):
        pass
    resource = finished(tracing, memory)["work"].resource.attributes
    assert resource["service.name"] == "myelin-worker"
    assert resource["deployment.environment"] == "lab"


def test_where_no_sink_is_configured_the_sdk_is_not_imported() -> None:
    script = (
        "import sys\n"
        "from myelin.plugins.registry import Registry\n"
        "from myelin.plugins.specs import TelemetryContext\n"
        "import myelin.orchestrator.bootstrap, myelin.worker.agent\n"
        "assert Registry.discover().telemetry(TelemetryContext('a', '')) == ()\n"
        "found = [m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.proto'))]\n"
        "assert not found, found\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
