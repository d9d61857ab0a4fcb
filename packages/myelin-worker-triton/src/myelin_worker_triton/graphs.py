"""CUDA graphs of decode steps: one for each number of columns and power of two of splits.

A graph replays the launches of :meth:`~myelin_worker_triton.stage.DeviceStage.run`, which read their input from fixed
buffers and leave their result where they found it. The grid of attention covers the largest number of splits of its
graph; programs beyond a row's context end at once.
"""

from __future__ import annotations

import torch

from myelin_worker_triton.operators import power_of_two
from myelin_worker_triton.stage import DeviceStage


class Graphs:
    """The graphs of a stage on a CUDA (or HIP) device."""

    def __init__(self, stage: DeviceStage) -> None:
        self._stage = stage
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}

    def run(self, count: int, splits: int) -> None:
        """As :meth:`DeviceStage.run` for ``count`` rows, each of another sequence.

        The first step of a kind is run as it is, which compiles what is missing; the second is captured.
        """
        key = count, power_of_two(splits)
        if key not in self._graphs:
            self._graphs[key] = None
            self._stage.run(*key, single=True)
            return
        graph = self._graphs[key]
        if graph is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._stage.run(*key, single=True)
            self._graphs[key] = graph
        graph.replay()
