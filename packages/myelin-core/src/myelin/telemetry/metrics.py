"""The orchestrator's figures: requests by the GenAI conventions, tokens, money, losses; and every node's latest sample.

Counting is a few additions on plain numbers; points are made of them only when somebody asks: for ``GET /metrics``
(:meth:`Metrics.prometheus`), or for a sink, at the interval that ``OTEL_METRIC_EXPORT_INTERVAL`` says. The nodes'
samples come by the relay each second and are kept as they are, so that both ways show the same.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from myelin.telemetry import attributes, genai
from myelin.telemetry.node_figures import NodeFigures, read_figures
from myelin.telemetry.otlp_metrics import Buckets, Point, gauge, histogram, read_points, resource_attributes, total

if TYPE_CHECKING:
    from myelin.telemetry.hub import Losses
    from myelin.telemetry.signals import OtlpRequest

SAMPLE_LIVES_S = 10.0
"""A node that has sent no sample for this long isn't shown any more."""


class Metrics:
    """See the module's text. May be called from any thread.

    Args:
        model: ``gen_ai.request.model``.
        run: The run's name.

    Attributes:
        running, waiting: Requests between their begin and their end, with and without a first token.
        prompt_tokens, generation_tokens: Since the beginning.
    """

    def __init__(self, model: str = "", run: str = "") -> None:
        self.began_ns = time.time_ns()
        self.model = model
        self.run = run
        self.running = 0
        self.waiting = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._finished: Counter[tuple[str, str]] = Counter()
        self._times: dict[tuple[str, str, str], Buckets] = {}
        self._spend: Callable[[], tuple[float, float] | None] = lambda: None
        self._losses: Callable[[], Iterable[Losses]] = tuple
        self._samples: dict[str, tuple[float, OtlpRequest]] = {}
        self._lock = threading.Lock()

    # What is counted.

    def request_began(self, prompt_tokens: int) -> None:
        """A request was submitted."""
        with self._lock:
            self.waiting += 1
            self.prompt_tokens += prompt_tokens

    def first_token(self) -> None:
        """A request got its first token."""
        with self._lock:
            self.waiting -= 1
            self.running += 1

    def request_ended(
        self, operation: str, *, error: str, duration_s: float, ttft_s: float | None, per_token_s: float | None
    ) -> None:
        """A request ended.

        Args:
            operation: ``chat`` or ``text_completion``.
            error: ``error.type``; empty where there was none.
            duration_s: From its begin to its end.
            ttft_s: To its first token; None where there was none.
            per_token_s: From each token to the next, on average; None where there were fewer than two.
        """
        with self._lock:
            if ttft_s is None:
                self.waiting -= 1
            else:
                self.running -= 1
            self._finished[operation, error] += 1
            self._observe(genai.REQUEST_DURATION, operation, error, duration_s)
            if ttft_s is not None and not error:
                self._observe(genai.TIME_TO_FIRST_TOKEN, operation, "", ttft_s)
            if per_token_s is not None and not error:
                self._observe(genai.TIME_PER_OUTPUT_TOKEN, operation, "", per_token_s)

    def _observe(self, name: str, operation: str, error: str, seconds: float) -> None:
        key = (name, operation, error)
        if key not in self._times:
            self._times[key] = Buckets(genai.BUCKETS[name])
        self._times[key].add(seconds)

    def watch_spend(self, spend: Callable[[], tuple[float, float] | None]) -> None:
        """Where to ask for dollars an hour and dollars; None while that is unknown."""
        self._spend = spend

    def watch_losses(self, losses: Callable[[], Iterable[Losses]]) -> None:
        """Where to ask for what telemetry was dropped."""
        self._losses = losses

    def sample(self, request: OtlpRequest) -> None:
        """A node's sample came; it replaces the one before."""
        instance = str(resource_attributes(request).get(attributes.SERVICE_INSTANCE_ID, ""))
        with self._lock:
            self._samples[instance] = (time.monotonic(), request)

    def forget(self, instance: str) -> None:
        """A node is gone."""
        with self._lock:
            self._samples.pop(instance, None)

    # What is told.

    def samples(self) -> tuple[OtlpRequest, ...]:
        """Every node's latest sample."""
        now = time.monotonic()
        with self._lock:
            old = [instance for instance, (when, _) in self._samples.items() if now - when > SAMPLE_LIVES_S]
            for instance in old:
                del self._samples[instance]
            return tuple(request for _, request in self._samples.values())

    def nodes(self) -> tuple[NodeFigures, ...]:
        """Every node's latest figures, by stage, with the time of a hop worked out from all of them."""
        return read_figures(self.samples())

    def points(self) -> Iterator[Point]:
        """The orchestrator's own points."""
        with self._lock:
            finished, times = dict(self._finished), {key: _copy(each) for key, each in self._times.items()}
        yield gauge("myelin.requests.running", "{request}", self.running, description="requests that get tokens")
        yield gauge("myelin.requests.waiting", "{request}", self.waiting, description="requests without a token yet")
        yield total("myelin.tokens.prompt", "{token}", self.prompt_tokens, description="tokens of prompts")
        yield total("myelin.tokens.generation", "{token}", self.generation_tokens, description="new tokens")
        for (operation, error), count in finished.items():
            fields = self._fields(operation, error)
            yield total("myelin.requests.finished", "{request}", count, fields, "requests that have ended")
        for (name, operation, error), buckets in times.items():
            yield histogram(name, "s", buckets, self._fields(operation, error), _DESCRIPTIONS[name])
        spend = self._spend()
        if spend is not None:
            yield gauge("myelin.spend.rate", "{USD}/h", float(spend[0]), description="dollars an hour, now")
            yield total("myelin.spend", "{USD}", float(spend[1]), description="dollars since the beginning")
        for loss in self._losses():
            where = {attributes.SINK: loss.where, attributes.SIGNAL: loss.signal.value}
            yield total("myelin.telemetry.dropped", "{record}", loss.count, where, "telemetry that was dropped")
        for hop in (node.hop_seconds for node in self.nodes() if node.stage == 0):
            if hop is not None:
                yield gauge("myelin.hop.duration", "s", hop, description="one hop between two stages, on average")

    def _fields(self, operation: str, error: str) -> dict[str, str]:
        fields = {
            genai.OPERATION: operation,
            genai.PROVIDER: genai.OUR_PROVIDER,
            genai.REQUEST_MODEL: self.model,
            genai.RESPONSE_MODEL: self.model,
        }
        return {**fields, attributes.ERROR_TYPE: error} if error else fields

    def prometheus(self) -> bytes:
        """Everything, the nodes' samples included, as Prometheus's text exposition."""
        from myelin.telemetry.prometheus import render

        points = list(self.points())
        for request in self.samples():
            points += read_points(request)
        return render(points)


_DESCRIPTIONS = {
    genai.REQUEST_DURATION: "from a request's begin to its end",
    genai.TIME_TO_FIRST_TOKEN: "from a request's begin to its first token",
    genai.TIME_PER_OUTPUT_TOKEN: "from one token to the next, on average over a request",
}


def _copy(buckets: Buckets) -> Buckets:
    copy = Buckets(buckets.bounds)
    copy.counts, copy.total = list(buckets.counts), buckets.total
    return copy
