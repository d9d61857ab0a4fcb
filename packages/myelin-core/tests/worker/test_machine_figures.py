"""What a node says of its machine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from myelin.worker.machine import MachineSampler, parse_gpus


def test_a_table_of_gpus_is_read() -> None:
    points = parse_gpus("0, 37, 1024, 81920, 312.55\n1, [N/A], 0, 81920, [N/A]\n")
    found = {(point.name, point.attributes["hw.id"]): point.value for point in points}
    assert found == {
        ("hw.gpu.utilization", "0"): 0.37,
        ("hw.gpu.memory.usage", "0"): 1024 << 20,
        ("hw.gpu.memory.limit", "0"): 81920 << 20,
        ("hw.power", "0"): 312.55,
        ("hw.gpu.memory.usage", "1"): 0,
        ("hw.gpu.memory.limit", "1"): 81920 << 20,
    }
    assert parse_gpus("") == []
    assert parse_gpus("NVIDIA-SMI has failed") == []


def test_gpus_are_asked_seldom_and_never_where_there_are_none() -> None:
    asked: list[Sequence[str]] = []
    now = [0.0]

    def run(command: Sequence[str]) -> str:
        asked.append(command)
        if len(asked) > 1:
            raise subprocess.TimeoutExpired(command, 3)
        return "0, 50, 1, 2, 3\n"

    sampler = MachineSampler(find=lambda: "/bin/smi", run=run, clock=lambda: now[0])
    names = [{point.name for point in sampler.sample()} for _ in range(3)]
    assert "hw.gpu.utilization" in names[0] & names[2]
    assert len(asked) == 1
    now[0] = 6.0
    assert "hw.gpu.utilization" not in {point.name for point in sampler.sample()}
    assert len(asked) == 2

    without = MachineSampler(find=lambda: None, run=run)
    points = {point.name: point.value for point in without.sample()}
    assert points["process.memory.usage"] > 1 << 20
    assert 0 < points["system.memory.usage"] < points["system.memory.limit"]
    assert len(asked) == 2
