"""What to tell of a node that ended by itself. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from myelin.cluster.provider import Lease, LeaseState
from myelin.errors import NodeError

_FAULT_HANDLER = re.compile(r'Extension modules: |(Current t|T)hread 0x|File "|<no Python frame>|\.\.\.')


def exit_error(lease: Lease, last_lines: Sequence[str], doing: str) -> NodeError:
    """The error for a node that ended by itself.

    Args:
        lease: Exited; its reason is shown.
        last_lines: What the node itself wrote at last; the last one that tells something is shown, all are attached as
            a note.
        doing: What it was doing: ``while it started``.
    """
    assert lease.state is LeaseState.EXITED
    written = [line.strip() for line in last_lines if line.strip()]
    reason = lease.exit_reason or "no reason given"
    telling = [text for line in written if (text := telling_text(line))]
    said = f"; its last words: {telling[-1]}" if telling and telling[-1] not in reason else ""
    error = NodeError(
        f"{lease.key.node} ended {doing} ({reason}){said}",
        "see all that it wrote with --log-level debug",
        reason="node-exited",
    )
    if written:
        error.add_note(f"the last lines of {lease.key.node}:\n" + "\n".join(written))
    return error


def telling_text(line: str) -> str:
    """What a line of a node's output may tell of its end: all of it, the text of a structured line, or nothing. Pure.

    A structured line (JSON with a ``level``) below an error is about the node's work, or about what others did to it.
    Of what Python's fault handler writes, only the first line tells anything to most people.
    """
    if not line.startswith("{"):
        return "" if _FAULT_HANDLER.match(line) else line
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(entry, dict) or "level" not in entry:
        return line
    if entry["level"] in ("debug", "info", "warning"):
        return ""
    return ": ".join(str(entry[key]) for key in ("event", "message") if key in entry)
