"""What this process and its machine are doing: processor, memory, and GPUs where there are any.

GPUs are asked by ``nvidia-smi``, which comes with the driver, at most every five seconds: it takes a good part of a
second.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

import psutil

from myelin.telemetry import node_figures as names
from myelin.telemetry.otlp_metrics import Point, gauge

GPU_EVERY_S = 5.0
GPU_TIMEOUT_S = 3.0
_QUERY = (
    "--query-gpu=index,utilization.gpu,memory.used,memory.total,power.draw",
    "--format=csv,noheader,nounits",
)


class MachineSampler:
    """Samples; blocking, belongs in a thread.

    Args:
        find: Where ``nvidia-smi`` is; None where there is none.
        run: Runs it and gives what it writes.
        clock: Seconds.
    """

    def __init__(
        self,
        *,
        find: Callable[[], str | None] = lambda: shutil.which("nvidia-smi"),
        run: Callable[[Sequence[str]], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first answer only sets the beginning
        psutil.cpu_percent()
        self._tool = find()
        self._run = run or _output
        self._clock = clock
        self._gpu_at: float | None = None
        self._gpus: list[Point] = []

    def sample(self) -> list[Point]:
        """What there is now."""
        memory = psutil.virtual_memory()
        return [
            gauge(names.PROCESS_CPU, "1", self._process.cpu_percent() / 100, description="of one core"),
            gauge(names.PROCESS_MEMORY, "By", int(self._process.memory_info().rss), description="resident memory"),
            gauge(names.SYSTEM_CPU, "1", psutil.cpu_percent() / 100, description="of all cores"),
            gauge(names.SYSTEM_MEMORY, "By", int(memory.total - memory.available), description="memory in use"),
            gauge(names.SYSTEM_MEMORY_LIMIT, "By", int(memory.total), description="memory of the machine"),
            *self._gpu_points(),
        ]

    def _gpu_points(self) -> list[Point]:
        if self._tool is None:
            return []
        now = self._clock()
        if self._gpu_at is None or now - self._gpu_at >= GPU_EVERY_S:
            self._gpu_at = now
            try:
                self._gpus = parse_gpus(self._run([self._tool, *_QUERY]))
            except (OSError, subprocess.SubprocessError):
                self._gpus = []
        return self._gpus


def parse_gpus(table: str) -> list[Point]:
    """The points of ``nvidia-smi``'s table: a line for each GPU with its index, per cent, MiB, MiB and watts; what a
    GPU doesn't know (``[N/A]``) is left out. Pure."""
    points = []
    kinds = (
        (names.GPU_UTILIZATION, "1", 0.01, "of the time a kernel ran"),
        (names.GPU_MEMORY, "By", 1 << 20, "memory in use"),
        (names.GPU_MEMORY_LIMIT, "By", 1 << 20, "memory of the GPU"),
        (names.GPU_POWER, "W", 1.0, "power drawn"),
    )
    for line in table.splitlines():
        index, *values = (part.strip() for part in line.split(","))
        for (name, unit, factor, description), text in zip(kinds, values, strict=False):
            try:
                value = float(text) * factor
            except ValueError:
                continue
            fields = {"hw.id": index, "hw.type": "gpu"}
            points.append(gauge(name, unit, int(value) if unit == "By" else value, fields, description))
    return points


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True)
    return done.stdout
