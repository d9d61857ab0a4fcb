"""The messages of the prompt RPC and their bytes: one JSON object a line, named by its only key.

``docs/prompt-rpc.md`` is for those who write clients. Everything here is pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from myelin.errors import RequestError
from myelin.values import FinishReason

MAX_LINE_BYTES = 4 * 1024 * 1024
"""A request's line is at most this long, its end excluded."""

MAX_STOPS = 16
MAX_REQUEST_ID = 256

ShortText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ChatMessage(_Strict):
    """One message of a conversation."""

    role: Annotated[str, StringConstraints(pattern=r"^(system|user|assistant)$")]
    content: str


class SubmitPrompt(_Strict):
    """A request. Fields left out take the server's own settings.

    Exactly one of ``prompt_text`` and ``messages`` is there.
    """

    request_id: Annotated[str, StringConstraints(max_length=MAX_REQUEST_ID)] | int
    prompt_text: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    raw: bool = False
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    stop: Annotated[list[ShortText], Field(max_length=MAX_STOPS)] | None = None


class _Line(_Strict):
    submit: SubmitPrompt = Field(alias="SubmitPrompt")


class MalformedLineError(RequestError):
    """A line that is no request; ``request_id`` is what it was called, where that could be read."""

    default_reason = "malformed"

    def __init__(self, message: str, hint: str = "", *, request_id: str | int | None = None) -> None:
        super().__init__(message, hint)
        self.request_id = request_id


def parse_request(line: bytes) -> SubmitPrompt:
    """The request in a line.

    Raises:
        MalformedLineError: It is none.
    """
    try:
        request = _Line.model_validate_json(line).submit
    except ValidationError as error:
        raise MalformedLineError(
            _words(error), 'send {"SubmitPrompt": {"request_id": …, "prompt_text": …}}', request_id=_id_in(line)
        ) from None
    if (request.prompt_text is None) == (request.messages is None):
        raise MalformedLineError("a request has either prompt_text or messages", request_id=request.request_id)
    if request.raw and request.messages is not None:
        raise MalformedLineError("raw goes with prompt_text only", request_id=request.request_id)
    return request


def _words(error: ValidationError) -> str:
    """The first thing wrong, without the line's own content."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    text = first["msg"]
    return f"{place}: {text}" if place else text


def _id_in(line: bytes) -> str | int | None:
    """The request id in a line that is wrong in some other way, so that its sender can tell which."""
    try:
        found = json.loads(line)["SubmitPrompt"]["request_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if isinstance(found, bool) or not isinstance(found, (str, int)):
        return None
    if isinstance(found, str) and (len(found) > MAX_REQUEST_ID or not found.isprintable()):
        return None
    return found


def _line(kind: str, request_id: str | int | None, **fields: object) -> bytes:
    body = {"request_id": request_id, **fields}
    return json.dumps({kind: body}, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def text_delta(request_id: str | int, text: str) -> bytes:
    """The line that brings more of an answer's text."""
    return _line("TextDelta", request_id, text=text)


def done(
    request_id: str | int, final_text: str, tokens_generated: int, elapsed_ms: int, finish_reason: FinishReason
) -> bytes:
    """The line that ends an answer."""
    return _line(
        "Done",
        request_id,
        final_text=final_text,
        tokens_generated=tokens_generated,
        elapsed_ms=elapsed_ms,
        finish_reason=finish_reason.value,
    )


def fault(request_id: str | int | None, error: str, hint: str, reason: str) -> bytes:
    """The line that says what went wrong; it ends the request, if it was about one."""
    return _line("Fault", request_id, error=error, hint=hint, reason=reason)


@dataclass(frozen=True, slots=True)
class TooLong:
    """Stands for a line that was longer than allowed; its bytes are gone."""


class LineSplitter:
    """Cuts a stream of bytes into lines, holding no more than a line's allowed length."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[bytes | TooLong]:
        """The lines that ``data`` completes, without their ends; blank ones are left out.

        A line that is too long comes out as :class:`TooLong` as soon as that is known; what follows of it is dropped.
        """
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            line = self._take(data[start:end])
            start = end + 1
            if self._skipping:
                self._skipping = False
            elif isinstance(line, TooLong) or line.strip():
                yield line
        if not self._skipping:
            self._buffer += data[start:]
            if len(self._buffer) > self._max_bytes:
                self._buffer.clear()
                self._skipping = True
                yield TooLong()

    def _take(self, rest: bytes) -> bytes | TooLong:
        if len(self._buffer) + len(rest) > self._max_bytes:
            self._buffer.clear()
            return TooLong()
        line = bytes(self._buffer) + rest
        self._buffer.clear()
        return line.removesuffix(b"\r")
