"""What the page knows, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from myelin.serve.dashboard.state import Row, Snapshot, Value

_ENDED = ("done", "cancelled", "failed")
_STATES = ("starting", "serving", "recovering", "lost", "ending", "ended")


def exposition(snapshot: Snapshot) -> bytes:
    """The figures of a snapshot as a Prometheus server reads them."""
    registry = CollectorRegistry()
    registry.register(_Figures(snapshot))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        run = self._snapshot.row("run", "run")
        yield _counter("myelin_generated_tokens", "New tokens of all requests.", run.get("tokens"))
        yield _counter("myelin_prompt_tokens", "Tokens of the prompts of all requests.", run.get("prompt_tokens"))
        yield _gauge("myelin_requests_running", "Requests that are being answered.", run.get("running"))
        yield _gauge("myelin_requests_waiting", "Requests that wait for a place.", run.get("waiting"))
        yield _counter("myelin_recoveries", "Losses after which the pipeline served again.", run.get("recoveries"))
        yield _counter("myelin_log_lines_dropped", "Lines of nodes that the page left out.", run.get("lines_dropped"))
        requests = CounterMetricFamily("myelin_requests", "Requests that ended.", labels=["outcome"])
        for outcome in _ENDED:
            requests.add_metric([outcome], _number(run.get(outcome)))
        yield requests
        state = GaugeMetricFamily("myelin_run_state", "1 for the state in which the run is.", labels=["state"])
        for name in _STATES:
            state.add_metric([name], float(run.get("state", "starting") == name))
        yield state
        stages = list(self._snapshot.tables["stages"].values())
        yield _by_stage("myelin_stage_weight_bytes", "Bytes held for weights.", stages, "weight_bytes")
        yield _by_stage("myelin_stage_kv_bytes", "Bytes reserved for keys and values.", stages, "kv_bytes")
        yield _by_stage("myelin_stage_fetched_bytes", "Tensor bytes that were read.", stages, "fetched_bytes")
        yield _by_stage("myelin_stage_resident_bytes", "Memory of the worker process.", stages, "resident_bytes")
        yield _by_stage("myelin_stage_busy_share", "Share of the last seconds in which it computed.", stages, "busy")


def _counter(name: str, text: str, value: Value) -> Metric:
    return CounterMetricFamily(name, text, value=_number(value))


def _gauge(name: str, text: str, value: Value) -> Metric:
    return GaugeMetricFamily(name, text, value=_number(value))


def _by_stage(name: str, text: str, stages: list[Row], key: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["stage", "node"])
    for stage in stages:
        if stage.get(key) is not None:
            family.add_metric([str(stage["index"]), str(stage.get("node", ""))], _number(stage[key]))
    return family


def _number(value: Value) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
