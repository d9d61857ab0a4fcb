"""The one place that asks plugins anything: pluggy's hooks behind typed methods.

Built-ins come through the same entry points as anybody's plugins. A plugin is imported when something is asked of its
group (or of all, as for configuration sections), after its metadata has been judged (:mod:`myelin.plugins.discovery`),
and its hooks are checked (:mod:`myelin.plugins.validation`) before any is called. Its failure is never swallowed: it
raises where the plugin was asked for by name, and is a row of :meth:`Registry.report` otherwise.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import pluggy
from pydantic import BaseModel, ValidationError

from myelin.cluster.provider import Provider, ProviderContext
from myelin.engine.contract import Engine, EngineOptions, EngineSupport
from myelin.errors import MyelinError, PlanError, PluginError, UsageError
from myelin.model.source import ModelSource, SourceOptions
from myelin.planner.run_plan import PlanRequest, RunPlan
from myelin.plugins.discovery import Candidate, LoadError, core_version, installed, judge, load, one_line
from myelin.plugins.report import PluginRow, PluginState, failure, missing_row
from myelin.plugins.specs import GROUPS, ConfigSection, TelemetryContext
from myelin.plugins.validation import lacks_hook, missing_members, new_manager, violation
from myelin.telemetry.sink import TelemetrySink
from myelin.transport.contract import Transport, TransportOptions

if TYPE_CHECKING:
    import typer
    from opentelemetry.sdk.trace.export import SpanExporter

PROVIDERS = "myelin.providers"
TRANSPORTS = "myelin.transports"
PLANNERS = "myelin.planners"
ENGINES = "myelin.engines"
TELEMETRY = "myelin.telemetry"
SOURCES = "myelin.sources"

Thing = TypeVar("Thing")

_NOTHING: Mapping[str, Collection[str]] = MappingProxyType({})


class Registry:
    """What is installed, and how to ask it. Made by :meth:`discover`; used from one thread."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        unreadable: Sequence[PluginRow] = (),
        running: str = "",
        disabled: Collection[str] = (),
        loader: Callable[[Candidate], object] = load,
    ) -> None:
        self._candidates = tuple(candidates)
        self._unreadable = tuple(unreadable)
        self._loader = loader
        self._rows: dict[Candidate, PluginRow] = dict(
            judge(self._candidates, running=running or core_version(), disabled=disabled)
        )
        self._modules: dict[Candidate, ModuleType] = {}
        self._manager: pluggy.PluginManager = new_manager()
        self._sections: dict[Candidate, ConfigSection] = {}
        self._wanted: set[tuple[str, str]] = set()

    @classmethod
    def discover(
        cls,
        *,
        wanted: Mapping[str, Collection[str]] = _NOTHING,
        disabled: Collection[str] = (),
        distributions: Iterable[importlib.metadata.Distribution] | None = None,
    ) -> Registry:
        """Read what is installed, and load what is wanted.

        Args:
            wanted: For each group the names that must load. Others are loaded when they are first asked.
            disabled: Plugins to leave alone, as in :func:`myelin.plugins.discovery.judge`.
            distributions: Where to look; None looks at everything on the path.

        Raises:
            PluginError: One or more of the wanted can't be used; all of them are named.
        """
        candidates, unreadable = installed(GROUPS, distributions)
        registry = cls(candidates, unreadable=unreadable, disabled=disabled)
        registry.require(wanted)
        return registry

    def require(self, wanted: Mapping[str, Collection[str]]) -> None:
        """Load what is wanted, or fail with all that can't be used at once.

        Raises:
            PluginError: As for :meth:`discover`.
        """
        problems = []
        for group, names in wanted.items():
            for name in names:
                self._wanted.add((group, name))
                row = self._settle(group, name)
                if row.state is not PluginState.LOADED:
                    problems.append((row, GROUPS[group], self.names(group)))
        if problems:
            raise failure(problems)

    def names(self, group: str) -> tuple[str, ...]:
        """Names of the group's plugins that can be used, loading them, in alphabetical order."""
        return tuple(sorted({candidate.name for candidate in self._usable(group)}))

    def report(self) -> tuple[PluginRow, ...]:
        """A row for every plugin, loading those that weren't yet: by group, then by name. Conflicts are one row."""
        for group in GROUPS:
            for _ in self._usable(group):
                pass
        missing = [missing_row(group, name) for group, name in self._wanted if not self._named(group, name)]
        order = list(GROUPS)
        rows = dict.fromkeys([*self._rows.values(), *self._unreadable, *missing])
        return tuple(sorted(rows, key=lambda row: (order.index(row.group), row.name, row.distribution)))

    def config_sections(self) -> tuple[ConfigSection, ...]:
        """The configuration sections of all plugins that can be used, and of those that aren't ready yet."""
        for group in GROUPS:
            for candidate in self._of(group):
                self._load(candidate)
        unique = {section.name: section for section in self._sections.values()}
        return tuple(unique[name] for name in sorted(unique))

    def commands(self, name: str) -> typer.Typer | None:
        """The commands that the plugin ``name`` adds; None where there is no such plugin, or it adds none.

        Raises:
            PluginError: It fails when it is asked.
        """
        from typer import Typer

        for group in GROUPS:
            for candidate in self._named(group, name):
                self._wanted.add((group, name))
                self._load(candidate)
                if (found := self._collect(candidate, "myelin_commands", Typer)) is not None:
                    return found
        return None

    def section_of(self, group: str, name: str) -> str:
        """The name of the plugin's configuration section; empty where it has none."""
        for candidate in self._named(group, name):
            self._load(candidate)
            if candidate in self._sections:
                return self._sections[candidate].name
        return ""

    def provider(self, name: str, context: ProviderContext) -> Provider:
        """Make the provider ``name``.

        Raises:
            PluginError: There is none, it can't be used, or what it gave is no provider.
            ProviderError, ConfigError: It says that it can't work as configured.
        """
        return cast(Provider, self._make(PROVIDERS, name, Provider, "myelin_provider", context=context))

    def transport(self, name: str, options: TransportOptions) -> Transport:
        """Make the transport ``name``.

        Raises:
            PluginError: There is none, it can't be used, or what it gave is no transport.
        """
        return cast(Transport, self._make(TRANSPORTS, name, Transport, "myelin_transport", options=options))

    def engine(self, name: str, options: EngineOptions) -> Engine:
        """Make the engine ``name``.

        Raises:
            PluginError: There is none, it can't be used, or what it gave is no engine.
            EngineError: It can't run on this machine.
        """
        return cast(Engine, self._make(ENGINES, name, Engine, "myelin_engine", options=options))

    def engine_support(self) -> tuple[EngineSupport, ...]:
        """What each engine says of itself on this machine, best first; those that aren't ready say why."""
        found: list[EngineSupport] = []
        for candidate in self._usable(ENGINES):
            support = self._collect(candidate, "myelin_engine_support", EngineSupport)
            if support is None:
                continue
            if support.name != candidate.name:
                self._blame(candidate, PluginState.INVALID, f"its engine calls itself {support.name!r}")
            else:
                found.append(support)
        for candidate in self._of(ENGINES):
            row = self._rows[candidate]
            if row.state is PluginState.NOT_READY:
                found.append(EngineSupport(candidate.name, frozenset(), frozenset(), 0, row.reason))
        return tuple(sorted(found, key=lambda support: (bool(support.unavailable), -support.rank, support.name)))

    def plan(self, request: PlanRequest, planner: str = "") -> RunPlan:
        """Ask the planners, or only the one named, until one doesn't decline.

        Raises:
            PlanError: The request can't be met, or every planner declined.
            PluginError: The named planner can't be used, or a planner gave something else than a plan.
        """
        if planner:
            self.require({PLANNERS: [planner]})
        asked = []
        for candidate in self._in_order(PLANNERS, "myelin_plan"):
            if planner and candidate.name != planner:
                continue
            asked.append(candidate.name)
            plan = self._call(candidate, "myelin_plan", request=request)
            if plan is None:
                continue
            if not isinstance(plan, RunPlan):
                self._wrong_type(candidate, "myelin_plan", plan, "a RunPlan")
            return plan if plan.planner else replace(plan, planner=candidate.name)
        if not asked:
            raise PluginError("No planner is installed", "reinstall myelin-core: it brings the planner `pipeline`")
        raise PlanError(f"Every planner declined: {', '.join(asked)}", "name another with --set runtime.planner=…")

    def model_source(self, uri: str, options: SourceOptions) -> ModelSource:
        """The source that recognises ``uri``.

        Raises:
            UsageError: Nobody recognises it, or it is misspelt.
            PluginError: What a plugin gave is no source.
        """
        candidates = self._in_order(SOURCES, "myelin_model_source")
        for candidate in candidates:
            source = self._call(candidate, "myelin_model_source", uri=uri, options=options)
            if source is not None:
                return cast(ModelSource, self._checked(candidate, "myelin_model_source", source, ModelSource))
        raise UsageError(
            f"No model source recognises {uri!r}",
            f"sources that are installed: {', '.join(candidate.name for candidate in candidates) or 'none'}",
        )

    def telemetry(
        self, context: TelemetryContext, sections: Mapping[str, BaseModel] = MappingProxyType({})
    ) -> tuple[SpanExporter | TelemetrySink, ...]:
        """What every sink that is configured takes telemetry with.

        Args:
            context: What each sink is told; its section is filled in from ``sections`` by name.
        """
        exporters: list[SpanExporter | TelemetrySink] = []
        for candidate in self._usable(TELEMETRY):
            section = self._sections.get(candidate)
            own = replace(context, section=sections.get(section.name)) if section is not None else context
            given = self._collect(candidate, "myelin_telemetry", (list, tuple), context=own)
            wrong = [exporter for exporter in given or () if not _takes_telemetry(exporter)]
            if wrong:
                reason = f"myelin_telemetry gave a {type(wrong[0]).__name__}, not a SpanExporter or TelemetrySink"
                self._blame(candidate, PluginState.INVALID, reason)
            else:
                exporters += given or ()
        return tuple(exporters)

    # What follows turns candidates into loaded modules and calls their hooks; the states change only here.

    def _of(self, group: str) -> list[Candidate]:
        return [candidate for candidate in self._candidates if candidate.group == group]

    def _named(self, group: str, name: str) -> list[Candidate]:
        return [candidate for candidate in self._of(group) if candidate.name == name]

    def _usable(self, group: str) -> Iterator[Candidate]:
        """The group's plugins that load, in order of their names."""
        for candidate in sorted(self._of(group), key=lambda candidate: candidate.name):
            if self._load(candidate).state is PluginState.LOADED:
                yield candidate

    def _settle(self, group: str, name: str) -> PluginRow:
        """The final row of a plugin asked for by name, loading it where metadata allows."""
        if group not in GROUPS:
            raise PluginError(f"{group!r} is no group of plugins", f"groups are {', '.join(GROUPS)}")
        rows = [self._load(candidate) for candidate in self._named(group, name)]
        # Of two claimants, one of which is disabled, the other one counts.
        rows.sort(key=lambda row: row.state is PluginState.DISABLED)
        return rows[0] if rows else missing_row(group, name)

    def _load(self, candidate: Candidate) -> PluginRow:
        """Import and check a candidate that metadata speaks well of; others keep their row."""
        if self._rows[candidate].state is not PluginState.INSTALLED:
            return self._rows[candidate]
        try:
            plugin = self._loader(candidate)
        except LoadError as error:
            return self._blame(candidate, PluginState.BROKEN, f"importing {candidate.value} failed with {error}")
        groups = {other.group for other in self._candidates if other.value == candidate.value}
        if why := violation(plugin, groups):
            return self._blame(candidate, PluginState.INVALID, why)
        assert isinstance(plugin, ModuleType)
        self._modules[candidate] = plugin
        self._rows[candidate] = candidate.row(PluginState.LOADED)
        if not self._manager.is_registered(plugin):
            self._manager.register(plugin, name=f"{candidate.group}:{candidate.name}")
        self._take_section(candidate)
        if self._rows[candidate].state is PluginState.LOADED:
            self._ask_readiness(candidate, plugin)
        return self._rows[candidate]

    def _ask_readiness(self, candidate: Candidate, plugin: ModuleType) -> None:
        not_ready = self._collect(candidate, "myelin_not_ready", str)
        if not_ready is not None:
            self._blame(candidate, PluginState.NOT_READY, " ".join(not_ready.split()) or "it doesn't say why")
        elif self._rows[candidate].state is PluginState.LOADED and (why := lacks_hook(plugin, candidate.group)):
            self._blame(candidate, PluginState.INVALID, why)

    def _take_section(self, candidate: Candidate) -> None:
        section = self._collect(candidate, "myelin_config_section", ConfigSection)
        if section is None:
            return
        if why := _section_violation(section):
            self._blame(candidate, PluginState.INVALID, why)
            return
        for other, taken in self._sections.items():
            if taken.name == section.name and taken.model is not section.model:
                owners = f"{candidate.distribution} and {other.distribution}"
                reason = f"both {owners} have a configuration section {section.name!r}"
                for one in (candidate, other):
                    self._blame(one, PluginState.CONFLICTING, reason)
                return
        self._sections[candidate] = section

    def _blame(self, candidate: Candidate, state: PluginState, reason: str) -> PluginRow:
        """Take a candidate out of use."""
        self._rows[candidate] = candidate.row(state, reason)
        self._modules.pop(candidate, None)
        return self._rows[candidate]

    def _call(self, candidate: Candidate, hook: str, **arguments: object) -> object:
        """Ask one plugin one hook, through pluggy; None where it doesn't have it.

        Raises:
            PluginError: The hook failed with something else than a :class:`MyelinError`.
        """
        plugin = self._modules[candidate]
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        caller = self._manager.subset_hook_caller(hook, remove_plugins=others)
        try:
            answer: object = caller(**arguments)
        except MyelinError:
            raise
        except Exception as error:  # anything may come out of a plugin; it is named and handed to the person
            row = self._blame(candidate, PluginState.BROKEN, f"{hook} failed with {one_line(error)}")
            raise failure([(row, GROUPS[candidate.group], ())]) from error
        if isinstance(answer, list) and hook in _COLLECTED:  # pluggy's list of one plugin's answers
            return answer[0] if answer else None
        return answer

    def _collect(
        self, candidate: Candidate, hook: str, kind: type[Thing] | tuple[type[Thing], ...], **arguments: object
    ) -> Thing | None:
        """Ask one plugin a hook that everybody is asked.

        A failure or an answer that is no ``kind`` takes only that plugin out of use, unless it was asked for by name.
        """
        if candidate not in self._modules:
            return None
        try:
            answer = self._call(candidate, hook, **arguments)
        except PluginError:
            if (candidate.group, candidate.name) in self._wanted:
                raise
            return None
        if answer is None:
            return None
        if not isinstance(answer, kind):
            kinds = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            self._blame(candidate, PluginState.INVALID, f"{hook} gave a {type(answer).__name__}, not a {kinds}")
            return None
        return answer

    def _in_order(self, group: str, hook: str) -> list[Candidate]:
        """The group's usable plugins that have ``hook``, in the order in which pluggy would ask them."""
        usable = list(self._usable(group))
        called = reversed(getattr(self._manager.hook, hook).get_hookimpls())
        return [
            candidate
            for implementation in called
            for candidate in usable
            if self._modules[candidate] is implementation.plugin
        ]

    def _make(self, group: str, name: str, protocol: type, hook: str, **arguments: object) -> object:
        self.require({group: [name]})
        candidate = next(one for one in self._named(group, name) if one in self._modules)
        made = self._call(candidate, hook, name=name, **arguments)
        if made is None:
            row = self._blame(candidate, PluginState.INVALID, f"{hook} gave nothing for its own name {name!r}")
            raise failure([(row, GROUPS[group], self.names(group))])
        return self._checked(candidate, hook, made, protocol)

    def _checked(self, candidate: Candidate, hook: str, made: object, protocol: type) -> object:
        """``made``, which has all members of the protocol: there is no more to check of one."""
        if missing := missing_members(made, protocol):
            kind = f"a {type(made).__name__}, which lacks {', '.join(missing)}"
            row = self._blame(candidate, PluginState.INVALID, f"{hook} gave {kind} of {protocol.__name__}")
            raise failure([(row, GROUPS[candidate.group], ())])
        return made

    def _wrong_type(self, candidate: Candidate, hook: str, given: object, expected: str) -> NoReturn:
        row = self._blame(candidate, PluginState.INVALID, f"{hook} gave a {type(given).__name__}, not {expected}")
        raise failure([(row, GROUPS[candidate.group], ())])


