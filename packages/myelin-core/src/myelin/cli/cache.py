"""``myelin cache``: what was fetched of models to this machine, and how to be rid of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from myelin.cli.options import Invocation, with_options

if TYPE_CHECKING:
    from myelin.model.remote.cache import CacheEntry, ModelCache

NAME = "cache"

app = typer.Typer(name=NAME, help="What was fetched of models to this machine.", no_args_is_help=True)


@app.command("list")
@with_options(())
def list_files(invocation: Invocation) -> int:
    """Show the files of the cache, and how much of each is there."""
    from myelin.cli.output import answer, answer_json, human_bytes, table

    cache, folder = _cache(invocation)
    entries = cache.entries()
    held = sum(entry.held_bytes for entry in entries)
    if invocation.json:
        answer_json({"cache_dir": folder, "held_bytes": held, "files": [_document(entry) for entry in entries]})
        return 0
    if not entries:
        answer(f"{folder} holds nothing")
        return 0
    rows = [
        (
            entry.about.source,
            human_bytes(entry.about.size),
            human_bytes(entry.held_bytes),
            f"{100 * entry.held_bytes / max(1, entry.about.size):.0f} %",
            _when(entry.used),
        )
        for entry in entries
    ]
    answer(table(("file", "size", "held", "share", "used"), rows, right=(1, 2, 3)))
    answer(f"\n{human_bytes(held)} in {folder}")
    return 0


@app.command("prune")
@with_options(())
def prune(
    invocation: Invocation,
    older: Annotated[
        str, typer.Option("--older-than", metavar="TIME", help="Only what was not used for so long: 30d, 12h.")
    ] = "",
    keep: Annotated[
        str, typer.Option("--keep", metavar="SIZE", help="Stop once the cache holds no more than this: 50GB.")
    ] = "",
) -> int:
    """Delete files of the cache, the longest unused first. Those that a run uses now stay."""
    from myelin.cli.output import answer, answer_json, human_bytes
    from myelin.cli.quantities import parse_bytes

    cache, folder = _cache(invocation)
    gone = list(
        cache.prune(
            unused_for_s=_seconds(older) if older else 0.0,
            keep_bytes=parse_bytes(keep) if keep else 0,
        )
    )
    freed = sum(entry.held_bytes for entry in gone)
    left = cache.entries()
    if invocation.json:
        answer_json(
            {
                "cache_dir": folder,
                "freed_bytes": freed,
                "deleted": [_document(entry) for entry in gone],
                "kept": [_document(entry) for entry in left],
            }
        )
        return 0
    for entry in gone:
        answer(f"deleted {entry.about.source} ({human_bytes(entry.held_bytes)})")
    answer(f"{human_bytes(freed)} freed; {human_bytes(sum(entry.held_bytes for entry in left))} held in {folder}")
    return 0


def _cache(invocation: Invocation) -> tuple[ModelCache, str]:
    from myelin.cli.composition import assemble
    from myelin.model.remote.cache import ModelCache

    folder = assemble(invocation).settings.model.cache_dir
    return ModelCache(folder), str(folder)


def _document(entry: CacheEntry) -> dict[str, object]:
    about = entry.about
    return {
        "source": about.source,
        "etag": about.etag,
        "size": about.size,
        "held_bytes": entry.held_bytes,
        "used": entry.used,
        "path": str(entry.folder / about.name),
    }


def _when(seconds: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _seconds(text: str) -> float:
    from myelin.errors import UsageError

    match = re.fullmatch(r"(\d+)([dhm])", text.strip())
    if match is None:
        raise UsageError(f"'{text}' is no time", "Write it as 30d, 12h or 90m.")
    return int(match[1]) * {"d": 86400.0, "h": 3600.0, "m": 60.0}[match[2]]
