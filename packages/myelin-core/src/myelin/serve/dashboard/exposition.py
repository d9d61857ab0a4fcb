"""What only the page knows, in Prometheus' text format: how the run is. All else is the telemetry's to tell."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from myelin.serve.dashboard.state import Snapshot, Value

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
        state = GaugeMetricFamily("myelin_run_state", "1 for the state in which the run is.", labels=["state"])
        for name in _STATES:
            state.add_metric([name], float(run.get("state", "starting") == name))
        yield state
        yield _counter("myelin_recoveries", "Losses after which the pipeline served again.", run.get("recoveries"))
        yield _counter("myelin_page_lines_dropped", "Lines of nodes that the page left out.", run.get("lines_dropped"))
        requests = CounterMetricFamily("myelin_requests_ended", "Requests that ended.", labels=["outcome"])
        for outcome in _ENDED:
            requests.add_metric([outcome], _number(run.get(outcome)))
        yield requests


def _counter(name: str, text: str, value: Value) -> Metric:
    return CounterMetricFamily(name, text, value=_number(value))


def _number(value: Value) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
