"""Why a stage has ended, in words. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

_SHOWN_CHARACTERS = 300
PREEMPTED = 3
"""``AUTOSCALER_DRAIN_PREEMPTED`` of Ray's ``NodeDeathInfo.Reason`` (``common.proto``)."""


def exit_reason(status: int, last_error: str = "", *, memory_kills: int = 0) -> str:
    """Why a worker process has ended.

    Args:
        status: As ``subprocess`` gives it: the exit status, or the negative number of the signal that ended it.
        last_error: The last line on its standard error.
        memory_kills: How often the kernel of its machine has killed for memory while it ran.
    """
    if status == 0:
        return "ended by itself (status 0)"
    if status > 0:
        shown = last_error.strip()[:_SHOWN_CHARACTERS]
        return f"exited with status {status}: {shown}" if shown else f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    if name == "SIGKILL":
        if memory_kills > 0:
            return "was killed for memory (OOM): its machine ran out of it"
        return "was killed (SIGKILL): by hand, or by its machine for want of memory (OOM)"
    if name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT", "SIGFPE"):
        return f"crashed ({name})"
    return f"was ended by {name}"


def node_death(address: str, reason: int, message: str) -> str:
    """Why a stage whose cluster node is dead has ended.

    Args:
        address: The node's.
        reason: The number of Ray's ``NodeDeathInfo.Reason``.
        message: Ray's own words.
    """
    if reason == PREEMPTED:
        return f"node {address} was pre-empted" + _in_brackets(message)
    return f"the raylet of node {address} died" + _in_brackets(message)


def draining(address: str, seconds_left: float) -> str:
    """Why a stage on a node that is being taken away counts as ended. ``seconds_left`` is 0 where nobody knows."""
    when = f", within {seconds_left:.0f} s" if seconds_left > 0 else ""
    return f"node {address} is being pre-empted{when}"


def actor_death(cause: Mapping[str, Any]) -> str:
    """Why an actor has died.

    Args:
        cause: What the bridge knows: ``kind`` (the name of the context in Ray's ``ActorDeathCause``), ``reason``
            (that of ``ActorDiedErrorContext``), ``text`` (Ray's own words), ``node_reason`` and ``node_text`` (of
            ``NodeDeathInfo``), ``address``.
    """
    kind, reason, text = (str(cause.get(name) or "") for name in ("kind", "reason", "text"))
    if kind == "oom_context" or "memory monitor" in text or reason == "OUT_OF_MEMORY":
        return "its actor was killed for memory (OOM)" + _in_brackets(text)
    if reason == "NODE_DIED":
        return node_death(str(cause.get("address") or "?"), int(cause.get("node_reason") or 0), cause["node_text"])
    if kind == "runtime_env_failed_context":
        return "its runtime environment could not be set up" + _in_brackets(text)
    if kind == "actor_unschedulable_context":
        return "its actor can't be placed" + _in_brackets(text)
    if kind == "creation_task_failure_context":
        return "its actor could not be made" + _in_brackets(text)
    if reason == "RAY_KILL":
        return "its actor was killed by ray.kill"
    return "its actor died" + _in_brackets(text)


def one_line(text: str) -> str:
    """The first sentence or so of one of Ray's messages, on one line."""
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN_CHARACTERS else words[: _SHOWN_CHARACTERS - 1] + "…"


def _in_brackets(text: str) -> str:
    return f" ({one_line(text).rstrip('.')})" if text.strip() else ""
