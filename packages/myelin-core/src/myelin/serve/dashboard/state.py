"""The page's state: tables of rows by key and rings of rows in time; and the difference between two states.

A page begins with a snapshot, and increments keep it up to date. Both are JSON as they are; ``static/store.js`` applies
increments as :func:`apply` does, and a test holds the two together.

    snapshot   {"version": 7, "tables": {"nodes": {"stage-0": {…}}}, "rings": {"logs": [{…}, …]}}
    increment  {"version": 9, "rows": {"nodes": {"stage-0": {…}, "old": null}}, "items": {"logs": [{…}]}}

A row in an increment replaces the whole row of that key; ``null`` takes it away. Items go to the end of their ring,
whose oldest ones give way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Value = str | int | float | bool | None
Row = Mapping[str, Value]

TABLES: Mapping[str, int] = {
    "run": 1,
    "phases": 64,
    "nodes": 256,
    "spans": 768,
    "stages": 256,
    "requests": 200,
}
"""The tables, and how many rows each may have; the row that was put in first gives way."""

RINGS: Mapping[str, int] = {"samples": 600, "answers": 400, "news": 200, "logs": 1500}
"""The rings, and how many rows each holds."""

MAX_TEXT = 2000
"""Characters of a text in a row at most; what is longer is cut."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that the page shows.

    Attributes:
        version: How many changes led here.
        tables: Rows by key, in the order in which they were put in.
        rings: Rows in time, oldest first.
        written: How many rows each ring was ever given.
    """

    version: int = 0
    tables: Mapping[str, Mapping[str, Row]] = field(default_factory=lambda: {name: {} for name in TABLES})
    rings: Mapping[str, tuple[Row, ...]] = field(default_factory=lambda: dict.fromkeys(RINGS, ()))
    written: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(RINGS, 0))

    def row(self, table: str, key: str) -> Row:
        """A row; empty where there is none."""
        return self.tables[table].get(key, {})

    def put(self, table: str, key: str, row: Row) -> Snapshot:
        """With a row in place of that key's, or as the last one; the first one gives way where there are too many."""
        rows = {**self.tables[table], key: row}
        if len(rows) > TABLES[table]:
            del rows[next(iter(rows))]
        return replace(self, version=self.version + 1, tables={**self.tables, table: rows})

    def update(self, table: str, key: str, **changed: Value) -> Snapshot:
        """With some values of a row changed."""
        return self.put(table, key, {**self.row(table, key), **changed})

    def drop(self, table: str, key: str) -> Snapshot:
        """Without a row."""
        rows = {other: row for other, row in self.tables[table].items() if other != key}
        return replace(self, version=self.version + 1, tables={**self.tables, table: rows})

    def add(self, ring: str, items: Iterable[Row]) -> Snapshot:
        """With more rows at the end of a ring."""
        added = tuple(items)
        return replace(
            self,
            version=self.version + 1,
            rings={**self.rings, ring: (*self.rings[ring], *added)[-RINGS[ring] :]},
            written={**self.written, ring: self.written[ring] + len(added)},
        )

    def as_json(self) -> dict[str, Any]:
        """See the module."""
        return {
            "version": self.version,
            "tables": {name: dict(rows) for name, rows in self.tables.items()},
            "rings": {name: list(rows) for name, rows in self.rings.items()},
        }


@dataclass(frozen=True, slots=True)
class Increment:
    """What leads to the snapshot ``version``: ``rows`` by table and key, None where the row goes; ``items`` by ring."""

    version: int
    rows: Mapping[str, Mapping[str, Row | None]]
    items: Mapping[str, tuple[Row, ...]]

    def as_json(self) -> dict[str, Any]:
        """See the module."""
        return {
            "version": self.version,
            "rows": {table: dict(rows) for table, rows in self.rows.items()},
            "items": {ring: list(rows) for ring, rows in self.items.items()},
        }


def difference(before: Snapshot, after: Snapshot) -> Increment:
    """What leads from a snapshot to a later one of the same history. Pure; never larger than ``after`` and the keys of
    ``before``."""
    rows: dict[str, dict[str, Row | None]] = {}
    for name, new in after.tables.items():
        old = before.tables[name]
        if new is not old:
            changed: dict[str, Row | None] = {key: row for key, row in new.items() if old.get(key) != row}
            changed.update(dict.fromkeys(key for key in old if key not in new))
            if changed:
                rows[name] = changed
    items = {}
    for name, ring in after.rings.items():
        if added := min(after.written[name] - before.written[name], len(ring)):
            items[name] = ring[-added:]
    return Increment(after.version, rows, items)


def apply(
    tables: Mapping[str, Mapping[str, Row]], rings: Mapping[str, tuple[Row, ...]], increment: Increment
) -> Snapshot:
    """What a page that shows ``tables`` and ``rings`` shows after an increment. Pure."""
    shown = {name: dict(rows) for name, rows in tables.items()}
    for name, changed in increment.rows.items():
        for key, row in changed.items():
            if row is None:
                shown[name].pop(key, None)
            else:
                shown[name][key] = row
    longer = {name: (*ring, *increment.items.get(name, ()))[-RINGS[name] :] for name, ring in rings.items()}
    return Snapshot(increment.version, shown, longer)


def short(text: str) -> str:
    """A text that fits into a row."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
