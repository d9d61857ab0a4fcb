"""A live chain of stages: generates, tells how it is, and says when it is lost.

While a node is replaced it is *paused*: what was asked for goes on afterwards where it was, and what is asked for
meanwhile waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from opentelemetry.trace import Tracer

from myelin.cluster.intents import Spend
from myelin.engine.contract import EngineOptions
from myelin.errors import MyelinError, RequestError
from myelin.model.architecture import Hyperparameters
from myelin.model.facts import ModelFacts
from myelin.model.tokenizer import Tokenizer
from myelin.orchestrator.admissions import Admissions
from myelin.orchestrator.background import all_of, fresh
from myelin.orchestrator.control import NodeControl
from myelin.orchestrator.head_edge import Event, HeadEdge
from myelin.orchestrator.request import RunRequest
from myelin.planner.run_plan import RunPlan
from myelin.telemetry.requests import RequestLabel, RequestLog, current_label
from myelin.values import GREEDY, Epoch, NodeId, SamplingParams
from myelin.wire.requests import Finished

if TYPE_CHECKING:
    from myelin.telemetry.logbook import Logbook
    from myelin.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class StageStatus:
    """One stage as it is. Sizes are bytes.

    Attributes:
        index, layers: Which, and its layers ``(first, end)``.
        node, provider, engine: Where and by what it is computed.
        planned_bytes: Weights that it was planned to hold.
        fetched_bytes: Tensor bytes that it read.
        weight_bytes, kv_bytes: Held for weights; reserved for keys and values.
        resident_bytes, peak_resident_bytes: Of the whole worker process, now and at most; 0 where it could not be
            asked.
        threads: Compute threads.
        load_seconds: What loading took.
        attempt: Which start of the node it is.
        steps, rows, busy_seconds: Steps that the stage has computed, tokens in them, and the time that they took.
        running, waiting: Sequences at the head; 0 elsewhere.
    """

    index: int
    layers: tuple[int, int]
    node: NodeId
    provider: str
    engine: str
    planned_bytes: int
    fetched_bytes: int
    weight_bytes: int
    kv_bytes: int
    resident_bytes: int
    peak_resident_bytes: int
    threads: int
    load_seconds: float
    attempt: int = 1
    steps: int = 0
    rows: int = 0
    busy_seconds: float = 0.0
    running: int = 0
    waiting: int = 0


class Pipeline:
    """What :func:`myelin.orchestrator.bootstrap.running` gives. The event loop owns it.

    Attributes:
        request, plan, facts, parameters, tokenizer: What runs.
        options: The engine options in effect (the context resolved).
        stages: As they were when they had loaded; those of replaced nodes anew.
        bootstrap_seconds: From the request to readiness.
        recoveries: How often it was mended.
        spend: What its nodes cost, also after their end.
        tracer, trace_parent: For spans below the serving phase.
        request_log: Records requests; None where nobody wants to know of them.
        metrics, logbook: Figures and last lines, where somebody watches (``RunRequest.live``) or a sink takes them.
    """

    def __init__(
        self,
        *,
        request: RunRequest,
        plan: RunPlan,
        facts: ModelFacts,
        parameters: Hyperparameters,
        tokenizer: Tokenizer,
        options: EngineOptions,
        tracer: Tracer,
        requests: RequestLog | None = None,
        metrics: Metrics | None = None,
        logbook: Logbook | None = None,
    ) -> None:
        self.request = request
        self.plan = plan
        self.facts = facts
        self.parameters = parameters
        self.tokenizer = tokenizer
        self.options = options
        self.stages: tuple[StageStatus, ...] = ()
        self.bootstrap_seconds = 0.0
        self.spend: Callable[[], Spend] = Spend
        self.recoveries = 0
        self.tracer = tracer
        self.trace_parent = ""
        self.request_log = requests
        self.metrics = metrics
        self.logbook = logbook
        self._controls: tuple[NodeControl, ...] = ()
        self._admissions = Admissions(options.max_context)
        self._epoch = Epoch(0)
        self._lost = asyncio.Event()
        self._error: MyelinError | None = None

    @property
    def requests(self) -> int:
        """How many sequences were submitted."""
        return self._admissions.submitted

    @property
    def epoch(self) -> Epoch:
        """The epoch that is open, or was last."""
        return self._epoch

    @property
    def recovering(self) -> bool:
        """Whether it is paused until a node is replaced, or its edges are mended."""
        return self._error is None and self._admissions.paused

    @property
    def error(self) -> MyelinError | None:
        """Why the pipeline is lost, once it is."""
        return self._error

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        ignore_end: bool = False,
    ) -> AsyncGenerator[Event, None]:
        """New tokens as they are chosen, then one :class:`Finished`.

        Args:
            prompt: Token ids.
            max_tokens: New tokens at most; the context ends a generation too.
            sampling: How each is chosen.
            ignore_end: Go on past end-of-generation tokens.

        Closing the generator cancels the sequence. What the request's span says of where it came from is the label that
        is current (:func:`~myelin.telemetry.requests.labelled`).

        Raises:
            RequestError: At once: the prompt is empty, doesn't fit the context, or holds an id outside the vocabulary;
                a number is out of range.
            MyelinError: While iterating: the pipeline was lost, or the engine failed.
        """
        tokens = tuple(int(token) for token in prompt)
        check_request(tokens, max_tokens, sampling, self.options.max_context, self.parameters.vocab_size)
        return self._generate(tokens, max_tokens, sampling, ignore_end, current_label())

    async def _generate(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        sampling: SamplingParams,
        ignore_end: bool,
        label: RequestLabel,
    ) -> AsyncGenerator[Event, None]:
        mailbox = self._admissions.submit(
            prompt,
            max_tokens=min(max_tokens, self.options.max_context),
            sampling=sampling,
            ignore_end=ignore_end,
        )
        record = None
        if self.request_log is not None:
            record = self.request_log.begin(
                mailbox.order.sequence, label, prompt_tokens=len(prompt), max_tokens=max_tokens, sampling=sampling
            )
            mailbox.on_again = record.again
        try:
            while True:
                event = await mailbox.get()
                if record is not None:
                    record.take(event)
                yield event
                if isinstance(event, Finished):
                    return
        except MyelinError as error:
            if record is not None:
                record.end(error=error)
            raise
        finally:
            self._admissions.forget(mailbox)
            if record is not None:
                record.end()

    def pause(self) -> None:
        """Something is lost, and is being mended: requests wait, with what they have."""
        self._admissions.pause()

    def strike(self, error: MyelinError) -> None:
        """An engine died, perhaps of what was under way: a request that was there before ends with ``error``."""
        self._admissions.strike(error)

    @property
    def under_way(self) -> int:
        """How many requests have not ended."""
        return self._admissions.under_way

    def resume(self, edge: HeadEdge, stages: Sequence[StageStatus], controls: Sequence[NodeControl]) -> None:
        """A token has come through the chain, by ``edge``: requests go on."""
        self.stages = tuple(stages)
        self._controls = tuple(controls)
        self._epoch = edge.epoch
        self._admissions.resume(edge)

    async def status(self) -> tuple[StageStatus, ...]:
        """The stages as they are now; a node that can't be asked keeps what was known of it, without its memory."""
        return tuple(
            await all_of(_measured(stage, control) for stage, control in zip(self.stages, self._controls, strict=True))
        )

    def fail(self, error: MyelinError) -> None:
        """The pipeline is lost: everybody who waits is told at once. The first reason counts."""
        if self._error is None:
            self._error = error
        self._admissions.fail(self._error)
        self._lost.set()

    def close(self, error: MyelinError) -> None:
        """The run ends in good order: whoever still waits is told ``error``."""
        self._admissions.fail(error)

    async def failed(self) -> MyelinError:
        """Return once the pipeline is lost, with the reason."""
        await self._lost.wait()
        assert self._error is not None
        return fresh(self._error)


