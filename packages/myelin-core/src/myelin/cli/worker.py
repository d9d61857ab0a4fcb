"""``myelin worker``: a node of a pipeline. Providers start it; it says on stdout where it listens."""

from __future__ import annotations

from typing import Annotated

import typer

from myelin.cli.options import Invocation, with_options

NAME = "worker"


@with_options(settings=False, json=False)
def command(
    invocation: Invocation,
    boot_stdin: Annotated[
        bool, typer.Option("--boot-stdin", help="Read who this node is from the first line of standard input.")
    ] = False,
) -> int:
    """Be a node: hold a stage until told to stop, or until whoever started this has gone."""
    from myelin.errors import UsageError
    from myelin.plugins.registry import Registry
    from myelin.worker.main import main_from_stdin

    if not boot_stdin:
        raise UsageError(
            "A worker must be told who it is", "providers start it with --boot-stdin; `myelin serve` starts all of it"
        )
    return main_from_stdin(Registry.discover)
