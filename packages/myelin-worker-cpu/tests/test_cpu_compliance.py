"""The CPU engine against the contract that every engine keeps."""

from __future__ import annotations

from myelin.engine.contract import Engine, EngineOptions
from myelin_testkit.engine_compliance import EngineCompliance
from myelin_worker_cpu.engine import CpuEngine


class TestCpuEngine(EngineCompliance):
    def make_engine(self, options: EngineOptions) -> Engine:
        return CpuEngine(options)
