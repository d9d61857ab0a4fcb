"""The ``myelin`` command: which commands there are, and what people see where one fails.

Exit codes: 0 done, 1 it failed, 2 the words or the configuration were wrong, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from myelin import __version__
from myelin.cli import (
    bench,
    cache,
    chat,
    config,
    doctor,
    down,
    gc,
    inspect,
    logs,
    offers,
    plan,
    plugins,
    prompt,
    serve,
    status,
    worker,
)
from myelin.cli.interrupts import remember_interrupts
from myelin.cli.output import prepare_streams
from myelin.errors import MyelinError

INTERRUPTED = 130

_CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a full disk says; every other place where we write turns it into an error of its own."""

app = typer.Typer(
    name="myelin",
    help="Serve one GGUF model over several machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for module in (
    *(prompt, chat, serve, plan, offers, inspect),
    *(status, logs, down, gc),
    *(plugins, config, doctor, worker, bench),
):
    app.command(module.NAME)(module.command)
app.add_typer(cache.app, name=cache.NAME)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"myelin {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serve one GGUF model over several machines."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code. ``arguments`` are those of the process where None."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        remember_interrupts()
        prepare_streams()
    debug = "--debug" in words or bool(os.environ.get("MYELIN_DEBUG"))
    try:
        result = _command(words).main(words, prog_name="myelin", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        if debug and not isinstance(error, (SystemExit, typer.Exit)):
            import traceback

            traceback.print_exc()
        return report(error)
    if result == INTERRUPTED:  # newer versions of typer turn an interruption into this code by themselves
        return report(KeyboardInterrupt())
    return result if isinstance(result, int) else 0


def _command(words: Sequence[str]) -> Any:
    """The whole command, with a plugin's own beneath it where ``words`` ask for one.

    Plugins are looked for only then: a command of Myelin's own, or ``--help``, needn't wait for them.
    """
    command: Any = typer.main.get_command(app)
    name = next((word for word in words if not word.startswith("-")), "")
    if name and name not in command.commands:
        from myelin.plugins.registry import Registry

        if (added := Registry.discover().commands(name)) is not None:
            command.add_command(typer.main.get_command(added), name)
    return command


def report(error: BaseException) -> int:
    """Tell a person what went wrong, in two lines, and give the exit code for it.

    Raises:
        SystemExit: It was one.
    """
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        sys.stderr.write("Interrupted\n")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _drop_output()  # whoever read our answer has had enough
        return 1
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
        show_error(f"The answer could not be written: {error.strerror}", "free some space, or write it elsewhere")
        _drop_output()
        return 1
    if isinstance(error, BaseExceptionGroup):
        return report(_first_of(error))
    if isinstance(error, MyelinError):
        show_error(error.message, error.hint)
        return error.exit_code
    if isinstance(error, _bad_words()):
        format_message = getattr(error, "format_message", error.__str__)
        context = getattr(error, "ctx", None)
        path = getattr(context, "command_path", "myelin")
        show_error(str(format_message()) or "no command was given", f"see `{path} --help`")
        return 2
    text = " ".join(str(error).split())
    show_error(
        f"Something that Myelin didn't expect: {type(error).__name__}{': ' if text else ''}{text}",
        "please report this, with what the same command shows with --debug",
    )
    return 1


def _drop_output() -> None:
    """What is still to be flushed goes nowhere: Python would complain once more when it flushes at the end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_error(message: str, hint: str) -> None:
    """The two lines: what, and how to mend it."""
    one_line = " ".join(message.split())
    remedy = " ".join(hint.split()) or "run it again with --debug to see where it happened"
    sys.stderr.write(f"Error: {one_line}\nHint: {remedy}\n")
    sys.stderr.flush()


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception of a group that says most to a person: one of ours before any other."""
    leaves = [_first_of(error) if isinstance(error, BaseExceptionGroup) else error for error in group.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, MyelinError)), leaves[0])


def _bad_words() -> tuple[type[BaseException], ...]:
    """The base class of typer's own errors about the command line, which moved between its versions."""
    return tuple(kind for kind in typer.BadParameter.__mro__ if kind.__name__ in {"ClickException", "TyperException"})
