"""What commands believe to be a live pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from scripted_pipeline import ScriptedPipeline

from myelin.cluster.intents import Spend
from myelin.errors import MyelinError
from myelin.orchestrator.events import NodeLog, Observer, PhaseEvent, ProgressEvent
from myelin.orchestrator.pipeline import StageStatus
from myelin.orchestrator.request import RunRequest
from myelin.serve.prompts import Prompter
from myelin.values import NodeId

STAGES = (
    StageStatus(0, (0, 2), NodeId("stage-0"), "process", "cpu", 1000, 1000, 1200, 64, 5000, 6000, 2, 0.5),
    StageStatus(1, (2, 3), NodeId("stage-1"), "process", "cpu", 500, 500, 600, 32, 4000, 5000, 2, 0.25),
)


async def for_ever() -> MyelinError:
    """A pipeline that isn't lost."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@dataclass
class LivePipeline(ScriptedPipeline):
    """A scripted pipeline with everything else that commands look at."""

    when_lost: Callable[[], Awaitable[MyelinError]] = for_ever
    stages: tuple[StageStatus, ...] = STAGES
    bootstrap_seconds: float = 1.25
    options: Any = field(default_factory=lambda: SimpleNamespace(max_context=100, max_sequences=2))
    parameters: Any = field(default_factory=lambda: SimpleNamespace(vocab_size=256))
    metrics: Any = None
    plan: Any = field(default_factory=lambda: SimpleNamespace(model_uri="/some/model.gguf"))

    spend: Callable[[], Spend] = Spend

    async def status(self) -> tuple[StageStatus, ...]:
        return tuple(replace(stage, peak_resident_bytes=7000) for stage in self.stages)

    async def failed(self) -> MyelinError:
        return await self.when_lost()


@dataclass
class ScriptedRun:
    """Opens the pipeline, and remembers with what.

    Attributes:
        before: Awaited while the pipeline comes up.
        error: Raised instead of coming up.
        opened, closed: How often.
    """

    pipeline: LivePipeline = field(default_factory=LivePipeline)
    has_template: bool = True
    before: Callable[[], Awaitable[None]] | None = None
    error: BaseException | None = None
    request: RunRequest | None = None
    opened: int = 0
    closed: int = 0

    @asynccontextmanager
    async def open(self, request: RunRequest, registry: object, observer: Observer) -> AsyncIterator[LivePipeline]:
        self.request = request
        self.opened += 1
        try:
            observer.phase(PhaseEvent("stage_provision", "started"))
            observer.progress(ProgressEvent(NodeId("stage-0"), 0, "load", 0, 1000))
            observer.log(NodeLog(NodeId("stage-0"), "stderr", "a line of a node"))
            if self.before is not None:
                await self.before()
            if self.error is not None:
                raise self.error
            observer.progress(ProgressEvent(NodeId("stage-0"), 0, "load", 1000, 1000))
            observer.phase(PhaseEvent("stage_provision", "done", 0.5))
            yield self.pipeline
        finally:
            self.closed += 1

    def prompter(self, pipeline: LivePipeline) -> Prompter:
        template: Any = "any" if self.has_template else None
        tokenizer: Any = pipeline.tokenizer
        return Prompter(tokenizer, template, pipeline.options.max_context)
