"""The reference engine keeps the engine contract."""

from __future__ import annotations

from myelin.engine.contract import Engine, EngineOptions
from myelin.engine.reference import ReferenceEngine
from myelin_testkit.engine_compliance import EngineCompliance


class TestReference(EngineCompliance):
    agreement = 0.0

    def make_engine(self, options: EngineOptions) -> Engine:
        return ReferenceEngine(options)
