"""Each request's span and figures, by the GenAI conventions: one server span from its submission to its end.

A request of ``myelin serve`` is a trace of its own that links to the serving phase: that phase may last for weeks.
Where a run answers one person (``myelin prompt``, ``chat``), requests are children of it, and the whole is one trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from myelin.telemetry import attributes, genai
from myelin.telemetry.tracing import context_from, mark_failed, traceparent

if TYPE_CHECKING:
    from myelin.telemetry.metrics import Metrics


class Sampling(Protocol):
    """How tokens are chosen."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def top_p(self) -> float: ...

    @property
    def seed(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RequestLabel:
    """What a request's span says of where it came from.

    Attributes:
        operation: ``chat`` or ``text_completion``.
        stop: Texts that end it.
        parent: The client's own ``traceparent``, where it sent one.
    """

    operation: str = genai.TEXT_COMPLETION
    stop: tuple[str, ...] = ()
    parent: str = ""


UNLABELLED = RequestLabel()
CHAT = RequestLabel(genai.CHAT)
_label: ContextVar[RequestLabel] = ContextVar("myelin-request-label", default=UNLABELLED)


@contextmanager
def labelled(label: RequestLabel) -> Iterator[None]:
    """Requests that are submitted in this block have ``label``.

    It is current, as a span is, and no argument: whoever only computes tokens needn't know of it.
    """
    token = _label.set(label)
    try:
        yield
    finally:
        _label.reset(token)


def current_label() -> RequestLabel:
    """The label of a request that is submitted now."""
    return _label.get()


class RequestLog:
    """Makes a record of each request of one pipeline.

    Args:
        tracer: Makes the spans.
        metrics: Counts; None where nobody asks.
        model: ``gen_ai.request.model``.
        run: The run's name; the beginning of response ids.
        announce: Told of each sequence and its ``traceparent``, for the stages' spans.
        own_traces: Whether each request is a trace of its own.

    Attributes:
        serving: ``traceparent`` of the serving phase.
    """

    def __init__(
        self,
        tracer: Tracer,
        metrics: Metrics | None,
        model: str,
        run: str,
        *,
        announce: Callable[[int, str], object] = lambda sequence, parent: None,
        own_traces: bool = False,
    ) -> None:
        self.serving = ""
        self._tracer = tracer
        self._metrics = metrics
        self._model = model
        self._run = run
        self._announce = announce
        self._own_traces = own_traces

    def begin(
        self,
        sequence: int,
        label: RequestLabel,
        *,
        prompt_tokens: int,
        max_tokens: int,
        sampling: Sampling,
    ) -> RequestRecord:
        """A request was submitted as ``sequence``."""
        operation = label.operation
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            kind=SpanKind.SERVER,
            attributes={
                **self._asked(label, max_tokens, sampling),
                genai.INPUT_TOKENS: prompt_tokens,
                genai.RESPONSE_ID: f"{self._run}-{sequence}",
                attributes.SEQUENCE: sequence,
            },
            **self._place(label.parent),
        )
        self._announce(sequence, traceparent(span))
        if self._metrics is not None:
            self._metrics.request_began(prompt_tokens)
        return RequestRecord(span, self._metrics, operation, self._model)

    def _place(self, parent: str) -> dict[str, Any]:
        """Where the span belongs: below the client's, below the serving phase, or on its own with a link to that."""
        serving = context_from(self.serving)
        if not parent and not self._own_traces:
            return {"context": serving or trace.set_span_in_context(trace.INVALID_SPAN)}
        links = [Link(trace.get_current_span(serving).get_span_context())] if serving is not None else []
        return {"context": context_from(parent) or trace.set_span_in_context(trace.INVALID_SPAN), "links": links}

    def _asked(self, label: RequestLabel, max_tokens: int, sampling: Sampling) -> Mapping[str, AttributeValue]:
        fields: dict[str, AttributeValue] = {
            genai.OPERATION: label.operation,
            genai.PROVIDER: genai.OUR_PROVIDER,
            genai.REQUEST_MODEL: self._model,
            genai.REQUEST_MAX_TOKENS: max_tokens,
            genai.REQUEST_TEMPERATURE: float(sampling.temperature),
        }
        if sampling.temperature > 0:
            fields[genai.REQUEST_TOP_P] = float(sampling.top_p)
            if sampling.top_k:
                fields[genai.REQUEST_TOP_K] = sampling.top_k
            if sampling.seed < 1 << 63:
                fields[genai.REQUEST_SEED] = sampling.seed
        if label.stop:
            fields[genai.REQUEST_STOP] = label.stop
        return fields


class RequestRecord:
    """One request, from its submission to its end."""

    def __init__(self, span: Span, metrics: Metrics | None, operation: str, model: str) -> None:
        self.span = span
        self._metrics = metrics
        self._operation = operation
        self._model = model
        self._began = time.perf_counter()
        self._first = 0.0
        self._last = 0.0
        self._tokens = 0
        self._ended = False

    def take(self, event: object) -> None:
        """A token came, or the end (which has a ``reason``)."""
        reason = getattr(event, "reason", None)
        if reason is None:
            self.token()
        else:
            self.end(str(getattr(reason, "value", reason)))

    def token(self) -> None:
        """A token came."""
        self._last = time.perf_counter()
        self._tokens += 1
        metrics = self._metrics
        if metrics is not None:
            metrics.generation_tokens += 1
        if self._tokens == 1:
            self._first = self._last
            self.span.add_event("first token")
            if metrics is not None:
                metrics.first_token()

    def again(self) -> None:
        """It was submitted again, after a node was lost: its client sees a pause."""
        self.event("submitted again", {genai.OUTPUT_TOKENS: self._tokens})

    def event(self, name: str, fields: Mapping[str, AttributeValue] | None = None) -> None:
        """Something happened on the way, such as another try."""
        self.span.add_event(name, fields)

    def end(self, finish_reason: str = "", error: BaseException | None = None) -> None:
        """It is over: it finished for a reason, was given up by its client (neither), or failed. Twice is fine."""
        if self._ended:
            return
        self._ended = True
        reason = finish_reason or ("error" if error is not None else "cancelled")
        self.span.set_attributes(
            {
                genai.OUTPUT_TOKENS: self._tokens,
                genai.FINISH_REASONS: (reason,),
                genai.RESPONSE_MODEL: self._model,
            }
        )
        if error is not None:
            mark_failed(self.span, error)
        self.span.end()
        if self._metrics is not None:
            self._metrics.request_ended(
                self._operation,
                error=_error_type(error),
                duration_s=time.perf_counter() - self._began,
                ttft_s=self._first - self._began if self._tokens else None,
                per_token_s=(self._last - self._first) / (self._tokens - 1) if self._tokens > 1 else None,
            )


def _error_type(error: BaseException | None) -> str:
    if error is None:
        return ""
    return str(getattr(error, "reason", "") or type(error).__qualname__)
