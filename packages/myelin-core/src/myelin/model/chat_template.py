"""The model's chat template: messages to a prompt, and the prompt to ids without letting users write control tokens.

A template is data from a stranger, and so is a message; the one runs in :mod:`~myelin.model.template_sandbox`. The
other must not be able to end its own turn and begin the system's. Before rendering, each control token's text inside a
message is broken up by a *mark*, a noncharacter that nobody writes; the template treats the rest as ever, whether it
trims, splits or measures; and where marks come out in the prompt, the tokenizer may recognise no control token.
Ordinary messages hold no such text, and are rendered as they are.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from myelin.errors import ModelError, RequestError
from myelin.model.facts import ModelFacts
from myelin.model.tokenizer import Tokenizer, well_formed

if TYPE_CHECKING:
    from jinja2 import Template

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "messages",
        "namespace",
        "raise_exception",
        "range",
        "strftime_now",
    }
)
# Noncharacters, which Unicode keeps for a program's own use.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_DEEPEST = 32
_MOST_ELEMENTS = 1_000_000
_MOST_CHARACTERS = 64 << 20
_PROBE = "myelin-probe"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        text: The prompt.
        barriers: Ascending positions in it that no control token may span, since a message wrote the text there.
    """

    text: str
    barriers: tuple[int, ...] = ()


class ChatTemplate:
    """A model's template. Immutable but for what it compiles at first use; safe to use from several threads.

    Args:
        source: The template.
        tokenizer: The model's.
        tool_source: Used instead where ``tools`` are given; empty if the model has none of its own for that.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, tool_source: str = "") -> None:
        self.source = source
        self._tool_source = tool_source
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: dict[str, tuple[Template, bool]] = {}

    @classmethod
    def from_facts(cls, facts: ModelFacts, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a header, or None where the model has none (it isn't made for chat).

        Raises:
            ModelError: The key isn't a text.
        """
        source = facts.metadata.get("tokenizer.chat_template")
        if source is None or source == "":
            return None
        if not isinstance(source, str):
            raise _broken("it is not a text")
        tools = facts.metadata.get("tokenizer.chat_template.tool_use")
        return cls(source, tokenizer, tools if isinstance(tools, str) else "")

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text.

        Args:
            messages: Each with a ``role`` and a ``content``: a text, or parts ``{"type": "text", "text": …}``.
            add_generation_prompt: End where the assistant is to go on.
            variables: More for the template (``tools``, ``enable_thinking``, …). They can't replace what we give it.

        Raises:
            RequestError: The messages or variables are malformed, or the template refuses them or exceeds its limits.
            ModelError: The template itself is broken, or does what templates may not.
        """
        return self.prompt(messages, add_generation_prompt=add_generation_prompt, **variables).text

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> Prompt:
        """The prompt's text, and where control tokens may not be recognised in it; otherwise as :meth:`render`."""
        for name in variables:
            if name in _RESERVED or not _NAME.fullmatch(name):
                raise RequestError(
                    f"the template variable {name!r} can't be set", "Use another name.", reason="template-variable"
                )
        source = self._tool_source if self._tool_source and variables.get("tools") else self.source
        template, wants_parts = self._template(source)
        given = {name: _plain(value, name) for name, value in variables.items()}
        plain = _checked_messages(messages, wants_parts)
        marker = _Marker(self._tokenizer, [source, plain, given])
        context = {
            "tools": None,
            "documents": None,
            **{name: marker.mark(value) for name, value in given.items()},
            "messages": [marker.mark(message) for message in plain],
            "add_generation_prompt": bool(add_generation_prompt),
        }
        return marker.unmark(self._run(template, context))

    def _template(self, source: str) -> tuple[Template, bool]:
        """The compiled template, and whether it wants a content's parts."""
        with self._lock:
            entry = self._compiled.get(source)
            if entry is None:
                template = _compile(source)
                entry = self._compiled[source] = (template, self._wants_parts(template))
            return entry

    def _wants_parts(self, template: Template) -> bool:
        """Whether the template shows a content's parts, but not a plain text."""
        for content, answer in ((_PROBE, False), ([{"type": "text", "text": _PROBE}], True)):
            context = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": True, "tools": None}
            try:
                if _PROBE in self._run(template, context):
                    return answer
            except (RequestError, ModelError):
                continue
        return False

    def _run(self, template: Template, context: Mapping[str, Any]) -> str:
        from jinja2.exceptions import SecurityError

        from myelin.model import template_sandbox as sandbox

        tokens = {
            name: "" if token is None else self._tokenizer.token_text(token)
            for name, token in (("bos_token", self._tokenizer.bos_id), ("eos_token", self._tokenizer.eos_id))
        }
        try:
            elements, characters = sandbox.weigh(dict(context), _MOST_ELEMENTS, _MOST_CHARACTERS)
        except sandbox.LimitExceededError:
            raise RequestError("the messages are too long", "Send less.", reason="messages") from None
        try:
            return sandbox.render(template, {**context, **tokens}, sandbox.Meter(elements, characters))
        except sandbox.RaisedError as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", "Change them.", reason="template-refused"
            ) from None
        except sandbox.LimitExceededError as error:
            raise RequestError(
                f"the model's chat template was stopped: {error}",
                "Send fewer or shorter messages, or use another template.",
                reason="template-limit",
            ) from None
        except SecurityError as error:
            raise _broken(f"it does what templates may not: {error}") from None
        except Exception as error:
            raise RequestError(
                f"the model's chat template can't be applied to these messages: {_named(error)}",
                "Check the messages' roles and contents.",
                reason="template-failed",
            ) from None


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[int]:
    """The ids of a conversation's prompt.

    It begins with BOS exactly once where the model wants one, whether or not the template writes it, and never ends
    with EOS. Control tokens are recognised in what the template wrote, never in what the messages hold. Errors as
    :meth:`ChatTemplate.render`.
    """
    prompt = template.prompt(messages, add_generation_prompt=add_generation_prompt, **variables)
    ids = tokenizer.encode(prompt.text, add_special=False, parse_special=True, barriers=prompt.barriers)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


