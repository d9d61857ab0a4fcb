"""What a container's own account of itself comes to: its lease, where it is reached, and why it ended. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from myelin.plugin import Endpoint, Lease, LeaseId, LeaseState
from myelin_provider_docker.labels import OFFER, key_of

NODE_PORT = 19700
"""Where a node listens inside its container, which has a network of its own."""

ID_CHARACTERS = 12
_SHOWN_CHARACTERS = 300
_OVER = ("exited", "dead", "removing")
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT", "SIGFPE")


def lease_id(container: str) -> LeaseId:
    """The lease's name: the container's id as ``docker ps`` shows it."""
    return LeaseId(container[:ID_CHARACTERS])


def is_over(summary: Mapping[str, Any]) -> bool:
    """Whether a listed container has ended."""
    return summary.get("State") in _OVER


def lease_of(summary: Mapping[str, Any], endpoint: Endpoint | None, exit_reason: str) -> Lease | None:
    """The lease of a listed container; None where it isn't one of ours.

    Args:
        summary: One item of ``GET /containers/json``.
        endpoint: Where it is reached, once it has announced itself.
        exit_reason: Why it ended, where it has.
    """
    key = key_of(summary.get("Labels"))
    if key is None:
        return None
    offer = str(summary["Labels"].get(OFFER, ""))
    if is_over(summary):
        return Lease(lease_id(summary["Id"]), key, LeaseState.EXITED, offer, exit_reason=exit_reason)
    state = LeaseState.STARTING if endpoint is None else LeaseState.RUNNING
    return Lease(lease_id(summary["Id"]), key, state, offer, endpoint)


def endpoint_of(
    summary: Mapping[str, Any], announced: Endpoint, *, daemon_host: str, inside_first: bool
) -> Endpoint | None:
    """The addresses at which a running container is reached, in the order in which to try them.

    Args:
        summary: One item of ``GET /containers/json``.
        announced: What the worker announced; it knows its own side of the network alone.
        daemon_host: Where the daemon's machine is reached from here.
        inside_first: Whether container networks are reachable from here; neighbours can always use them.
    """
    networks = (summary.get("NetworkSettings") or {}).get("Networks") or {}
    if "host" in networks:
        return announced
    inside = [f"{network['IPAddress']}:{NODE_PORT}" for network in networks.values() if network.get("IPAddress")]
    outside = [
        f"{_reached_at(str(port.get('IP', '')), daemon_host)}:{port['PublicPort']}"
        for port in summary.get("Ports") or ()
        if port.get("PrivatePort") == NODE_PORT and port.get("PublicPort") and ":" not in str(port.get("IP", ""))
    ]
    ordered = [*inside, *outside] if inside_first else [*outside, *inside]
    return Endpoint(tuple(dict.fromkeys(ordered))) if ordered else None


def _reached_at(published: str, daemon_host: str) -> str:
    """The address for a port that is published on ``published``: on all addresses, or on the daemon's loopback, it is
    the daemon's own."""
    return daemon_host if published in ("", "0.0.0.0") or published.startswith("127.") else published


def exit_reason(state: Mapping[str, Any], memory_limit: int, last_error: str) -> str:
    """Why a container ended, one line for people.

    Args:
        state: ``State`` of ``GET /containers/ID/json``.
        memory_limit: Bytes that it was allowed; 0 is no limit.
        last_error: The last line on its standard error; shown where it ended by itself with an error.
    """
    code, said = int(state.get("ExitCode") or 0), " ".join(str(state.get("Error") or "").split())
    if state.get("OOMKilled"):
        limit = f"its limit of {memory_limit / (1 << 20):g} MiB" if memory_limit else "that of the machine"
        return f"was killed because it ran out of memory ({limit})"
    if state.get("Status") == "removing":
        return "is being removed"
    if said:
        return f"could not be run: {said[:_SHOWN_CHARACTERS]}"
    if code == 0:
        return "ended by itself (status 0)"
    if code > 128 and (name := _signal_name(code - 128)):
        if name == "SIGKILL":
            return "was killed (SIGKILL): by hand, or by its machine for want of memory"
        return f"crashed ({name})" if name in _CRASHES else f"was ended by {name}"
    shown = last_error.strip()[:_SHOWN_CHARACTERS]
    return f"exited with status {code}: {shown}" if shown else f"exited with status {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def last_told(lines: Sequence[str]) -> str:
    """The last of ``lines`` that isn't blank, or an empty text."""
    return next((line for line in reversed(lines) if line.strip()), "")
