"""A pipeline that says what it was told to, one byte a token, and remembers what was asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from myelin.errors import MyelinError, RequestError
from myelin.values import GREEDY, FinishReason, SamplingParams, SequenceId
from myelin.wire.requests import Finished, NewToken


class ByteTokenizer:
    """Each byte is a token; 256 is a control token."""

    vocab_size = 257
    bos_id = 256
    eos_id = 256
    add_bos = False
    end_ids = frozenset({256})

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


@dataclass
class Call:
    """What was asked, and what became of it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    ignore_end: bool
    given: int = 0
    cancelled: bool = False

    @property
    def text(self) -> str:
        return bytes(self.prompt).decode()


@dataclass
class ScriptedPipeline:
    """Answers each prompt with ``answer(prompt text)``.

    Attributes:
        delay_s: Before each token.
        max_context: A prompt of this length or more is refused.
        error: Raised instead of the next token, once it is set.
        running, most: How many generations run, and ran at once.
    """

    answer: Callable[[str], str] = lambda text: f"<{text}>"
    delay_s: float = 0.0
    max_context: int = 4096
    error: MyelinError | None = None
    calls: list[Call] = field(default_factory=list)
    running: int = 0
    most: int = 0
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)

    def generate(
        self, prompt: Sequence[int], *, max_tokens: int, sampling: SamplingParams = GREEDY, ignore_end: bool = False
    ) -> AsyncGenerator[NewToken | Finished, None]:
        if len(prompt) >= self.max_context:
            raise RequestError(f"{len(prompt)} tokens in a context of {self.max_context}", "shorten it")
        call = Call(tuple(prompt), max_tokens, sampling, ignore_end)
        self.calls.append(call)
        return self._run(call)

    async def _run(self, call: Call) -> AsyncGenerator[NewToken | Finished, None]:
        sequence = SequenceId(len(self.calls))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            tokens = list(self.answer(call.text).encode())
            for token in tokens[: call.max_tokens]:
                await asyncio.sleep(self.delay_s)
                if self.error is not None:
                    raise self.error
                call.given += 1
                yield NewToken(sequence, len(call.prompt) + call.given - 1, token, -0.5)
            reason = FinishReason.STOP if len(tokens) < call.max_tokens else FinishReason.LENGTH
            yield Finished(sequence, reason, call.given)
        except (GeneratorExit, asyncio.CancelledError):
            call.cancelled = True
            raise
        finally:
            self.running -= 1
