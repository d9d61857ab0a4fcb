"""What goes to people and to programs: answers on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence


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
