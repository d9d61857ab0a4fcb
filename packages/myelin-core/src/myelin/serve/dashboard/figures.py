"""The arithmetic of the page: rows and rates from counts and times. Everything here is pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from myelin.serve.dashboard.state import Row, Value, short
from myelin.serve.request_book import RequestTale

if TYPE_CHECKING:
    from myelin.orchestrator.pipeline import StageStatus
    from myelin.telemetry.node_figures import NodeFigures


def request_row(tale: RequestTale, now: float) -> Row:
    """A request as a row of the page: durations in milliseconds, None where it hasn't come to that.

    ``queue_ms`` is from its arrival until it began, ``ttft_ms`` from its beginning to the first token, ``token_ms`` the
    mean time between two tokens after that, up to ``now`` where it still runs.
    """
    token_ms = None
    if tale.tokens > 1:
        token_ms = _milliseconds(tale.first, tale.ended or now, tale.tokens - 1)
    return {
        "number": tale.number,
        "source": tale.source,
        "label": tale.label,
        "state": tale.state.value,
        "prompt_tokens": tale.prompt_tokens,
        "max_tokens": tale.max_tokens,
        "tokens": tale.tokens,
        "arrived": tale.arrived,
        "ended": tale.ended or None,
        "queue_ms": _milliseconds(tale.arrived, tale.began),
        "ttft_ms": _milliseconds(tale.began, tale.first),
        "token_ms": token_ms,
        "outcome": tale.outcome,
        "detail": short(tale.detail),
    }


def _milliseconds(began: float, ended: float, parts: int = 1) -> float | None:
    return round(max(ended - began, 0.0) * 1000 / parts, 2) if began and ended else None


@dataclass(frozen=True, slots=True)
class Counted:
    """What was counted up to a moment. ``at`` is of a monotonic clock, in seconds."""

    at: float
    tokens: int


def sample(before: Counted, now: Counted, running: int, waiting: int) -> Row:
    """A sample of the rate of tokens since the one before."""
    seconds = max(now.at - before.at, 1e-3)
    rate = max(now.tokens - before.tokens, 0) / seconds
    return {"tokens_per_s": round(rate, 2), "running": running, "waiting": waiting}


def stage_facts(stage: StageStatus) -> dict[str, Value]:
    """What a stage is made of."""
    return {
        "node": str(stage.node),
        "first_layer": stage.layers[0],
        "end_layer": stage.layers[1],
        "provider": stage.provider,
        "engine": stage.engine,
        "threads": stage.threads,
        "weight_bytes": stage.weight_bytes,
        "fetched_bytes": stage.fetched_bytes,
        "kv_bytes": stage.kv_bytes,
        "load_s": round(stage.load_seconds, 3),
    }


def node_figures(node: NodeFigures) -> dict[str, Value]:
    """What a node sampled of itself: ``hop_ms`` (None for the head, which no stage is before), ``kv_used`` (a share),
    ``cpu`` (of one core), and its GPU where it has one."""
    return {
        "hop_ms": _in_milliseconds(node.hop_seconds) if node.stage > 0 else None,
        "kv_used": node.kv_usage,
        "cpu": round(node.process_cpu, 3),
        "gpu": node.gpu_utilization,
        "gpu_bytes": node.gpu_memory,
        "gpu_watts": node.gpu_power,
    }


def _in_milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def stage_figures(
    before: Sequence[StageStatus], now: Sequence[StageStatus], seconds: float
) -> tuple[dict[str, Value], ...]:
    """How busy each stage was during ``seconds``, from its counts before and now.

    ``busy`` is the share of the time in which its engine computed, ``step_ms`` the mean time of a step. A stage whose
    counts went back is another attempt, which counts from nothing.
    """
    earlier = {stage.index: stage for stage in before}
    return tuple(_stage_figures(earlier.get(stage.index), stage, max(seconds, 1e-3)) for stage in now)


def _stage_figures(before: StageStatus | None, now: StageStatus, seconds: float) -> dict[str, Value]:
    if before is None or before.steps > now.steps or before.busy_seconds > now.busy_seconds:
        steps, rows, busy = now.steps, now.rows, now.busy_seconds
    else:
        steps, rows = now.steps - before.steps, now.rows - before.rows
        busy = now.busy_seconds - before.busy_seconds
    return {
        "busy": round(min(busy / seconds, 1.0), 4),
        "steps_per_s": round(steps / seconds, 2),
        "rows_per_s": round(rows / seconds, 2),
        "step_ms": round(busy * 1000 / steps, 3) if steps else None,
        "resident_bytes": now.resident_bytes,
        "peak_resident_bytes": now.peak_resident_bytes,
    }
