"""Settings from layers: defaults, profile, ``myelin.toml``, environment, command line; the later one wins.

Each layer is read into a nested dictionary with a note of where each value came from; pydantic-settings puts them on
top of each other and validates the result. Whatever is wrong, misspelt keys of all layers and values of all sections,
comes out as one :class:`~myelin.errors.ConfigError`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from myelin.config.environment import PREFIX, RESERVED_VARIABLES, Name, every_name, nearest, parse_text
from myelin.config.sections import (
    CORE_SECTIONS,
    ModelSection,
    ObservabilitySection,
    PromptSection,
    ProviderSection,
    RelaySection,
    RuntimeSection,
    ServeSection,
)
from myelin.errors import ConfigError

FILE_NAME = "myelin.toml"

PROFILES: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "local": {"provider": {"name": "process"}},
    # A rented machine takes minutes to come up: as long as its provider waits for it.
    "deploy": {"provider": {"name": "vastai"}, "runtime": {"startup_timeout_s": 1800.0}},
}
"""Sets of values under one name, chosen by ``--profile``, ``MYELIN_PROFILE`` or ``profile`` in the file."""

SectionModel = TypeVar("SectionModel", bound=BaseModel)


class Layer(IntEnum):
    """Where a value may come from; a higher one wins."""

    DEFAULT = 0
    PROFILE = 1
    FILE = 2
    ENVIRONMENT = 3
    COMMAND_LINE = 4

    @property
    def words(self) -> str:
        """What people call it."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: the layer, and its name there (a file, a variable, an option)."""

    layer: Layer
    name: str = ""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What settings are made from.

    Attributes:
        file: The file that was asked for; None takes ``myelin.toml`` of ``folder`` where there is one.
        environment: All variables.
        options: Values of the command line's own options, by key, with the option's name: ``{"runtime.threads":
            ("--threads", 2)}``.
        assignments: What followed each ``--set``.
        profile: What followed ``--profile``; empty where it wasn't given.
        folder: Where to look for the file.
    """

    file: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    assignments: Sequence[str] = ()
    profile: str = ""
    folder: Path = Path()


@dataclass(frozen=True)
class Settings:
    """Validated settings, and where each value came from.

    Attributes:
        sections: The validated section models, by name.
        origins: Where each value came from, by key; a default where it isn't in there.
        file: The file that was read, or None.
        profile: The profile's name, or empty.
    """

    sections: Mapping[str, BaseModel]
    origins: Mapping[str, Origin]
    file: Path | None = None
    profile: str = ""

    @property
    def runtime(self) -> RuntimeSection:
        """How the pipeline is made."""
        return self._section("runtime", RuntimeSection)

    @property
    def provider(self) -> ProviderSection:
        """Who starts the nodes."""
        return self._section("provider", ProviderSection)

    @property
    def relay(self) -> RelaySection:
        """How nodes are reached."""
        return self._section("relay", RelaySection)

    @property
    def prompt(self) -> PromptSection:
        """How prompts are answered."""
        return self._section("prompt", PromptSection)

    @property
    def serve(self) -> ServeSection:
        """What is served over HTTP."""
        return self._section("serve", ServeSection)

    @property
    def model(self) -> ModelSection:
        """Which model is served."""
        return self._section("model", ModelSection)

    @property
    def observability(self) -> ObservabilitySection:
        """What is recorded of a run."""
        return self._section("observability", ObservabilitySection)

    def origin(self, key: str) -> Origin:
        """Where the value of ``key`` came from."""
        return self.origins.get(key, Origin(Layer.DEFAULT))

    def _section(self, name: str, model: type[SectionModel]) -> SectionModel:
        section = self.sections[name]
        assert isinstance(section, model)
        return section


@dataclass(slots=True)
class _Reading:
    """Values of one layer, and all that was wrong with any."""

    layer: Layer
    values: dict[str, dict[str, object]] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def put(self, name: Name, value: object, origin: str) -> None:
        self.values.setdefault(name.section, {})[name.field] = value
        self.origins[name.key] = Origin(self.layer, origin)

    def put_text(self, name: Name, text: str, origin: str) -> None:
        try:
            self.put(name, parse_text(name.info, text), origin)
        except ValueError as error:
            self.problems.append((f"{origin} can't be read: {error}", f"{name.key}: {name.info.description}"))


def resolve(
    inputs: Inputs,
    plugin_sections: Mapping[str, type[BaseModel]] | None = None,
    ignored_sections: Sequence[str] = (),
) -> Settings:
    """The settings that ``inputs`` add up to.

    Args:
        plugin_sections: Sections of plugins, by name.
        ignored_sections: Sections of plugins that can't be asked for theirs (disabled or broken ones): whatever is
            said in one is neither read nor an error.

    Raises:
        ConfigError: A key is unknown, a value wrong, the file can't be read, or a profile is unknown. All at once.
    """
    sections: dict[str, type[BaseModel]] = {**CORE_SECTIONS, **(plugin_sections or {})}
    names = {name.key: name for name in every_name(sections)}
    path, document = _read_file(inputs)
    profile = _profile(inputs, document)
    layers = [
        _from_profile(profile, names),
        _from_file(document, path, sections, names, ignored_sections),
        _from_environment(inputs.environment, names, ignored_sections),
        _from_command_line(inputs, names, ignored_sections),
    ]
    problems = [problem for layer in layers for problem in layer.problems]
    origins: dict[str, Origin] = {}
    for layer in layers:
        origins |= layer.origins
    validated, wrong = _validate(sections, names, origins, [layer.values for layer in layers])
    problems += wrong
    if problems:
        raise _error(problems)
    return Settings(validated, origins, path, profile)


def peek_disabled_plugins(inputs: Inputs) -> tuple[str, ...]:
    """``runtime.disabled_plugins`` alone, which must be known before plugins are asked for their sections.

    Whatever else is wrong in ``inputs`` is left for :func:`resolve` to say.

    Raises:
        ConfigError: The file can't be read, or this value is wrong.
    """
    names = {name.key: name for name in every_name({"runtime": RuntimeSection})}
    path, document = _read_file(inputs)
    key = "runtime.disabled_plugins"
    layers = [
        _from_file(document, path, {"runtime": RuntimeSection}, names, ()),
        _from_environment(inputs.environment, names, ()),
        _from_command_line(inputs, names, ()),
    ]
    found = [layer for layer in layers if key in layer.origins]
    if not found:
        return ()
    value = found[-1].values["runtime"]["disabled_plugins"]
    try:
        return RuntimeSection.model_validate({"disabled_plugins": value}).disabled_plugins
    except ValidationError as error:
        raise _error([_wrong_value(key, found[-1].origins[key], error.errors()[0]["msg"], names)]) from None


def _read_file(inputs: Inputs) -> tuple[Path | None, dict[str, Any]]:
    """The path and the content of the file, where there is one."""
    asked = inputs.file
    if asked is None and (variable := inputs.environment.get("MYELIN_CONFIG")):
        asked = Path(variable).expanduser()
    path = asked if asked is not None else inputs.folder / FILE_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if asked is None:
            return None, {}
        raise ConfigError(
            f"There is no configuration file {path}", "give --config the path of one that exists"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", "check the file and its permissions") from None
    try:
        return path, tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", "mend the line that it names") from None


def _profile(inputs: Inputs, document: Mapping[str, object]) -> str:
    """Which profile was chosen: by option, variable or file, in this order; empty where none was."""
    chosen = inputs.profile or inputs.environment.get("MYELIN_PROFILE", "") or document.get("profile", "")
    if chosen and chosen not in PROFILES:
        near = nearest(str(chosen), PROFILES)
        meant = f"did you mean {near!r}? " if near else ""
        raise ConfigError(f"There is no profile {chosen!r}", f"{meant}profiles are {' and '.join(PROFILES)}")
    return str(chosen)


def _from_profile(profile: str, names: Mapping[str, Name]) -> _Reading:
    reading = _Reading(Layer.PROFILE)
    for section, values in PROFILES.get(profile, {}).items():
        for key, value in values.items():
            reading.put(names[f"{section}.{key}"], value, f"profile {profile}")
    return reading


def _from_file(
    document: Mapping[str, object],
    path: Path | None,
    sections: Mapping[str, type[BaseModel]],
    names: Mapping[str, Name],
    ignored: Sequence[str],
) -> _Reading:
    reading = _Reading(Layer.FILE)
    where = path.name if path is not None else ""
    for section, table in document.items():
        if section in ignored or section == "profile":
            continue
        if section not in sections:
            # A key of the right name in no section is closer to that than to a section's name.
            owner = next((key for key in names if key.partition(".")[2] == section), "")
            near = owner or nearest(section, sections)
            hint = f"did you mean {near}?" if near else f"sections are {', '.join(sections)}"
            reading.problems.append((f"Unknown section {section!r} in {where}", hint))
        elif not isinstance(table, dict):
            reading.problems.append((f"{section!r} in {where} is a value, not a section", f"write it as [{section}]"))
        else:
            for key, value in table.items():
                name = names.get(f"{section}.{key}")
                if name is None:
                    reading.problems.append(_unknown(f"{section}.{key}", where, names))
                else:
                    reading.put(name, value, where)
    return reading


def _from_environment(environment: Mapping[str, str], names: Mapping[str, Name], ignored: Sequence[str]) -> _Reading:
    reading = _Reading(Layer.ENVIRONMENT)
    known = {variable for name in names.values() for variable in name.environment}
    for name in names.values():
        for variable in reversed(name.environment):
            # Of other tools' variables, an empty one means the same as none.
            if environment.get(variable) or (variable in environment and variable.startswith(PREFIX)):
                reading.put_text(name, environment[variable], variable)
    skipped = tuple(f"{PREFIX}{section}_".upper() for section in ignored)
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in known or variable in RESERVED_VARIABLES:
            continue
        if skipped and variable.startswith(skipped):
            continue
        near = nearest(variable, [*known, *RESERVED_VARIABLES])
        hint = f"did you mean {near}?" if near else "`myelin config` lists the settings; unset this variable"
        reading.problems.append((f"Unknown environment variable {variable}", hint))
    return reading


def _from_command_line(inputs: Inputs, names: Mapping[str, Name], ignored: Sequence[str]) -> _Reading:
    reading = _Reading(Layer.COMMAND_LINE)
    for assignment in inputs.assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        name = names.get(key)
        if not equals:
            reading.problems.append((f"--set {assignment!r} has no value", "write it as --set section.key=value"))
        elif name is not None:
            reading.put_text(name, text, f"--set {key}")
        elif key.partition(".")[0] not in ignored:
            reading.problems.append(_unknown(key, "--set", names))
    for key, (option, value) in inputs.options.items():
        if key not in names:
            continue
        if isinstance(value, str):
            reading.put_text(names[key], value, option)
        else:
            reading.put(names[key], value, option)
    return reading


def _unknown(key: str, where: str, names: Mapping[str, Name]) -> tuple[str, str]:
    section, _, bare = key.rpartition(".")
    siblings = [name.field for name in names.values() if name.section == section]
    near = nearest(bare, siblings)
    near = f"{section}.{near}" if near else nearest(key, names)
    if not near:
        near = next((known for known, name in names.items() if name.field == bare), "")
    return (
        f"Unknown setting {key!r} in {where}",
        f"did you mean {near}?" if near else "`myelin config` lists the settings",
    )


def _validate(
    sections: Mapping[str, type[BaseModel]],
    names: Mapping[str, Name],
    origins: Mapping[str, Origin],
    layers: Sequence[dict[str, dict[str, object]]],
) -> tuple[dict[str, BaseModel], list[tuple[str, str]]]:
    """The section models made from layers (lowest first), and what was wrong with their values."""
    model = _settings_model(sections, layers)
    try:
        settings = model()
    except ValidationError as error:
        wrong = []
        for one in error.errors():
            location = [str(part) for part in one["loc"]]
            key = ".".join(location[:2])
            origin = origins.get(key, Origin(Layer.DEFAULT))
            wrong.append(_wrong_value(key, origin, one["msg"], names, one["input"]))
        return {}, list(dict.fromkeys(wrong))
    return {section: getattr(settings, section) for section in sections}, []


def _settings_model(
    sections: Mapping[str, type[BaseModel]], layers: Sequence[dict[str, dict[str, object]]]
) -> type[BaseSettings]:
    class Layered(BaseSettings):
        """Settings whose sources are exactly our layers."""

        model_config = SettingsConfigDict(extra="forbid", frozen=True)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            """The layers, the one that wins first."""
            return tuple(InitSettingsSource(settings_cls, dict(layer)) for layer in reversed(layers))

    fields: dict[str, Any] = {name: (section, Field(default_factory=section)) for name, section in sections.items()}
    return create_model("Settings", __base__=Layered, **fields)


def _wrong_value(
    key: str, origin: Origin, message: str, names: Mapping[str, Name], value: object = None
) -> tuple[str, str]:
    """What is wrong with a value, and what it should be. Only numbers are shown: text may be a secret gone astray."""
    name = names.get(key)
    number = f" {value}" if _is_number(value) and name is not None and not name.is_secret else ""
    where = f" (from {origin.name}{number})" if origin.name else ""
    text = message[:1].lower() + message[1:]
    hint = f"{key}: {name.info.description}" if name is not None and name.info.description else ""
    return f"{key}{where} is wrong: {text}", hint


def _is_number(value: object) -> bool:
    """Whether a value is a number, or the text of a short one."""
    if isinstance(value, str):
        return len(value) <= 20 and value.strip().lstrip("+-").replace(".", "", 1).isdigit()
    return isinstance(value, (int, float))


def _error(problems: Sequence[tuple[str, str]]) -> ConfigError:
    """All problems in one error."""
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return ConfigError(*unique[0])
    message = "; ".join(text for text, _ in unique)
    hints = "; ".join(dict.fromkeys(hint for _, hint in unique if hint))
    return ConfigError(f"{len(unique)} settings are wrong: {message}", hints)