_COLLECTED = frozenset(
    {"myelin_config_section", "myelin_not_ready", "myelin_commands", "myelin_engine_support", "myelin_telemetry"}
)
"""Hooks for which pluggy answers a list (all others are ``firstresult``)."""


def _takes_telemetry(given: object) -> bool:
    """Whether a telemetry plugin gave what it should; the SDK is only imported where it isn't one of our own sinks."""
    if isinstance(given, TelemetrySink):
        return True
    from opentelemetry.sdk.trace.export import SpanExporter as Exporter

    return isinstance(given, Exporter)


_SECTION_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


def _section_violation(section: ConfigSection) -> str:
    """What is wrong with a configuration section; empty where nothing is."""
    from myelin.config.sections import CORE_SECTIONS

    if not _SECTION_NAME.match(str(section.name)):
        return f"its configuration section is named {section.name!r}; lower-case letters, digits and _ are allowed"
    if section.name in CORE_SECTIONS:
        return f"its configuration section {section.name!r} is one of Myelin's own"
    model: object = section.model
    if not isinstance(model, type) or not issubclass(model, BaseModel):
        return f"the model of its configuration section {section.name!r} is no pydantic model"
    try:
        section.model()
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        return f"its configuration section {section.name!r} has a field without a valid default: {field}"
    return ""
