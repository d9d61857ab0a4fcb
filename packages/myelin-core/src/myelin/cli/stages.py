"""The stages of a live pipeline, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from myelin.cli.output import human_bytes, table

if TYPE_CHECKING:
    from myelin.orchestrator.pipeline import StageStatus


SLOW = "The engine reference is slow, for comparing others with it: `pip install myelin-worker-cpu` brings a fast one."


def stages_json(stages: Iterable[StageStatus]) -> list[dict[str, object]]:
    """The stages as ``--json`` answers have them."""
    return [
        {
            "index": stage.index,
            "layers": list(stage.layers),
            "node": str(stage.node),
            "provider": stage.provider,
            "engine": stage.engine,
            "threads": stage.threads,
            "planned_bytes": stage.planned_bytes,
            "fetched_bytes": stage.fetched_bytes,
        }
        for stage in stages
    ]


def stages_table(stages: Sequence[StageStatus]) -> str:
    """The stages as a table; below it, a word to whoever has only the slow engine."""
    header = ("stage", "layers", "node", "provider", "engine", "threads", "weights", "KV", "loaded in")
    rows = [
        (
            stage.index,
            f"{stage.layers[0]}-{stage.layers[1] - 1}",
            stage.node,
            stage.provider,
            stage.engine,
            stage.threads,
            human_bytes(stage.weight_bytes),
            human_bytes(stage.kv_bytes),
            f"{stage.load_seconds:.2f} s",
        )
        for stage in stages
    ]
    slow = any(stage.engine == "reference" for stage in stages)
    return table(header, rows, right=(0, 5, 6, 7, 8)) + (f"\n{SLOW}" if slow else "")
