"""Figures: counted once, told alike to Prometheus and to OTLP."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from myelin.errors import NodeError
from myelin.telemetry import genai
from myelin.telemetry.metrics import Metrics
from myelin.telemetry.node_figures import NodeFigures, hop_seconds, read_figures
from myelin.telemetry.otlp_metrics import Buckets, gauge, histogram, metrics_request, read_points, total
from myelin.telemetry.prometheus import metric_name, render
from myelin.telemetry.requests import CHAT, RequestLog
from myelin.telemetry.tracing import configure_tracing
from myelin.values import FinishReason, SamplingParams, SequenceId
from myelin.wire.requests import Finished, NewToken

NODE: dict[str, str | int] = {"myelin.node.id": "stage-0", "myelin.node.attempt": 1, "myelin.stage.index": 0}


@pytest.mark.parametrize(
    ("name", "unit", "kind", "expected"),
    [
        ("gen_ai.server.request.duration", "s", "histogram", "gen_ai_server_request_duration_seconds"),
        ("myelin.stage.record.bytes", "By", "sum", "myelin_stage_record_bytes_total"),
        ("myelin.stage.kv.usage", "1", "gauge", "myelin_stage_kv_usage_ratio"),
        ("myelin.tokens.prompt", "{token}", "sum", "myelin_tokens_prompt_total"),
        ("hw.power", "W", "gauge", "hw_power_watts"),
    ],
)
def test_names(name: str, unit: str, kind: str, expected: str) -> None:
    assert metric_name(name, unit, kind) == expected


def test_the_exposition_parses_as_prometheus_reads_it() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    buckets = Buckets((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 3.0):
        buckets.add(value)
    odd = {"path": 'a "quoted"\\back\nline', "myelin.node.id": "x"}
    text = render(
        [
            gauge("a.gauge", "1", 0.25, odd, "what it\nis"),
            total("a.size", "By", 2**60, {"n": 1}),
            histogram("a.time", "s", buckets, {"n": 1}, "a time"),
            gauge("a.gauge", "1", float("nan"), {"n": 2}),
        ]
    ).decode()
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["a_gauge_ratio"].type == "gauge"
    first = families["a_gauge_ratio"].samples[0]
    assert first.labels == {"path": 'a "quoted"\\back\nline', "myelin_node_id": "x"}
    assert families["a_size_bytes"].samples[0].value == 2**60
    samples = {(each.name, each.labels.get("le")): each.value for each in families["a_time_seconds"].samples}
    assert samples == {
        ("a_time_seconds_bucket", "0.1"): 2,
        ("a_time_seconds_bucket", "1.0"): 3,
        ("a_time_seconds_bucket", "+Inf"): 4,
        ("a_time_seconds_sum", None): pytest.approx(3.65),
        ("a_time_seconds_count", None): 4,
    }


def test_points_come_back_from_a_request_as_they_went_in() -> None:
    buckets = Buckets((1.0,))
    buckets.add(0.5)
    points = [
        gauge("a", "1", 0.25, {"x": "y", "n": 3, "b": True, "f": 0.5}, "text"),
        total("b", "By", 7, {}),
        histogram("c", "s", buckets, {"x": "y"}),
    ]
    request = metrics_request({"service.name": "s"}, points, began_ns=1, now_ns=2)
    assert list(read_points(request)) == points
    data = {metric.name: metric for metric in request.resource_metrics[0].scope_metrics[0].metrics}
    assert data["b"].sum.is_monotonic
    assert data["b"].sum.aggregation_temporality == 2
    assert data["b"].sum.data_points[0].start_time_unix_nano == 1


def sample(**values: float) -> object:
    points = [gauge(name.replace("__", "."), "1", value, NODE) for name, value in values.items()]
    return metrics_request({"service.instance.id": "r.stage-0.1"}, points, began_ns=1, now_ns=2)


def test_the_nodes_samples_are_shown_until_they_are_gone() -> None:
    metrics = Metrics("m", "r")
    metrics.sample(sample(myelin__stage__busy__share=0.5))
    metrics.sample(sample(myelin__stage__busy__share=0.75))
    text = metrics.prometheus().decode()
    assert text.count("myelin_stage_busy_share_ratio{") == 1
    assert 'myelin_node_id="stage-0"' in text
    (node,) = metrics.nodes()
    assert (node.node, node.stage, node.busy_share) == ("stage-0", 0, 0.75)
    metrics.forget("r.stage-0.1")
    assert metrics.nodes() == ()


def test_a_hop_is_what_a_round_leaves_over() -> None:
    head = NodeFigures("a", 1, 0, step_seconds=0.010, round_seconds=0.050)
    tail = NodeFigures("b", 1, 1, step_seconds=0.020)
    assert hop_seconds([head, tail]) == pytest.approx(0.010)
    assert hop_seconds([head]) is None
    assert hop_seconds([head, NodeFigures("b", 1, 1)]) is None
    assert read_figures([]) == ()


def test_a_request_is_counted_and_traced_from_its_begin_to_its_end() -> None:
    kept = InMemorySpanExporter()
    tracing = configure_tracing("a", (kept,))
    metrics = Metrics("model", "run")
    announced: list[tuple[int, str]] = []
    log = RequestLog(tracing.tracer, metrics, "model", "run", announce=lambda *told: announced.append(told))
    sampling = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, seed=7)
    record = log.begin(5, CHAT, prompt_tokens=11, max_tokens=20, sampling=sampling)
    assert (metrics.waiting, metrics.running) == (1, 0)
    for position in (11, 12, 13):
        record.take(NewToken(SequenceId(5), position, 1, -0.5))
    assert (metrics.waiting, metrics.running) == (0, 1)
    record.take(Finished(SequenceId(5), FinishReason.STOP, 3))
    record.end()
    assert (metrics.waiting, metrics.running) == (0, 0)

    failed = log.begin(6, CHAT, prompt_tokens=1, max_tokens=2, sampling=sampling)
    failed.end(error=NodeError("lost", reason="node-lost"))
    given_up = log.begin(7, CHAT, prompt_tokens=1, max_tokens=2, sampling=sampling)
    given_up.take(NewToken(SequenceId(7), 1, 1, -0.5))
    given_up.end()
    assert (metrics.waiting, metrics.running) == (0, 0)
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (13, 4)

    tracing.shutdown()
    done, lost, left = kept.get_finished_spans()
    said = dict(done.attributes or {})
    assert done.name == "chat model"
    assert said[genai.OPERATION] == "chat"
    assert said[genai.FINISH_REASONS] == ("stop",)
    assert (said[genai.INPUT_TOKENS], said[genai.OUTPUT_TOKENS]) == (11, 3)
    assert (said[genai.REQUEST_TOP_K], said[genai.REQUEST_SEED]) == (3, 7)
    assert done.status.status_code is StatusCode.UNSET
    assert lost.status.status_code is StatusCode.ERROR
    assert (lost.attributes or {})["error.type"] == "node-lost"
    assert (left.attributes or {})[genai.FINISH_REASONS] == ("cancelled",)
    assert done.context is not None
    assert announced[0][0] == 5
    assert announced[0][1].startswith(f"00-{done.context.trace_id:032x}-{done.context.span_id:016x}-0")

    points = {(each.name, each.attributes.get("error.type")): each for each in metrics.points()}
    assert sum(points[genai.REQUEST_DURATION, None].counts) == 2
    assert sum(points[genai.REQUEST_DURATION, "node-lost"].counts) == 1
    assert sum(points[genai.TIME_TO_FIRST_TOKEN, None].counts) == 2
    assert sum(points[genai.TIME_PER_OUTPUT_TOKEN, None].counts) == 1


def test_money_is_shown_where_it_is_known() -> None:
    metrics = Metrics()
    assert "myelin_spend" not in metrics.prometheus().decode()
    metrics.watch_spend(lambda: (0.5, 1.25))
    assert "myelin_spend_total 1.25" in metrics.prometheus().decode()
