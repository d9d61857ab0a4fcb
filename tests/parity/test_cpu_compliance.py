"""The ``cpu`` engine keeps the engine contract, as the reference engine does."""

from __future__ import annotations

from myelin.engine.contract import Engine, EngineOptions
from myelin_testkit.engine_compliance import EngineCompliance
from myelin_worker_cpu import plugin


class TestCpu(EngineCompliance):
    def make_engine(self, options: EngineOptions) -> Engine:
        engine = plugin.myelin_engine(name="cpu", options=options)
        assert engine is not None
        return engine
