"""What a node samples of itself once a second, and what all nodes' samples together say of the pipeline. Pure.

The time of a hop can't be measured by two clocks. But the head sees each micro-batch go all around, and each stage
knows how long a step takes it; what is left of the round after all steps is shared by the hops, of which a pipeline of
S stages has S (S - 1 between stages, and one back to the head):

    hop = (round - sum of steps) / S

Waiting for a stage that is busy with another micro-batch is in it, too: under load it is the time between stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from myelin.telemetry import attributes
from myelin.telemetry.otlp_metrics import read_points

if TYPE_CHECKING:
    from myelin.telemetry.signals import OtlpRequest

BUSY_SHARE = "myelin.stage.busy.share"
STEP_DURATION = "myelin.stage.step.duration"
ROUND_DURATION = "myelin.pipeline.round.duration"
STEPS = "myelin.stage.steps"
ROWS = "myelin.stage.rows"
BUSY = "myelin.stage.busy"
RECORD_BYTES = "myelin.stage.record.bytes"
KV_USAGE = "myelin.stage.kv.usage"
RUNNING = "myelin.scheduler.running"
WAITING = "myelin.scheduler.waiting"
QUEUE_DURATION = "myelin.scheduler.queue.duration"
PROCESS_CPU = "process.cpu.utilization"
PROCESS_MEMORY = "process.memory.usage"
SYSTEM_CPU = "system.cpu.utilization"
SYSTEM_MEMORY = "system.memory.usage"
SYSTEM_MEMORY_LIMIT = "system.memory.limit"
GPU_UTILIZATION = "hw.gpu.utilization"
GPU_MEMORY = "hw.gpu.memory.usage"
GPU_MEMORY_LIMIT = "hw.gpu.memory.limit"
GPU_POWER = "hw.power"
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """One node's latest sample. Shares are of 1, times are seconds, sizes are bytes; None is unknown.

    Attributes:
        node, attempt, stage: Who; stage -1 before it has loaded one.
        busy_share, step_seconds: Of the last second.
        round_seconds: Head only: how long a micro-batch takes all around.
        hop_seconds: From one stage to the next, by the formula above.
        steps, rows, busy_seconds, record_bytes: Since the node began.
        kv_usage: Share of the positions for keys and values that are in use.
        running, waiting: Head only: sequences.
        process_cpu: Of one core; several are more than 1.
        process_memory, system_cpu, system_memory: Of its process, of its machine.
        gpu_utilization, gpu_memory, gpu_power: Of its GPUs: on average, in all, watts in all.
    """

    node: str
    attempt: int
    stage: int = -1
    busy_share: float = 0.0
    step_seconds: float | None = None
    round_seconds: float | None = None
    hop_seconds: float | None = None
    steps: int = 0
    rows: int = 0
    busy_seconds: float = 0.0
    record_bytes: int = 0
    kv_usage: float | None = None
    running: int | None = None
    waiting: int | None = None
    process_cpu: float = 0.0
    process_memory: int = 0
    system_cpu: float = 0.0
    system_memory: int = 0
    gpu_utilization: float | None = None
    gpu_memory: int | None = None
    gpu_power: float | None = None


_FIELDS = {
    BUSY_SHARE: "busy_share",
    STEP_DURATION: "step_seconds",
    ROUND_DURATION: "round_seconds",
    STEPS: "steps",
    ROWS: "rows",
    BUSY: "busy_seconds",
    RECORD_BYTES: "record_bytes",
    KV_USAGE: "kv_usage",
    RUNNING: "running",
    WAITING: "waiting",
    PROCESS_CPU: "process_cpu",
    PROCESS_MEMORY: "process_memory",
    SYSTEM_CPU: "system_cpu",
    SYSTEM_MEMORY: "system_memory",
}


def read_figures(samples: Iterable[OtlpRequest]) -> tuple[NodeFigures, ...]:
    """The figures in the nodes' samples, by stage."""
    nodes = sorted((_figures(each) for each in samples), key=lambda each: (each.stage, each.node))
    hop = hop_seconds([each for each in nodes if each.stage >= 0])
    return tuple(replace(each, hop_seconds=hop) if each.stage >= 0 else each for each in nodes)


def hop_seconds(stages: list[NodeFigures]) -> float | None:
    """The time of one hop; None where it isn't known, or where there is no hop."""
    if len(stages) < 2 or stages[0].round_seconds is None:
        return None
    steps = [each.step_seconds for each in stages]
    if any(each is None for each in steps):
        return None
    return max(0.0, stages[0].round_seconds - sum(each for each in steps if each is not None)) / len(stages)


def _figures(sample: OtlpRequest) -> NodeFigures:
    values: dict[str, object] = {}
    gpus: dict[str, list[float]] = {}
    node, attempt, stage = "", 0, -1
    for point in read_points(sample):
        node = str(point.attributes.get(attributes.NODE, node))
        attempt = int(point.attributes.get(attributes.ATTEMPT, attempt))
        stage = int(point.attributes.get(attributes.STAGE, stage))
        if point.name in _FIELDS:
            values[_FIELDS[point.name]] = point.value
        elif point.name.startswith("hw."):
            gpus.setdefault(point.name, []).append(point.value)
    if used := gpus.get(GPU_UTILIZATION):
        values["gpu_utilization"] = sum(used) / len(used)
    if held := gpus.get(GPU_MEMORY):
        values["gpu_memory"] = int(sum(held))
    if power := gpus.get(GPU_POWER):
        values["gpu_power"] = sum(power)
    return replace(NodeFigures(node, attempt, stage), **values)  # type: ignore[arg-type]  # each field by its own name
