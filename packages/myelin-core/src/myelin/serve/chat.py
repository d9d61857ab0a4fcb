"""A conversation: what was said, what the model will be given, and the commands of the person."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from myelin.errors import RequestError
from myelin.serve.prompts import Message, Prompter


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


@dataclass(slots=True)
class Conversation:
    """The messages so far. A question becomes part of it only with its answer, so that a failed one leaves no trace."""

    prompter: Prompter
    system: str = ""
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> tuple[int, ...]:
        """The prompt for a question.

        Raises:
            RequestError: The conversation doesn't fit into the context any more, or the template refuses it.
        """
        try:
            return self.prompter.conversation([*self.messages, {"role": "user", "content": text}])
        except RequestError as error:
            if error.reason == "context" and len(self.messages) > (1 if self.system else 0):
                raise RequestError(error.message, "begin a new conversation with /reset", reason="context") from None
            raise

    def answered(self, question: str, answer: str) -> None:
        """Add a question and its answer."""
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": answer})
