"""What goes to people and to programs: answers on stdout, everything else on stderr."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Sequence


def prepare_streams() -> None:
    """Make the standard streams fit to be used, however the process was started.

    A descriptor that is closed (``myelin … >&-``) would be given to the next file or socket that is opened, which would
    then get what we write for people, and event loops refuse to live with that: it leads to nowhere instead. A
    character that the terminal's encoding lacks is replaced, rather than the end of a run.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115  # for as long as the process lives, as the next two
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115  # likewise
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115  # likewise
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")


def answer(text: str, *, end: str = "\n") -> None:
    """Write part of the answer, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def answer_json(document: object) -> None:
    """Write the answer as the one JSON document on stdout."""
    answer(json.dumps(document, ensure_ascii=False, indent=2))


def tell(text: str) -> None:
    """Write a line beside the answer."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> str:
    """Columns between two spaces; those named in ``right`` (by index) end at the same place."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    aligned = set(right)
    lines = []
    for row in cells:
        padded = [
            text.rjust(width) if column in aligned else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def human_bytes(count: int) -> str:
    """A number of bytes in the unit that leaves one to three digits before the point: ``91.7 MB`` (powers of 1000)."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.95 or unit == "TB":
            return f"{int(size)} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")
