"""From a prompt's tokens to text: what comes out of a pipeline, made readable while it comes.

Bytes of a character that isn't whole yet are held back, and so is the beginning of what may become a stop string; a
stop string ends the generation and isn't part of the text.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from myelin.errors import MyelinError
from myelin.model.detokenize import StopStrings, TextStream
from myelin.model.tokenizer import Tokenizer
from myelin.serve.request_book import RequestBook, RequestState, RequestTale
from myelin.telemetry.requests import UNLABELLED, RequestLabel, labelled
from myelin.values import GREEDY, FinishReason, SamplingParams
from myelin.wire.requests import Finished, NewToken


class TokenPipeline(Protocol):
    """What generation needs of a pipeline; :class:`myelin.orchestrator.pipeline.Pipeline` is one."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""

    def generate(
        self, prompt: Sequence[int], *, max_tokens: int, sampling: SamplingParams = GREEDY, ignore_end: bool = False
    ) -> AsyncGenerator[NewToken | Finished, None]:
        """New tokens, then one :class:`Finished`; closing it early cancels."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What to generate.

    Attributes:
        prompt: Token ids; at least one.
        max_tokens: New tokens at most, at least 1.
        sampling: How each is chosen.
        stop: Texts that end the generation.
        ignore_end: Go on past end-of-generation tokens.
        label: What the request's span says of where it came from.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    label: RequestLabel = UNLABELLED


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that can be shown now: never empty, whole characters, no part of a stop string."""

    text: str


@dataclass(frozen=True, slots=True)
class Timings:
    """How long it took, in seconds, and how fast it was, in tokens a second.

    Attributes:
        ttft_s: From the request to the first new token.
        elapsed_s: From the request to the end.
        prefill_tokens_per_s: Tokens of the prompt over ``ttft_s``.
        decode_tokens_per_s: New tokens after the first one, over the time from that to the last one; 0 where there
            were fewer than two.
    """

    ttft_s: float
    elapsed_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation.

    Attributes:
        text: All of it, which is what the pieces add up to.
        tokens: The new tokens, those of a stop string included.
        prompt_tokens: Tokens of the prompt.
        finish_reason: Why it ended.
        timings: See there.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    timings: Timings


@dataclass(slots=True)
class _Stopwatch:
    """Notes when tokens came."""

    clock: Callable[[], float]
    began: float = field(init=False)
    first: float = 0.0
    last: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        self.began = self.clock()

    def token(self) -> None:
        self.last = self.clock()
        if self.count == 0:
            self.first = self.last
        self.count += 1

    def timings(self, prompt_tokens: int) -> Timings:
        now = self.clock()
        return timings(
            prompt_tokens=prompt_tokens,
            new_tokens=self.count,
            ttft_s=(self.first if self.count else now) - self.began,
            decode_s=self.last - self.first,
            elapsed_s=now - self.began,
        )


def timings(*, prompt_tokens: int, new_tokens: int, ttft_s: float, decode_s: float, elapsed_s: float) -> Timings:
    """Rates from counts and durations; a rate over no time is 0."""
    decoded = new_tokens - 1
    return Timings(
        ttft_s=ttft_s,
        elapsed_s=elapsed_s,
        prefill_tokens_per_s=prompt_tokens / ttft_s if ttft_s > 0 and new_tokens > 0 else 0.0,
        decode_tokens_per_s=decoded / decode_s if decode_s > 0 and decoded > 0 else 0.0,
    )


async def generate_text(
    pipeline: TokenPipeline,
    request: TextRequest,
    *,
    clock: Callable[[], float] = time.perf_counter,
    tale: RequestTale | None = None,
) -> AsyncGenerator[TextPiece | Completion, None]:
    """Pieces of text as they come, then one :class:`Completion`. Closing it early cancels the generation.

    Args:
        tale: Told how the request fares, up to its end.

    Raises:
        RequestError: The request can't be served (too long for the context, a bad count).
        MyelinError: The pipeline was lost.
    """
    if tale is None:
        tale = RequestBook().arrived("unwatched")
    tale.begin(len(request.prompt), request.max_tokens)
    try:
        async with aclosing(_generate_text(pipeline, request, clock, tale.token)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Completion):
                    tale.end(RequestState.DONE, piece.finish_reason.value)
                yield piece
    except MyelinError as error:
        tale.end(RequestState.FAILED, error.reason, error.message)
        raise
    finally:
        tale.end(RequestState.CANCELLED)


async def _generate_text(
    pipeline: TokenPipeline, request: TextRequest, clock: Callable[[], float], on_token: Callable[[], None]
) -> AsyncGenerator[TextPiece | Completion, None]:
    decoder, stops = TextStream(pipeline.tokenizer), StopStrings(request.stop)
    watch = _Stopwatch(clock)
    tokens: list[int] = []
    pieces: list[str] = []
    reason = FinishReason.STOP
    with labelled(replace(request.label, stop=request.stop)):
        stream = pipeline.generate(
            request.prompt, max_tokens=request.max_tokens, sampling=request.sampling, ignore_end=request.ignore_end
        )
    stopped = False
    async with aclosing(stream):
        async for event in stream:
            if isinstance(event, Finished):
                reason = event.reason
                continue
            watch.token()
            on_token()
            tokens.append(event.token)
            text, stopped = stops.feed(decoder.feed(event.token))
            if text:
                pieces.append(text)
                yield TextPiece(text)
            if stopped:
                break
    if not stopped:
        text, stopped = stops.feed(decoder.finish())
        text += "" if stopped else stops.finish()
        if text:
            pieces.append(text)
            yield TextPiece(text)
    yield Completion(
        text="".join(pieces),
        tokens=tuple(tokens),
        prompt_tokens=len(request.prompt),
        finish_reason=FinishReason.STOP if stopped else reason,
        timings=watch.timings(len(request.prompt)),
    )


async def complete(pipeline: TokenPipeline, request: TextRequest) -> Completion:
    """The whole of :func:`generate_text` at once."""
    async with aclosing(generate_text(pipeline, request)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Completion):
                return piece
    raise AssertionError("a generation ends with its completion")
