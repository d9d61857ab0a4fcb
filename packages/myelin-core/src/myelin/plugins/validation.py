"""Checks of a plugin's module against the contract, before anything of it is called."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from difflib import get_close_matches
from types import ModuleType

import pluggy

from myelin.plugins import specs
from myelin.plugins.markers import PROJECT

REQUIRED_HOOK = {
    "myelin.providers": "myelin_provider",
    "myelin.transports": "myelin_transport",
    "myelin.planners": "myelin_plan",
    "myelin.engines": "myelin_engine",
    "myelin.telemetry": "myelin_telemetry",
    "myelin.sources": "myelin_model_source",
}
"""The hook that a plugin of each group exists for."""

GROUP_HOOKS = {
    **{hook: group for group, hook in REQUIRED_HOOK.items()},
    "myelin_engine_support": "myelin.engines",
}
"""Hooks that are asked of one group's plugins alone; the others are asked of all."""


def new_manager() -> pluggy.PluginManager:
    """A pluggy manager that knows the contract."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specs)
    return manager


def known_hooks() -> frozenset[str]:
    """Names of all hooks of the contract."""
    return frozenset(name for name in vars(specs) if name.startswith("myelin_"))


def violation(plugin: object, groups: Collection[str]) -> str:
    """What makes a plugin invalid, one clause for people; empty where its hooks are those of the contract.

    Args:
        plugin: What the entry point named.
        groups: Every group in which the same distribution registers it.
    """
    if not isinstance(plugin, ModuleType):
        return f"its entry point names a {type(plugin).__name__}, not a module"
    manager = new_manager()
    marked = _marked(plugin, manager)
    if isinstance(marked, str):
        return marked
    hooks = known_hooks()
    for name, options in marked.items():
        if name not in hooks and not options.get("optionalhook"):
            return f"{name} is no hook of Myelin{_nearest(name, hooks)}"
        if options.get("wrapper") or options.get("hookwrapper"):
            return f"{name} is a wrapper around other plugins' hooks, which Myelin doesn't have"
        group = GROUP_HOOKS.get(name)
        if group is not None and group not in groups:
            return f"it has the hook {name}, but isn't registered in the group {group} that it belongs to"
    for name in sorted(vars(plugin)):
        if name.startswith("myelin_") and name not in marked and inspect.isroutine(vars(plugin)[name]):
            if name in hooks:
                return f"its function {name} isn't marked with hookimpl, so that nobody would call it"
            return f"its function {name} is no hook of Myelin{_nearest(name, hooks)}"
    try:
        manager.register(plugin)
    except pluggy.PluginValidationError as error:
        return _argument_words(error)
    return ""


def lacks_hook(plugin: ModuleType, group: str) -> str:
    """The hook that a plugin of ``group`` must have and this one hasn't; empty where it has it."""
    hook = REQUIRED_HOOK[group]
    return "" if hook in vars(plugin) else f"it is in the group {group}, but has no hook {hook}"


def _marked(plugin: ModuleType, manager: pluggy.PluginManager) -> dict[str, dict[str, object]] | str:
    """The marked functions with their options, or what is wrong with a mark."""
    found: dict[str, dict[str, object]] = {}
    for name in sorted(vars(plugin)):
        try:
            options = manager.parse_hookimpl_opts(plugin, name)
        except Exception as error:  # a module may have attributes that fail in any way when they are looked at
            return f"its attribute {name} can't be looked at: {type(error).__name__}: {error}"
        if options is None:
            continue
        found[str(options.get("specname") or name)] = dict(options)
    return found


def _argument_words(error: pluggy.PluginValidationError) -> str:
    """Pluggy's message of several lines in one clause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hook = next((line.partition(" for hook ")[2] for line in lines if " for hook " in line), "")
    last = lines[-1] if lines else "its hooks don't fit the contract"
    return f"its hook {hook.strip(chr(39))}: {last}" if hook else " ".join(lines)


def _nearest(name: str, hooks: Collection[str]) -> str:
    near = get_close_matches(name, hooks, n=1)
    return f" (nearest: {near[0]})" if near else ""


def missing_members(value: object, protocol: type) -> list[str]:
    """The members of a Protocol class that ``value`` lacks; properties aren't evaluated."""
    members = [name for name in vars(protocol) if not name.startswith("_")]
    missing = []
    for name in members:
        try:
            inspect.getattr_static(value, name)
        except AttributeError:
            if not hasattr(type(value), "__getattr__"):
                missing.append(name)
    return missing
