"""``python -m myelin_testkit.new NAME``: a new provider package, as a copy of the example with another name.

The copy is complete: it can be installed (``pip install -e ".[test]"``), is shown by ``myelin plugins``, and its tests,
the compliance suite among them, pass before anything is changed. Then change it, a method at a time.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from myelin.plugin import MyelinError, UsageError

EXAMPLE = "echo"
_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_SKIPPED = {"__pycache__", "dist", "build"}


def create(name: str, into: Path) -> Path:
    """Write the package ``myelin-provider-NAME`` into a new folder of that name.

    Args:
        name: Lowercase words joined by ``-`` or ``_``: ``slurm``, ``my-cloud``.
        into: Where the new folder goes.

    Returns:
        The new folder.

    Raises:
        UsageError: The name can't be one, or the folder is there already.
    """
    if not _NAME.fullmatch(name) or len(name) > 40 or keyword.iskeyword(name):
        raise UsageError(f"{name!r} can't be a provider's name", "use lowercase letters, digits and -, as in my-cloud")
    folder = into / f"myelin-provider-{name.replace('_', '-')}"
    source = example_folder()
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"{folder} is there already", "choose another name or another folder") from None
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_file() and not any(part in _SKIPPED or part.startswith(".") for part in relative.parts):
            target = folder / renamed(str(relative), name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(renamed(path.read_text("utf-8"), name), "utf-8")
    return folder


def renamed(text: str, name: str) -> str:
    """``text`` with the example's name in every spelling replaced. Pure.

    The entry point, the configuration section and the module are spelt with ``_``, so that a section can be set by a
    variable; the distribution with ``-``; classes in capitals; variables of the environment likewise.
    """
    words = re.split("[_-]", name)
    text = text.replace(f"myelin-provider-{EXAMPLE}", f"myelin-provider-{'-'.join(words)}")
    text = text.replace(EXAMPLE.upper(), "_".join(words).upper())
    text = text.replace(EXAMPLE.capitalize(), "".join(word.capitalize() for word in words))
    return text.replace(EXAMPLE, "_".join(words))


def example_folder() -> Path:
    """The example: in the installed package, or in the repository that this module is in.

    Raises:
        UsageError: It is in neither.
    """
    here = Path(__file__).resolve()
    in_repository = here.parents[4] / "examples" / f"myelin-provider-{EXAMPLE}" if len(here.parents) > 4 else here
    for folder in (here.parent / "template", in_repository):
        if (folder / "pyproject.toml").is_file():
            return folder
    raise UsageError("the example isn't installed", "reinstall myelin-testkit")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m myelin_testkit.new", description="Write a new provider package.")
    parser.add_argument("name", help="lowercase words, as in my-cloud")
    parser.add_argument("--into", type=Path, default=Path(), help="where the new folder goes (default: here)")
    chosen = parser.parse_args(arguments)
    try:
        folder = create(chosen.name, chosen.into)
    except MyelinError as error:
        sys.stderr.write(f"Error: {error.message}\n{error.hint}\n")
        return error.exit_code
    sys.stdout.write(
        f'Wrote {folder}\nNext:\n  cd {folder}\n  pip install -e ".[test]"\n  pytest\n  myelin plugins\n'
        f"  myelin prompt Hello --provider {'_'.join(re.split('[_-]', chosen.name))}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