class _Marker:
    """Breaks up control tokens in values by a mark that is nowhere in ``everything``."""

    def __init__(self, tokenizer: Tokenizer, everything: object) -> None:
        self._specials = tokenizer.specials
        free = dict.fromkeys(_MARKS)
        for text in _texts(everything):
            for mark in list(free):
                if mark in text or _escaped(mark) in text:
                    del free[mark]
        if not free:
            raise RequestError("the messages use every noncharacter of Unicode", "Leave them out.", reason="messages")
        self._mark = next(iter(free))

    def mark(self, value: Any, key: str = "") -> Any:
        """``value`` with its texts marked, all but roles and types: names that templates write tokens from."""
        if isinstance(value, str):
            return value if key in ("role", "type") else self._marked(value)
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, dict):
            return {name: self.mark(item, name) for name, item in value.items()}
        return value

    def unmark(self, text: str) -> Prompt:
        """A rendered text without its marks, and where they were."""
        pieces = text.replace(_escaped(self._mark), self._mark).split(self._mark)
        barriers: list[int] = []
        position = 0
        for piece in pieces[:-1]:
            position += len(piece)
            barriers.append(position)
        return Prompt("".join(pieces), tuple(barriers))

    def _marked(self, text: str) -> str:
        for token in self._specials.contained(text):
            text = text.replace(token, token[0] + self._mark + token[1:])
        return text + self._mark if self._specials.unfinished(text) else text


def _escaped(mark: str) -> str:
    """A mark as JSON, and Python's representation of a list, may write it."""
    return f"\\u{ord(mark):04x}"


def _compile(source: str) -> Template:
    from jinja2.exceptions import TemplateSyntaxError

    from myelin.model import template_sandbox as sandbox

    try:
        return sandbox.MeteredEnvironment().compiled(source)
    except TemplateSyntaxError as error:
        raise _broken(f"{error.message} (line {error.lineno})") from None
    except sandbox.LimitExceededError as error:
        raise _broken(str(error)) from None
    except Exception as error:  # nested too deeply, mostly: recursion, the compiler's own limits
        raise _broken(_named(error)) from None


def _broken(why: str) -> ModelError:
    return ModelError(
        f"the model's chat template can't be used: {why}",
        "Send the prompt as it is (--raw), or use another file.",
        reason="template-broken",
    )


def _named(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{text[0][:200]}" if text else type(error).__name__


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return []


def _checked_messages(messages: Sequence[Mapping[str, Any]], wants_parts: bool) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("there are no messages", "Send a list with at least one.", reason="messages")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {index} is not an object", 'Send {"role", "content"}.', reason="messages")
        plain: dict[str, Any] = _plain(message, f"message {index}")
        role = plain.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise RequestError(
                f"message {index} has no proper role",
                "Roles are names such as user, assistant, system.",
                reason="messages",
            )
        if plain.get("content") is None:
            # An assistant that called tools says nothing besides; templates tell by the missing text.
            plain["content"] = None if plain.get("tool_calls") else ""
        else:
            text = _content_text(plain["content"], index)
            plain["content"] = [{"type": "text", "text": text}] if wants_parts else text
        checked.append(plain)
    return checked


def _content_text(content: object, index: int) -> str:
    """One text of a content: parts are joined by line ends."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"message {index}: its content is neither a text nor a list of parts", "Send a text.", reason="messages"
        )
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"message {index} has a part of type {kind!r}; this model takes text alone",
                'Send parts {"type": "text", "text": …}.',
                reason="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy in plain dictionaries, lists, texts and numbers, which have no surprises for the sandbox."""
    if depth > _DEEPEST:
        raise RequestError(f"{where} is nested too deeply", "Flatten it.", reason="messages")
    if isinstance(value, str):
        return well_formed(str(value))
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        if value.bit_length() > 64:
            raise RequestError(f"{where} has a number that is too large", "Send it as a text.", reason="messages")
        return value
    if isinstance(value, Mapping):
        return {well_formed(str(key)): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item, where, depth + 1) for item in value]
    raise RequestError(f"{where} holds a {type(value).__name__}", "Send plain JSON values.", reason="messages")
