"""The file of ``myelin plan --nodes``: machines that we could have, in TOML.

::

    [[node]]
    name = "a"                  # generated where it is left out
    memory = "24GB"
    bandwidth = "936GB/s"       # of its memory
    link_latency = "20ms"       # to the next node; 0 where it is left out
    link_bandwidth = "1Gbit/s"  # not counted where it is left out
    price_per_hour = 0.25       # dollars; 0 where it is left out
    count = 2                   # so many of them; 1 where it is left out
"""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path

from myelin.cli.quantities import parse_bytes, parse_rate, parse_seconds
from myelin.errors import ConfigError, UsageError
from myelin.planner.what_if import Machine

_KEYS = ("name", "memory", "bandwidth", "link_latency", "link_bandwidth", "price_per_hour", "count")
_MOST_NODES = 64


def read_nodes(path: Path) -> tuple[Machine, ...]:
    """The machines that the file names, in order.

    Raises:
        ConfigError: It isn't there, isn't such a file, or names none.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "") or str(error)
        raise ConfigError(f"{path} can't be read: {reason}", "Name a TOML file with a [[node]] table a node.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}", "Mend it.") from None
    tables = document.pop("node", None)
    if document or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        what = f"has '{next(iter(document))}'" if document else "has no [[node]] tables"
        raise ConfigError(f"{path} {what}", "Write a [[node]] table for each node, and nothing else.")
    machines: list[Machine] = []
    for index, table in enumerate(tables):
        machines.extend(_machines(table, index, path))
    if not 1 <= len(machines) <= _MOST_NODES:
        raise ConfigError(f"{path} names {len(machines)} nodes", f"Name 1 to {_MOST_NODES}.")
    return tuple(machines)


def _machines(table: dict[str, object], index: int, path: Path) -> list[Machine]:
    where = f"{path}, node {index + 1}"
    for key in table:
        if key not in _KEYS:
            near = get_close_matches(key, _KEYS, n=1)
            raise ConfigError(
                f"{where}: there is no '{key}'", f"Did you mean {near[0]}?" if near else f"Known: {', '.join(_KEYS)}"
            )
    for key in ("memory", "bandwidth"):
        if key not in table:
            raise ConfigError(f"{where}: its {key} is missing", 'Such as memory = "24GB", bandwidth = "936GB/s".')
    count, price = table.get("count", 1), table.get("price_per_hour", 0.0)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST_NODES:
        raise ConfigError(f"{where}: its count is {count!r}", f"Give a number from 1 to {_MOST_NODES}.")
    if not isinstance(price, int | float) or isinstance(price, bool) or not 0 <= price < 1e6:
        raise ConfigError(f"{where}: its price_per_hour is {price!r}", "Give dollars as a number.")
    name = str(table.get("name", f"node-{index}"))
    try:
        machine = Machine(
            name=name,
            memory_bytes=parse_bytes(str(table["memory"])),
            bandwidth=parse_rate(str(table["bandwidth"])),
            link_seconds=parse_seconds(str(table["link_latency"])) if "link_latency" in table else 0.0,
            link_bandwidth=parse_rate(str(table["link_bandwidth"])) if "link_bandwidth" in table else 0.0,
            dollars_per_hour=float(price),
        )
    except ConfigError:
        raise
    except UsageError as error:
        raise ConfigError(f"{where}: {error.message}", error.hint) from None
    if count == 1:
        return [machine]
    return [
        Machine(
            f"{name}-{number}",
            machine.memory_bytes,
            machine.bandwidth,
            machine.link_seconds,
            machine.link_bandwidth,
            machine.dollars_per_hour,
        )
        for number in range(count)
    ]
