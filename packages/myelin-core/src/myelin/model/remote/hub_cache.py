"""The cache that the Hub's own tools keep on this machine: a file that is in it is used where it lies.

Its layout is public (https://huggingface.co/docs/huggingface_hub/guides/manage-cache)::

    models--<owner>--<name>/refs/<revision>            the revision's commit
    models--<owner>--<name>/snapshots/<commit>/<file>  a link to the content
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit: the same bytes for ever."""
    return bool(_COMMIT.fullmatch(revision))


def find(folder: Path | None, repository: str, names: Sequence[str], revision: str) -> tuple[str, list[Path]] | None:
    """The commit that ``revision`` was there last, and the files ``names`` in it; None unless all are there."""
    if folder is None:
        return None
    place = folder / f"models--{repository.replace('/', '--')}"
    try:
        commit = revision if is_commit(revision) else (place / "refs" / revision).read_text("utf-8").strip()
        if not is_commit(commit):
            return None
        paths = [place / "snapshots" / commit / name for name in names]
        return (commit, paths) if all(path.is_file() for path in paths) else None
    except (OSError, ValueError):
        return None
