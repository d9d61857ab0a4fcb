"""Which names a setting has: its key, its variables, its option; and the nearest real one to a misspelt name."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

PREFIX = "MYELIN_"

RESERVED_VARIABLES = (
    "MYELIN_CONFIG",
    "MYELIN_PROFILE",
    "MYELIN_DEBUG",
    "MYELIN_CPU_ISA",
    "MYELIN_LOG_FORMAT",
    "MYELIN_NODE_CORES",
    "MYELIN_NODE_DEAD_MAN_S",
    "MYELIN_NODE_FIRST_DIAL_S",
    "MYELIN_NODE_TELEMETRY",
    "MYELIN_PARENT_PID",
)
"""Variables that begin like settings and aren't: which file and profile are read, whether tracebacks are shown, and
those that a node's process or an engine reads by itself."""


@dataclass(frozen=True, slots=True)
class Name:
    """What one setting is called.

    Attributes:
        section, field: Its key is ``section.field``.
        environment: Its variables, the one that wins first.
        flag: Its option of the command line, empty where it has none.
        info: The pydantic field.
    """

    section: str
    field: str
    environment: tuple[str, ...]
    flag: str
    info: FieldInfo

    @property
    def key(self) -> str:
        """``section.field``."""
        return f"{self.section}.{self.field}"

    @property
    def is_secret(self) -> bool:
        """Its value is never shown."""
        return SecretStr in _parts(self.info.annotation)


def every_name(sections: Mapping[str, type[BaseModel]]) -> Iterator[Name]:
    """The names of every setting of ``sections``, in their order.

    The variable made from the key (``MYELIN_<SECTION>_<FIELD>``) wins over a field's shorter ones.
    """
    for section, model in sections.items():
        for field, info in model.model_fields.items():
            extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
            listed = extra.get("environment", [])
            shorter = [str(variable) for variable in listed] if isinstance(listed, list) else []
            made = f"{PREFIX}{section}_{field}".upper()
            variables = tuple(dict.fromkeys([made, *shorter]))
            yield Name(section, field, variables, str(extra.get("flag", "")), info)


def parse_text(info: FieldInfo, text: str) -> object:
    """A value written in an environment variable or after ``--set key=``: what TOML would give, as far as text can.

    A field of several values is a JSON list, or values between commas; one that is a mapping is a JSON object; anything
    else stays text, which pydantic reads as the field's type.

    Raises:
        ValueError: It begins like JSON and isn't.
    """
    kinds = {typing.get_origin(part) or part for part in _parts(info.annotation)}
    if dict in kinds or any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds):
        return json.loads(text)
    if kinds & {tuple, list, set, frozenset}:
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [item.strip() for item in text.split(",") if item.strip()]
    if text == "" and type(None) in kinds:
        return None
    return text


def nearest(name: str, known: Collection[str]) -> str:
    """The real name that ``name`` was most likely meant to be; empty where none is near."""
    found = get_close_matches(name, known, n=1, cutoff=0.6)
    return found[0] if found else ""


def _parts(annotation: object) -> tuple[object, ...]:
    """The alternatives of a union, or the annotation itself; ``Annotated`` is looked through."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _parts(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(part for argument in typing.get_args(annotation) for part in _parts(argument))
    return (annotation,)
