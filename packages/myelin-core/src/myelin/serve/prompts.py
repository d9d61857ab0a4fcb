"""From words to a prompt's tokens: through the model's chat template, or as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from myelin.errors import RequestError
from myelin.model.chat_template import ChatTemplate, encode_chat
from myelin.model.tokenizer import Tokenizer

CONTEXT = "context"
"""The reason of an error about a prompt that doesn't fit."""

Message = Mapping[str, str]
"""``{"role": "user" | "assistant" | "system", "content": text}``"""


class Prompter:
    """Turns words into tokens for one model.

    Args:
        tokenizer: The model's.
        template: Its chat template, or None where it has none.
        max_context: Positions of one sequence; a prompt needs at least one fewer.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_context = max_context

    def require_template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            RequestError: It has none.
        """
        if self._template is None:
            raise RequestError("the model has no chat template", "ask it with `myelin prompt`", reason="no-template")
        return self._template

    def one(self, text: str, *, raw: bool = False, system: str = "") -> tuple[int, ...]:
        """A single question. A model without a template gets the text alone.

        Args:
            text: What the person said.
            raw: Take it as it is, with BOS by the model's own rule, instead of through the template. Whoever writes so
                writes the model's own format: control tokens in the text are recognised.
            system: What the model is told beforehand; only with a template.

        Raises:
            RequestError: It doesn't fit, it is empty, or the template refuses it.
        """
        if raw or (self._template is None and not system):
            return self._fitting(self._tokenizer.encode(text, parse_special=raw))
        beforehand = [{"role": "system", "content": system}] if system else []
        return self.conversation([*beforehand, {"role": "user", "content": text}])

    def conversation(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A conversation, through the template, with the opening of the model's answer at its end.

        Raises:
            RequestError: It doesn't fit, the template refuses it, or the model has none.
        """
        return self._fitting(encode_chat(self.require_template(), self._tokenizer, messages))

    def _fitting(self, prompt: Sequence[int]) -> tuple[int, ...]:
        if not prompt:
            raise RequestError("The prompt is empty", "say something", reason="empty-prompt")
        if len(prompt) >= self._max_context:
            raise RequestError(
                f"The prompt has {len(prompt)} tokens, and the context {self._max_context} with the answer",
                "shorten it, or raise --max-context up to what the model allows",
                reason=CONTEXT,
            )
        return tuple(prompt)