async def _measured(stage: StageStatus, control: NodeControl) -> StageStatus:
    try:
        status = await control.status()
    except MyelinError:
        return replace(stage, resident_bytes=0)
    return replace(
        stage,
        resident_bytes=status.resident_bytes,
        peak_resident_bytes=status.peak_resident_bytes,
        steps=status.steps,
        rows=status.rows,
        busy_seconds=status.busy_seconds,
        running=status.sequences_running,
        waiting=status.sequences_waiting,
    )


def check_request(
    prompt: tuple[int, ...], max_tokens: int, sampling: SamplingParams, max_context: int, vocab_size: int
) -> None:
    """Whether a request can be served. Pure.

    Raises:
        RequestError: It can't; both numbers are named.
    """
    if not prompt:
        raise RequestError("the prompt is empty", "give it at least one token", reason="prompt-empty")
    if len(prompt) >= max_context:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, which leaves no room for an answer in the context of {max_context}",
            "shorten the prompt, or start with a larger --max-context",
            reason="prompt-too-long",
        )
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= vocab_size:
        raise RequestError(
            f"token {lowest if lowest < 0 else highest} is outside the vocabulary of {vocab_size}",
            "encode the prompt with the model's own tokenizer",
            reason="token-out-of-range",
        )
    if max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}", "ask for at least one new token", reason="max-tokens")
    if not 0.0 <= sampling.temperature <= 1e6:  # false for NaN too
        raise RequestError(
            f"a temperature of {sampling.temperature} is out of range", "use 0 (greedy) to 2", reason="sampling"
        )
    if not 0.0 < sampling.top_p <= 1.0:
        raise RequestError(f"top_p is {sampling.top_p}", "it is above 0 and at most 1", reason="sampling")
    if not 0 <= sampling.top_k < 1 << 32:
        raise RequestError(f"top_k is {sampling.top_k}", "0 keeps all tokens", reason="sampling")
    if not 0 <= sampling.seed < 1 << 64:
        raise RequestError(f"the seed {sampling.seed} is out of range", "it has 64 bits", reason="sampling")
