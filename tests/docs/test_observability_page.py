"""docs/observability.md and what is beside it name the metrics, spans and files that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from myelin.telemetry import genai, node_figures
from myelin.telemetry.hub import Losses
from myelin.telemetry.metrics import Metrics
from myelin.telemetry.otlp_metrics import Buckets, Point, gauge, histogram, total
from myelin.telemetry.prometheus import render
from myelin.telemetry.signals import Signal

FOLDER = Path(__file__).parents[2] / "docs" / "observability"
PAGE = FOLDER.with_suffix(".md").read_text("utf-8")
_SECONDS = frozenset({node_figures.STEP_DURATION, node_figures.ROUND_DURATION})
_BYTES = frozenset(
    {
        node_figures.PROCESS_MEMORY,
        node_figures.SYSTEM_MEMORY,
        node_figures.SYSTEM_MEMORY_LIMIT,
        node_figures.GPU_MEMORY,
        node_figures.GPU_MEMORY_LIMIT,
    }
)
_TOTALS = {node_figures.STEPS: "{step}", node_figures.ROWS: "{row}", node_figures.BUSY: "s"}


def node_points() -> list[Point]:
    """A point of each metric that nodes sample, with the units that they have there."""
    fields = {"myelin.node.id": "stage-0", "myelin.node.attempt": 1, "myelin.stage.index": 0}
    found = []
    for name in {value for key, value in vars(node_figures).items() if key.isupper() and isinstance(value, str)}:
        if name == node_figures.QUEUE_DURATION:
            found.append(histogram(name, "s", Buckets(node_figures.QUEUE_BUCKETS), fields))
        elif name == node_figures.RECORD_BYTES:
            found.append(total(name, "By", 1, fields))
        elif name in _TOTALS:
            found.append(total(name, _TOTALS[name], 1, fields))
        else:
            unit = "s" if name in _SECONDS else "By" if name in _BYTES else "W" if name.endswith("power") else "1"
            unit = "{sequence}" if name in (node_figures.RUNNING, node_figures.WAITING) else unit
            found.append(gauge(name, unit, 1.0, fields))
    return found


def own_points() -> list[Point]:
    """A point of each metric of the orchestrator."""
    metrics = Metrics("model", "run")
    metrics.watch_spend(lambda: (1.0, 2.0))
    metrics.watch_losses(lambda: (Losses("otlp", Signal.LOGS, 3),))
    metrics.request_began(1)
    metrics.first_token()
    metrics.request_ended("chat", error="", duration_s=1.0, ttft_s=0.1, per_token_s=0.01)
    return [*metrics.points(), gauge("myelin.hop.duration", "s", 0.001)]


def test_the_page_has_every_metric_and_no_other() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \| ", PAGE.partition("## Metrics")[2].partition("## Logs")[0], re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert told == {point.name for point in (*own_points(), *node_points())}
    assert set(genai.BUCKETS) <= told


def test_the_board_asks_for_metrics_that_there_are() -> None:
    board = json.loads((FOLDER / "grafana-board.json").read_text("utf-8"))
    shown = set(re.findall(r"^(\w+)[{ ]", render([*own_points(), *node_points()]).decode(), re.MULTILINE))
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b((?:myelin|gen_ai|process|system|hw)_\w+)", target["expr"])
        if name not in ("myelin_telemetry_sink", "myelin_telemetry_signal")
    }
    assert asked
    assert asked <= shown
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_other_files_are_whole_and_name_each_other() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))
    assert set(compose["services"]) == {"collector", "jaeger", "prometheus", "grafana"}
    for service in compose["services"].values():
        assert ":" in service["image"]
        for volume in service.get("volumes", ()):
            assert (FOLDER / volume.partition(":")[0]).exists(), volume
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
    collector = yaml.safe_load((FOLDER / "collector.yaml").read_text("utf-8"))
    for pipeline in collector["service"]["pipelines"].values():
        assert set(pipeline["exporters"]) <= set(collector["exporters"])
        assert set(pipeline["receivers"]) <= set(collector["receivers"])
    for name in ("prometheus.yml", "grafana-sources.yaml", "grafana-boards.yaml"):
        assert yaml.safe_load((FOLDER / name).read_text("utf-8"))
