"""A conversation: what was said, what the model will be given, and the commands of the person."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from myelin.errors import RequestError
from myelin.serve.generation import TextPiece, TextRequest, TokenPipeline, generate_text
from myelin.serve.prompts import CONTEXT, Message, Prompter
from myelin.serve.request_book import RequestBook
from myelin.telemetry.requests import CHAT
from myelin.values import GREEDY, SamplingParams


class Command(Enum):
    """What a line that begins with ``/`` asks for."""

    EXIT = "/exit"
    RESET = "/reset"
    HELP = "/help"


COMMANDS = {
    "/exit": Command.EXIT,
    "/quit": Command.EXIT,
    "/bye": Command.EXIT,
    "/reset": Command.RESET,
    "/new": Command.RESET,
    "/help": Command.HELP,
    "/?": Command.HELP,
}

HELP = "/reset begins a new conversation, /exit (or end of input) leaves, // begins a line with a slash"


def read_line(line: str) -> Command | str:
    """A command, or what the person says to the model. ``//`` at the beginning stands for a single ``/``.

    Raises:
        RequestError: It looks like a command and isn't one.
    """
    text = line.strip()
    if text.startswith("//"):
        return text[1:]
    if not text.startswith("/"):
        return text
    try:
        return COMMANDS[text.lower()]
    except KeyError:
        raise RequestError(f"There is no command {text.split()[0]}", HELP, reason="chat-command") from None


class ChatModel(Protocol):
    """Whoever answers: a pipeline of this process, or a server."""

    def answer(self, messages: Sequence[Message]) -> AsyncGenerator[str, None]:
        """Pieces of the answer to a conversation as they come. Closing it early cancels.

        Raises:
            RequestError: It can't be answered (it doesn't fit, the template refuses it); the model itself is well.
            MyelinError: The model is lost.
        """


class PipelineModel:
    """Answers by a pipeline of this process.

    Args:
        pipeline: What computes.
        prompter: What turns a conversation into tokens.
        max_tokens, sampling, stop: For every answer.
        book: Told of every answer.
    """

    def __init__(
        self,
        pipeline: TokenPipeline,
        prompter: Prompter,
        *,
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        stop: tuple[str, ...] = (),
        book: RequestBook | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._book = book if book is not None else RequestBook()
        self._prompter = prompter
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._stop = stop

    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[str, None]:
        """See :class:`ChatModel`."""
        prompt = self._prompter.conversation(messages)
        request = TextRequest(prompt, self._max_tokens, self._sampling, self._stop, label=CHAT)
        tale = self._book.arrived("chat")
        async with aclosing(generate_text(self._pipeline, request, tale=tale)) as pieces:
            async for piece in pieces:
                if isinstance(piece, TextPiece):
                    yield piece.text


@dataclass(slots=True)
class Conversation:
    """The messages so far. A question becomes part of it only with its answer, so that a failed one leaves no trace."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> list[Message]:
        """The messages that a question makes: those so far, and the question."""
        return [*self.messages, {"role": "user", "content": text}]

    def answered(self, question: str, answer: str) -> None:
        """Add a question and its answer."""
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": answer})

    def hint(self, error: RequestError) -> str:
        """How to go on after a question that couldn't be answered."""
        if error.reason == CONTEXT and any(message["role"] == "assistant" for message in self.messages):
            return "begin a new conversation with /reset"
        return error.hint
