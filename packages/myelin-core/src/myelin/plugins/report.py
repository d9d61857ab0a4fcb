"""What became of each plugin, in words for people: the states, the rows of ``myelin plugins``, and the remedies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from myelin.errors import PluginError


class PluginState(StrEnum):
    """What a plugin is at the moment. Only ``loaded`` ones are used."""

    INSTALLED = "installed"
    """Its metadata is well; nobody has asked for it yet, so it hasn't been imported."""
    LOADED = "loaded"
    """Imported, its hooks checked."""
    MISSING = "missing"
    """Asked for by name, and no installed distribution has it."""
    CONFLICTING = "conflicting"
    """Two distributions (or one, twice) claim the same name in the same group, or the same configuration section."""
    INCOMPATIBLE = "incompatible"
    """Its distribution requires another version of myelin-core than the one that is running."""
    BROKEN = "broken"
    """Importing it, or calling one of its hooks, failed."""
    INVALID = "invalid"
    """Its hooks aren't those of the contract, or gave something of a wrong type."""
    DISABLED = "disabled"
    """Switched off by ``runtime.disabled_plugins``."""
    NOT_READY = "not-ready"
    """Installed, but it says of itself that it can't be used yet."""


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One plugin and its state: a line of ``myelin plugins``.

    Attributes:
        group: The entry-point group.
        name: The entry point's name.
        distribution, version: Who brought it; empty for a missing one. Several distributions are joined by a comma.
        state: See :class:`PluginState`.
        reason: Why it is in that state, for people; empty where it is well.
    """

    group: str
    name: str
    distribution: str
    version: str
    state: PluginState
    reason: str = ""

    def as_json(self) -> dict[str, str]:
        """The row as ``myelin plugins --json`` writes it."""
        return {
            "group": self.group,
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "state": self.state.value,
            "reason": self.reason,
        }


PACKAGE_PREFIX = {
    "myelin.providers": "myelin-provider-",
    "myelin.transports": "myelin-transport-",
    "myelin.planners": "myelin-planner-",
    "myelin.engines": "myelin-worker-",
    "myelin.telemetry": "myelin-telemetry-",
    "myelin.sources": "myelin-source-",
}
"""How a distribution that brings a plugin of a group is called by convention, before the plugin's own name."""


def missing_row(group: str, name: str) -> PluginRow:
    """The row of a plugin that was asked for and isn't installed."""
    return PluginRow(group, name, "", "", PluginState.MISSING, "no installed distribution has it")


def describe(row: PluginRow, kind: str) -> str:
    """One clause on a plugin that can't be used.

    Args:
        kind: What people call a plugin of its group (``provider``).
    """
    if row.state is PluginState.MISSING:
        return f"the {kind} {row.name!r} is not installed"
    origin = f" of {row.distribution} {row.version}".rstrip() if row.distribution else ""
    state = {
        PluginState.CONFLICTING: "is ambiguous",
        PluginState.INCOMPATIBLE: "is not compatible with this Myelin",
        PluginState.BROKEN: "is broken",
        PluginState.INVALID: "is not a valid plugin",
        PluginState.DISABLED: "is disabled",
        PluginState.NOT_READY: "can't be used yet",
    }.get(row.state, row.state.value)
    return f"the {kind} {row.name!r}{origin} {state}: {row.reason}"


def remedy(row: PluginRow, installed: Iterable[str] = ()) -> str:
    """How to mend a plugin that can't be used, one clause.

    Args:
        installed: Names that could be used instead.
    """
    usable = sorted(set(installed) - {row.name})
    instead = f", or use one that is installed: {', '.join(usable)}" if usable else ""
    match row.state:
        case PluginState.MISSING:
            near = get_close_matches(row.name, usable, n=1)
            meant = f"did you mean {near[0]!r}? Otherwise: " if near else ""
            return f"{meant}pip install {PACKAGE_PREFIX.get(row.group, 'myelin-')}{row.name}{instead}"
        case PluginState.CONFLICTING:
            return f"uninstall all but one of {row.distribution}"
        case PluginState.INCOMPATIBLE:
            return f"pip install --upgrade myelin-core {row.distribution}"
        case PluginState.BROKEN:
            return f"reinstall {row.distribution} with its dependencies, or report this to its authors{instead}"
        case PluginState.INVALID:
            return f"upgrade {row.distribution}, or report this to its authors{instead}"
        case PluginState.DISABLED:
            return f"take it out of runtime.disabled_plugins{instead}"
        case PluginState.NOT_READY:
            return f"see the README of {row.distribution}{instead}"
        case _:
            return ""


def failure(problems: Iterable[tuple[PluginRow, str, Iterable[str]]]) -> PluginError:
    """One error for all plugins that were asked for and can't be used.

    Args:
        problems: At least one of (row, what people call its kind, names that could be used instead).
    """
    listed = list(problems)
    rows = [row for row, _, _ in listed]
    sentences = [describe(row, kind) for row, kind, _ in listed]
    hints = list(dict.fromkeys(remedy(row, names) for row, _, names in listed))
    message = (
        sentences[0] if len(sentences) == 1 else f"{len(sentences)} plugins can't be used: " + "; ".join(sentences)
    )
    states = {row.state.value for row in rows}
    reason = f"plugin-{states.pop()}" if len(states) == 1 else "plugin"
    return PluginError(message[:1].upper() + message[1:], "; ".join(hints), reason=reason)
