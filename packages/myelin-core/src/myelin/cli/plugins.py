"""``myelin plugins``: what is installed, and what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from myelin.cli.options import Invocation, with_options

if TYPE_CHECKING:
    from myelin.plugins.report import PluginRow

NAME = "plugins"


@with_options()
def command(invocation: Invocation) -> int:
    """List the plugins that are installed, with the state of each."""
    from myelin.cli.output import answer, answer_json, table

    rows = _rows(invocation)
    if invocation.json:
        answer_json([row.as_json() for row in rows])
    else:
        header = ("group", "name", "distribution", "version", "state", "reason")
        cells = [
            (row.group.removeprefix("myelin."), row.name, row.distribution, row.version, row.state.value, row.reason)
            for row in rows
        ]
        answer(table(header, cells))
    return 0


def _rows(invocation: Invocation) -> tuple[PluginRow, ...]:
    """A row for each plugin that is installed, and for each one that the settings name and nothing brings.

    This must work however wrong the settings are, so they count only where they can be read.
    """
    from myelin.cli.composition import assemble, named_plugins
    from myelin.config.settings import peek_disabled_plugins
    from myelin.errors import ConfigError, PluginError
    from myelin.plugins.registry import Registry

    try:
        root = assemble(invocation)
    except ConfigError:
        return Registry.discover(disabled=peek_disabled_plugins(invocation.inputs())).report()
    try:
        root.registry.require(named_plugins(root.settings))
    except PluginError:
        pass  # what can't be used is in the report
    return root.registry.report()
