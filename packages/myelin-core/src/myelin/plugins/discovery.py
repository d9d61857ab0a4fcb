"""What is installed, from metadata alone: nothing is imported before its name, version and owner are known to be well.

The entry points of each distribution are read through :mod:`importlib.metadata`; stevedore then loads exactly those
that passed. Its own conflict resolver isn't used: it sees only neighbours of the same name, and it expects classes.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from stevedore import ExtensionManager

from myelin.plugins.report import PluginRow, PluginState

CORE = "myelin-core"
"""The distribution whose version plugins require."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry point as its distribution's metadata states it.

    Attributes:
        group, name, value: The entry point's.
        distribution, version: The distribution's.
        requires: Its requirements of :data:`CORE`, as written (``myelin-core==0.1.0``).
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str
    requires: tuple[str, ...] = ()

    def row(self, state: PluginState, reason: str = "") -> PluginRow:
        """The candidate's row in a state."""
        return PluginRow(self.group, self.name, self.distribution, self.version, state, reason)


class LoadError(Exception):
    """A plugin's module could not be imported; the message says why, for people."""


def core_version() -> str:
    """The version of :data:`CORE` that is installed (of the running source tree, where it isn't)."""
    try:
        return importlib.metadata.version(CORE)
    except importlib.metadata.PackageNotFoundError:
        from myelin import __version__

        return __version__


def installed(
    groups: Collection[str], distributions: Iterable[importlib.metadata.Distribution] | None = None
) -> tuple[tuple[Candidate, ...], tuple[PluginRow, ...]]:
    """Every entry point of ``groups``, and rows for distributions whose metadata can't be read.

    A distribution that is on the path more than once counts once: the first, which is the one that imports find.
    """
    candidates: list[Candidate] = []
    unreadable: list[PluginRow] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions() if distributions is None else distributions:
        try:
            text = distribution.read_text("entry_points.txt") or ""
        except (OSError, UnicodeDecodeError):
            continue
        if not any(f"[{group}]" in text for group in groups):
            continue
        name, version = _identity(distribution)
        if canonicalize_name(name) in seen:
            continue
        seen.add(canonicalize_name(name))
        try:
            entries = list(distribution.entry_points)
        except Exception as error:  # a hand-made file can be wrong in any way, and the standard library checks none
            group = next(group for group in groups if f"[{group}]" in text)
            reason = f"its entry_points.txt can't be read: {one_line(error)}"
            unreadable.append(PluginRow(group, "?", name, version, PluginState.BROKEN, reason))
            continue
        requires = tuple(line for line in distribution.requires or () if _names_core(line))
        candidates += [
            Candidate(entry.group, entry.name, entry.value, name, version, requires)
            for entry in entries
            if entry.group in groups
        ]
    return tuple(candidates), tuple(unreadable)


def _identity(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    metadata = distribution.metadata
    return str(metadata["Name"] or "unknown"), str(metadata["Version"] or "")


def _names_core(line: str) -> bool:
    """Whether a ``Requires-Dist`` line is about the core, even if it can't be parsed."""
    return canonicalize_name(line.lstrip()[: len(CORE)]) == CORE and not line.lstrip()[len(CORE) :][:1].isalnum()


def incompatibility(requires: Sequence[str], running: str) -> str:
    """Why requirements of the core aren't met by version ``running``; empty where they are."""
    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            return f"its requirement {line!r} can't be read"
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            fits = requirement.specifier.contains(Version(running), prereleases=True)
        except InvalidVersion:
            return f"this Myelin's own version {running!r} can't be read"
        if not fits:
            return f"it requires {CORE}{requirement.specifier}, and {running} is running"
    return ""


def judge(
    candidates: Sequence[Candidate], *, running: str, disabled: Collection[str] = ()
) -> Mapping[Candidate, PluginRow]:
    """What metadata alone says of each candidate; nothing is imported.

    Args:
        running: The core's version.
        disabled: Names of plugins (``docker``), with a group where that is needed (``providers:docker``), or of
            distributions (``myelin-provider-docker``).

    Returns:
        For each candidate its row, ``installed`` where nothing speaks against it. Those of one group and name share one
        row where they conflict: it names all their distributions.
    """
    claims: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if not is_disabled(candidate, disabled):
            claims[candidate.group, candidate.name].append(candidate)
    rows: dict[Candidate, PluginRow] = {}
    for candidate in candidates:
        claimants = claims.get((candidate.group, candidate.name), [])
        if is_disabled(candidate, disabled):
            rows[candidate] = candidate.row(PluginState.DISABLED, "switched off by runtime.disabled_plugins")
        elif len(claimants) > 1:
            rows[candidate] = _conflict(claimants)
        elif why := incompatibility(candidate.requires, running):
            rows[candidate] = candidate.row(PluginState.INCOMPATIBLE, why)
        else:
            rows[candidate] = candidate.row(PluginState.INSTALLED)
    return rows


def _conflict(claimants: Sequence[Candidate]) -> PluginRow:
    first = claimants[0]
    counted = Counter(f"{claimant.distribution} {claimant.version}".strip() for claimant in claimants)
    owners = " and ".join(f"{owner} (twice)" if times > 1 else owner for owner, times in sorted(counted.items()))
    distributions = sorted({claimant.distribution for claimant in claimants})
    versions = sorted({claimant.version for claimant in claimants})
    return PluginRow(
        first.group,
        first.name,
        ", ".join(distributions),
        ", ".join(versions),
        PluginState.CONFLICTING,
        f"claimed by {owners}",
    )


def is_disabled(candidate: Candidate, disabled: Collection[str]) -> bool:
    """Whether one of the names in ``disabled`` means ``candidate``."""
    short = candidate.group.removeprefix("myelin.")
    names = {candidate.name, f"{short}:{candidate.name}", f"{candidate.group}:{candidate.name}"}
    return bool(names & set(disabled)) or canonicalize_name(candidate.distribution) in map(canonicalize_name, disabled)


if TYPE_CHECKING:
    _Manager = ExtensionManager[object]
else:
    _Manager = ExtensionManager  # generic only in newer versions


class _Chosen(_Manager):
    """A stevedore manager of one entry point that was chosen from metadata, instead of all of a namespace.

    It also keeps stevedore from reading (and caching on disk) the entry points of everything that is installed.
    """

    def __init__(self, entry_point: importlib.metadata.EntryPoint) -> None:
        self._entry_point = entry_point
        self.causes: list[BaseException] = []
        super().__init__(entry_point.group, on_load_failure_callback=lambda *call: self.causes.append(call[2]))

    def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
        return [self._entry_point]


def load(candidate: Candidate) -> object:
    """Import what a candidate names: by the contract, a module.

    Raises:
        LoadError: It can't be imported.
    """
    entry_point = importlib.metadata.EntryPoint(candidate.name, candidate.value, candidate.group)
    try:
        manager = _Chosen(entry_point)
    except (AssertionError, SystemExit) as error:  # stevedore lets these through; from a plugin they are just failures
        raise LoadError(one_line(error)) from error
    for cause in manager.causes:
        raise LoadError(one_line(cause)) from cause
    plugin: object = manager.extensions[0].plugin
    return plugin


def one_line(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
