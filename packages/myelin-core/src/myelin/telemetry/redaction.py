"""Secrets taken out of what is logged and traced: the run's own values, and what looks like a key of somebody's.

What a program writes is not ours to trust: a library that logs a request's headers would put a token into every sink.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, SecretStr

from myelin.telemetry.signals import records, resources

if TYPE_CHECKING:
    from myelin.telemetry.signals import OtlpRequest

REDACTED = "[redacted]"
SHORTEST = 6
"""A shorter value is not looked for: it would be found everywhere."""

_SHAPES = (
    r"\bhf_[A-Za-z0-9]{16,}",  # Hugging Face
    r"\bsk-[A-Za-z0-9_-]{16,}",  # OpenAI and those who copy its shape
    r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\bglpat-[A-Za-z0-9_-]{16,}",
    r"\bxox[abprs]-[A-Za-z0-9-]{10,}",  # Slack
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",  # AWS
    r"\bAIza[0-9A-Za-z_-]{30,}",  # Google
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",  # a JSON web token
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
)
_AFTER_NAME = re.compile(
    r"(?P<name>\b(?:authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token)?|bearer"
    r"|[\w.-]*(?:api[_-]?key|access[_-]?key|secret|password|passwd|token)[\"']?\s*[:=])\s*[\"']?)"
    r"(?P<value>[A-Za-z0-9+/_.~=-]{8,})",
    re.IGNORECASE,
)
_SHAPE = re.compile("|".join(_SHAPES))
_HINT = re.compile(
    "key|token|secret|passw|bearer|authorization|hf_|sk-|gh[pousr]_|github_pat|glpat-|xox|akia|asia|aiza|eyj",
    re.IGNORECASE,
)
"""What any of the shapes contains: most lines have none of it, and are let through after one search."""


class Redactor:
    """Replaces secrets in texts by ``[redacted]``.

    Args:
        secrets: Values that must never be seen.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._known: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.learn(secrets)

    def learn(self, secrets: Iterable[str]) -> None:
        """Know of more values."""
        self._known |= {value for value in secrets if len(value) >= SHORTEST}
        longest_first = sorted(self._known, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def text(self, text: str) -> str:
        """``text`` without secrets."""
        if self._pattern is not None:
            text = self._pattern.sub(REDACTED, text)
        if _HINT.search(text) is None:
            return text
        text = _SHAPE.sub(REDACTED, text)
        return _AFTER_NAME.sub(_keep_name, text)

    def request(self, request: OtlpRequest) -> None:
        """Take secrets out of every text of an OTLP request, in place."""
        for part in resources(request):
            self._entries(part.resource.attributes)
        for record in records(request):
            self._record(record)

    def _record(self, record: Any) -> None:
        self._entries(getattr(record, "attributes", ()))
        if hasattr(record, "status"):
            self._field(record.status, "message")
        if hasattr(record, "body"):
            self._value(record.body)
        for event in getattr(record, "events", ()):
            self._entries(event.attributes)

    def _entries(self, entries: Iterable[Any]) -> None:
        for entry in entries:
            self._value(entry.value)

    def _value(self, value: Any) -> None:
        kind = value.WhichOneof("value")
        if kind == "string_value":
            self._field(value, "string_value")
        elif kind == "array_value":
            for each in value.array_value.values:
                self._value(each)
        elif kind == "kvlist_value":
            self._entries(value.kvlist_value.values)

    def _field(self, message: Any, name: str) -> None:
        text = getattr(message, name)
        if text and (clean := self.text(text)) != text:
            setattr(message, name, clean)


def _keep_name(match: re.Match[str]) -> str:
    return match["name"] + REDACTED


def secret_values(holder: object) -> list[str]:
    """Every ``SecretStr`` in a model, a mapping, a list or a dataclass's fields, in clear."""
    if isinstance(holder, SecretStr):
        return [holder.get_secret_value()]
    if isinstance(holder, BaseModel):
        return [value for name in type(holder).model_fields for value in secret_values(getattr(holder, name))]
    if isinstance(holder, Mapping):
        return [value for each in holder.values() for value in secret_values(each)]
    if isinstance(holder, (list, tuple)):
        return [value for each in holder for value in secret_values(each)]
    fields = getattr(type(holder), "__dataclass_fields__", {})
    return [value for name in fields for value in secret_values(getattr(holder, name))]


_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?KEY|ACCESS_?KEY|KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|CREDENTIALS?|HEADERS)(?:_|$)", re.IGNORECASE
)


def environment_secrets(environment: Mapping[str, str]) -> list[str]:
    """Values of variables whose names say that they are secret; of headers, the values after ``=``."""
    found = []
    for name, value in environment.items():
        if not _SECRET_NAME.search(name):
            continue
        if name.upper().endswith("HEADERS"):
            found += [part.partition("=")[2].strip() for part in value.split(",")]
        elif "/" not in value[:2]:  # a path to a key is no secret
            found.append(value)
    return [each for each in found if len(each) >= SHORTEST]
