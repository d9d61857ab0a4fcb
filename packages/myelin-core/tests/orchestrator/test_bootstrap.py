"""A whole run in one process: real workers over memory streams, from nothing to tokens and back to nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import SecretStr

from myelin.errors import EngineError, ModelError, PlanError, RequestError
from myelin.orchestrator.bootstrap import planned, running
from myelin.orchestrator.orders import node_environment
from myelin.orchestrator.pipeline import Pipeline
from myelin.telemetry.archive import ArchiveSink
from myelin.telemetry.phases import PHASES
from myelin.values import FinishReason, SamplingParams
from myelin.wire.requests import Finished, NewToken

if TYPE_CHECKING:
    from conftest import Toy
    from myelin.cluster.provider import BootSpec
    from myelin_testkit.memory_provider import Announce, Say


async def generate(pipeline: Pipeline, prompt: Sequence[int], count: int, **more: object) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    async for event in pipeline.generate(prompt, max_tokens=count, **more):
        if isinstance(event, Finished):
            return tokens, event
        assert isinstance(event, NewToken)
        tokens.append(event.token)
    raise AssertionError("a generation ended without its end")


PROMPT = [5, 17, 200, 42]


async def test_the_same_tokens_wherever_the_model_is_cut(toy: Toy) -> None:
    found = []
    for stages, split in ((1, ()), (2, ()), (2, (1, 3)), (4, ())):
        async with running(toy.ask(stages=stages, split=split), toy.registry, toy.recorder) as pipeline:
            tokens, finished = await generate(pipeline, PROMPT, 6, ignore_end=True)
            assert finished == Finished(finished.sequence, FinishReason.LENGTH, 6)
            found.append(tokens)
        assert toy.provider.running == {}
    assert len(found[0]) == 6
    assert found.count(found[0]) == len(found)


async def test_phases_come_in_order_and_everything_ends(toy: Toy) -> None:
    async with running(toy.request, toy.registry, toy.recorder) as pipeline:
        assert toy.recorder.ended() == list(PHASES[: PHASES.index("serving")])
        assert pipeline.bootstrap_seconds > 0
        assert len(toy.provider.running) == 2
    assert toy.recorder.ended() == list(PHASES)
    assert toy.recorder.ended("failed") == []
    assert toy.provider.running == {}
    assert toy.provider.closed
    assert [key.attempt for key in toy.provider.started] == [1, 1]
    assert {(event.stage, event.phase) for event in toy.recorder.progresses} >= {(0, "load"), (1, "load")}


async def test_stages_say_what_they_hold(toy: Toy) -> None:
    async with running(toy.ask(split=(1, 3)), toy.registry, toy.recorder) as pipeline:
        stages = await pipeline.status()
    assert [stage.layers for stage in stages] == [(0, 1), (1, 4)]
    assert [stage.node for stage in stages] == ["stage-0", "stage-1"]
    assert all(stage.engine == "reference" and stage.provider == "tasks" for stage in stages)
    assert all(stage.resident_bytes > 0 and stage.weight_bytes > 0 and stage.kv_bytes > 0 for stage in stages)
    assert stages[1].fetched_bytes == stages[1].planned_bytes
    assert 0 < stages[0].fetched_bytes <= stages[0].planned_bytes  # rows of the embedding are read as they are needed


async def test_many_may_ask_for_the_status_at_once(toy: Toy) -> None:
    async with running(toy.ask(stages=1), toy.registry, toy.recorder) as pipeline:
        answers = await asyncio.gather(*(pipeline.status() for _ in range(5)))
        assert all(stage.resident_bytes > 0 for (stage,) in answers)


async def test_many_requests_share_the_pipeline(toy: Toy) -> None:
    async with running(toy.request, toy.registry, toy.recorder) as pipeline:
        alone = [await generate(pipeline, [n, n + 1], 5, ignore_end=True) for n in range(3)]
        together = await asyncio.gather(*(generate(pipeline, [n, n + 1], 5, ignore_end=True) for n in range(3)))
        assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
        seeded = SamplingParams(temperature=1.0, seed=7)
        first = await generate(pipeline, PROMPT, 5, ignore_end=True, sampling=seeded)
        again = await generate(pipeline, PROMPT, 5, ignore_end=True, sampling=seeded)
        assert first[0] == again[0]


async def test_closing_a_generation_cancels_it_and_frees_its_place(toy: Toy) -> None:
    async with running(toy.request, toy.registry, toy.recorder) as pipeline:
        for _ in range(6):  # more than there are places
            events = pipeline.generate(PROMPT, max_tokens=50, ignore_end=True)
            assert isinstance(await anext(events), NewToken)
            await events.aclose()
        async with asyncio.timeout(60):
            tokens, _ = await generate(pipeline, PROMPT, 3, ignore_end=True)
        assert len(tokens) == 3


async def test_the_context_ends_a_generation(toy: Toy) -> None:
    async with running(toy.request, toy.registry, toy.recorder) as pipeline:
        assert pipeline.options.max_context == 64  # the model's own
        tokens, finished = await generate(pipeline, PROMPT, 10_000_000_000, ignore_end=True)
        assert finished.reason is FinishReason.LENGTH
        assert 59 <= len(tokens) <= 61


@pytest.mark.parametrize(
    ("prompt", "more", "words"),
    [
        ([], {}, "empty"),
        ([1] * 64, {}, "64 tokens.*context of 64"),
        ([1] * 500, {}, "500 tokens.*context of 64"),
        ([301], {}, "token 301.*301"),
        ([-1], {}, "token -1"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ([1], {"sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ([1], {"sampling": SamplingParams(top_k=-1)}, "top_k"),
        ([1], {"sampling": SamplingParams(seed=-1)}, "seed"),
    ],
)
async def test_a_bad_request_is_refused_and_harms_nobody(
    toy: Toy, prompt: list[int], more: dict[str, object], words: str
) -> None:
    async with running(toy.ask(stages=1), toy.registry, toy.recorder) as pipeline:
        with pytest.raises(RequestError, match=words) as raised:
            pipeline.generate(prompt, **({"max_tokens": 1} | more))
        assert raised.value.hint
        assert len((await generate(pipeline, PROMPT, 2, ignore_end=True))[0]) == 2


async def test_the_callers_own_error_passes_through(toy: Toy) -> None:
    with pytest.raises(ZeroDivisionError):
        async with running(toy.request, toy.registry, toy.recorder):
            _ = 1 // 0
    assert toy.provider.running == {}
    assert "serving" in toy.recorder.ended()
    root = next(each for each in toy.exporter.get_finished_spans() if each.name == "myelin.run")
    assert root.status.status_code is StatusCode.UNSET


def attribute(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(name)


async def test_every_phase_is_a_span_under_one_root(toy: Toy) -> None:
    async with running(toy.request, toy.registry, toy.recorder):
        pass
    spans = toy.exporter.get_finished_spans()
    roots = [each for each in spans if each.parent is None]
    assert len(roots) == 1, [each.name for each in roots]
    (root,) = roots
    assert root.name == "myelin.run"
    assert root.context is not None
    assert {each.context.trace_id for each in spans if each.context} == {root.context.trace_id}
    phases = {each.name: each for each in spans if each.parent and each.parent.span_id == root.context.span_id}
    assert set(phases) == {f"myelin.bootstrap.{phase}" for phase in PHASES}
    assert attribute(phases["myelin.bootstrap.membership"], "myelin.membership.kind") == "control-stream"
    assert root.resource.attributes["service.name"] == "myelin-orchestrator"

    for phase in ("provider_start", "node_runtime_ready", "runtime_ready_ack", "stage_provision", "weights_loaded"):
        parent = phases[f"myelin.bootstrap.{phase}"]
        assert parent.context is not None
        children = [each for each in spans if each.parent and each.parent.span_id == parent.context.span_id]
        found = {(attribute(each, "myelin.node.id"), attribute(each, "myelin.node.attempt")) for each in children}
        assert found == {("stage-0", 1), ("stage-1", 1)}, phase

    by_id = {each.context.span_id: each for each in spans if each.context}
    for each in spans:
        if each.parent is not None:
            parent = by_id[each.parent.span_id]
            times = (parent.start_time or 0, each.start_time or 0, each.end_time or 0, parent.end_time or 0)
            assert 0 < times[0] <= times[1] <= times[2] <= times[3], each.name
    starts = [phases[f"myelin.bootstrap.{phase}"].start_time or 0 for phase in PHASES]
    assert starts == sorted(starts)


async def test_the_trace_goes_on_in_the_nodes(toy: Toy) -> None:
    """A node's own spans are children of the orchestrator's span for that node, and lie within it."""
    async with running(toy.request, toy.registry, toy.recorder):
        pass
    ours = {each.context.span_id: each for each in toy.exporter.get_finished_spans() if each.context}
    theirs = [each for each in ours.values() if each.resource.attributes["service.name"] == "myelin-worker"]
    entries = [each for each in theirs if each.parent and each.parent.span_id in ours]
    for name, parent_phase in (("worker.provision", "stage_provision"), ("worker.open_edges", "pipeline_probe")):
        found = [each for each in entries if each.name == name]
        assert {attribute(each, "myelin.node.id") for each in found} == {"stage-0", "stage-1"}
        for each in found:
            assert each.parent is not None
            parent = ours[each.parent.span_id]
            assert parent.name == f"myelin.bootstrap.{parent_phase}.node"
            assert attribute(parent, "myelin.node.id") == attribute(each, "myelin.node.id")
            assert each.context is not None
            assert parent.context is not None
            assert each.context.trace_id == parent.context.trace_id
            times = (parent.start_time or 0, each.start_time or 0, each.end_time or 0, parent.end_time or 0)
            assert 0 < times[0] <= times[1] <= times[2] <= times[3]


async def test_a_request_is_a_span_that_goes_on_in_the_stages(toy: Toy) -> None:
    async with running(toy.request, toy.registry, toy.recorder) as pipeline:
        async for _ in pipeline.generate((1, 2, 3), max_tokens=4, ignore_end=True):
            pass
    spans = toy.exporter.get_finished_spans()
    (request,) = [each for each in spans if each.name == "text_completion toy"]
    assert request.kind is SpanKind.SERVER
    assert request.context is not None
    assert attribute(request, "gen_ai.usage.input_tokens") == 3
    assert attribute(request, "gen_ai.usage.output_tokens") == 4
    assert attribute(request, "gen_ai.response.finish_reasons") == ("length",)
    inside = [each for each in spans if each.parent and each.parent.span_id == request.context.span_id]
    found = sorted(
        (each.name, attribute(each, "myelin.stage.index"), attribute(each, "myelin.stage.rows")) for each in inside
    )
    assert found == [
        ("myelin.stage.decode", 0, 3),
        ("myelin.stage.decode", 1, 3),
        ("myelin.stage.prefill", 0, 3),
        ("myelin.stage.prefill", 1, 3),
    ]


async def test_where_somebody_watches_figures_lines_and_traces_of_requests_are_kept(toy: Toy) -> None:
    async with running(toy.ask(live=True), toy.registry, toy.recorder) as pipeline:
        assert pipeline.metrics is not None
        assert pipeline.logbook is not None
        async for _ in pipeline.generate((1, 2, 3), max_tokens=4, ignore_end=True):
            pass
        wanted = {
            "myelin_tokens_generation_total 4",
            "gen_ai_server_request_duration_seconds_count{",
            'myelin_stage_steps_total{myelin_node_attempt="1",myelin_node_id="stage-1",myelin_stage_index="1"} 5',
            "myelin_hop_duration_seconds",
        }
        missing, deadline = wanted, asyncio.get_running_loop().time() + 60
        while missing and asyncio.get_running_loop().time() < deadline:  # nodes tell their figures each second
            await asyncio.sleep(0.1)
            text = pipeline.metrics.prometheus().decode()
            missing = {words for words in wanted if words not in text}
        assert missing == set()
        assert [each.stage for each in pipeline.metrics.nodes()] == [0, 1]
        assert any(entry.text == "serving started" for entry in pipeline.logbook.recent())
    spans = toy.exporter.get_finished_spans()
    (request,) = [each for each in spans if each.name == "text_completion toy"]
    (serving,) = [each for each in spans if each.name == "myelin.bootstrap.serving"]
    assert request.parent is None
    assert request.context is not None
    assert serving.context is not None
    assert request.context.trace_id != serving.context.trace_id
    assert [link.context.span_id for link in request.links] == [serving.context.span_id]


async def test_the_archive_tells_the_same_story(toy: Toy, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    toy.registry.extra_exporters = (ArchiveSink(path),)
    async with running(toy.request, toy.registry, toy.recorder):
        pass
    batches = [json.loads(line) for line in path.read_text().splitlines()]
    names = {
        span["name"]
        for batch in batches
        for resource in batch["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    }
    assert names >= {"myelin.run", *(f"myelin.bootstrap.{phase}" for phase in PHASES)}


async def test_planning_starts_nothing(toy: Toy) -> None:
    plan = await planned(toy.request, toy.registry, toy.recorder)
    assert len(plan.plan.stages) == 2
    assert sum(end - first for first, end in (stage.layers for stage in plan.plan.stages)) == 4
    assert plan.engine.name == "reference"
    assert plan.tokenizer.vocab_size == 301
    assert toy.provider.started == []


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"stages": 0}, PlanError, "0 stages"),
        ({"stages": 5}, PlanError, "5 stages.*4 layers"),
        ({"split": (1, 1)}, PlanError, "adds up to 2"),
        ({"model_uri": "/nowhere/model.gguf"}, ModelError, "model.gguf"),
    ],
)
async def test_what_cannot_be_planned_starts_nothing(
    toy: Toy, changes: dict[str, object], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        async with running(toy.ask(**changes), toy.registry, toy.recorder):
            pytest.fail("it must not come up")
    assert toy.provider.started == []
    root = next(each for each in toy.exporter.get_finished_spans() if each.name == "myelin.run")
    assert root.status.status_code is StatusCode.ERROR


async def test_an_engine_that_cannot_compute_the_model_starts_nothing(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from myelin.engine.contract import EngineSupport

    support = EngineSupport("reference", frozenset(), frozenset({"llama"}), 0)
    monkeypatch.setattr(toy.registry, "engine_support", lambda: (support,))
    with pytest.raises(EngineError, match=r"F(16|32) of the tensor"):
        async with running(toy.request, toy.registry, toy.recorder):
            pytest.fail("it must not come up")
    assert toy.provider.started == []


def test_nodes_are_told_what_to_relay_and_how_to_fetch(toy: Toy) -> None:
    from dataclasses import replace

    request = toy.ask(
        provider="process",
        trace_file="t.jsonl",
        environment={"EXTRA": "1"},
        source_options=replace(
            toy.request.source_options, token=SecretStr("hf_x"), offline=True, hub_cache_dir=Path("/hub")
        ),
    )
    telemetry = {"MYELIN_NODE_TELEMETRY": "traces"}
    environment = {
        name: value.get_secret_value() for name, value in node_environment(request, telemetry, same_host=True).items()
    }
    assert environment["MYELIN_NODE_TELEMETRY"] == "traces"
    assert environment["HF_TOKEN"] == "hf_x"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["EXTRA"] == "1"
    assert environment["HF_HUB_CACHE"] == "/hub"
    assert "HF_HUB_CACHE" not in node_environment(request, telemetry, same_host=False)


async def test_nodes_get_the_variables_that_are_meant_for_them(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYELIN_LOG_FORMAT", "plain")
    monkeypatch.setenv("MYELIN_CPU_ISA", "")
    monkeypatch.setenv("MYELIN_ANYTHING_ELSE", "1")
    told: list[dict[str, str]] = []
    life = toy.provider.life

    async def noted(boot: BootSpec, announce: Announce, say: Say) -> None:
        told.append({name: value.get_secret_value() for name, value in boot.environment.items()})
        await life(boot, announce, say)

    toy.provider.life = noted
    async with running(toy.request, toy.registry, toy.recorder):
        pass
    assert [each.get("MYELIN_LOG_FORMAT") for each in told] == ["plain", "plain"]
    assert not any(each.keys() & {"MYELIN_CPU_ISA", "MYELIN_ANYTHING_ELSE"} for each in told)
