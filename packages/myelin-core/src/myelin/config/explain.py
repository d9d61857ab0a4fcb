"""Settings for people: each value with the layer that set it, and the table of everything that can be set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath

from platformdirs import user_state_path
from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from myelin.config.environment import Name, every_name
from myelin.config.settings import Settings

MASK = "********"


@dataclass(frozen=True, slots=True)
class Explained:
    """One setting: its key, its value as JSON has it (secrets masked), the layer that set it, and the name there."""

    key: str
    value: object
    layer: str
    origin: str

    def as_json(self) -> dict[str, object]:
        """The setting as ``myelin config --json`` writes it."""
        return {"key": self.key, "value": self.value, "layer": self.layer, "origin": self.origin}


def explain(settings: Settings) -> tuple[Explained, ...]:
    """Every setting with its value and where that came from."""
    models = {name: type(section) for name, section in settings.sections.items()}
    rows = []
    for name in every_name(models):
        origin = settings.origin(name.key)
        value = shown(getattr(settings.sections[name.section], name.field))
        rows.append(Explained(name.key, value, origin.layer.words, origin.name))
    return tuple(rows)


def shown(value: object) -> object:
    """A value as JSON has it; a secret is :data:`MASK`, whatever its length."""
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, BaseModel):
        return {field: shown(getattr(value, field)) for field in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): shown(one) for key, one in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [shown(one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def reference_table(sections: Mapping[str, type[BaseModel]]) -> str:
    """A Markdown table of every setting of ``sections``: key, type, default, environment variables, option, meaning."""
    lines = ["| key | type | default | environment | option | meaning |", "|---|---|---|---|---|---|"]
    for name in every_name(sections):
        variables = ", ".join(f"`{variable}`" for variable in name.environment)
        option = f"`{name.flag}`" if name.flag else ""
        meaning = (name.info.description or "").replace("|", "\\|")
        cells = [f"`{name.key}`", type_words(name), default_words(name), variables, option, meaning]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def type_words(name: Name) -> str:
    """A setting's type in a word or two."""
    annotation = name.info.annotation
    text = str(annotation) if not isinstance(annotation, type) else annotation.__name__
    if "SecretStr" in text:
        return "secret"
    if "Literal" in text:
        options = getattr(annotation, "__args__", ())
        return " or ".join(f"`{option}`" for option in options)
    if "Path" in text:
        return "path"
    if text.startswith("tuple[int"):
        return "numbers"
    if text.startswith("tuple[str"):
        return "texts"
    if text.startswith("dict["):
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f"`{option.value}`" for option in annotation)
    text = text.removesuffix(" | None")
    return {"str": "text", "int": "number", "float": "number", "bool": "true or false"}.get(text, text)


def default_words(name: Name) -> str:
    """A setting's default; a path that depends on the machine is described instead."""
    if name.info.default_factory is dict:
        return "empty"
    default = name.info.get_default(call_default_factory=False)
    if default is PydanticUndefined or (default is None and name.info.default_factory is not None):
        made = name.info.get_default(call_default_factory=True)
        if isinstance(made, PurePath) and made.is_relative_to(user_state_path("myelin")):
            return "the user's state folder"
        return "the user's cache folder"
    if default is None or default == "" or default == ():
        return "empty"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, PurePath):
        return f"`{default.as_posix()}`"
    return f"`{default}`"
