"""A rented machine as Vast.ai shows it, where SSH and the worker are reached on it, and what its state means. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from myelin_provider_vastai.labels import Label, read_label

DEAD_STATES = frozenset({"exited", "unknown", "offline"})
"""States from which a machine never comes to run."""
HELD_STATES = frozenset({"stopped", "frozen"})
"""It doesn't run, and is billed: it was outbid, or stopped from outside."""
FATAL_TEXTS = (
    "oci runtime create failed",
    "failed to create",
    "no such image",
    "manifest unknown",
    "pull access denied",
)
"""What ``status_msg`` says of a machine that stays as it is for ever."""
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Instance:
    """A rented machine. Any field but the id may be missing in an answer.

    Attributes:
        id: Vast.ai's number for it.
        label: What our label says, or None where it isn't ours.
        status: ``actual_status``; empty is not known yet.
        message: ``status_msg``.
        machine: The machine's number; 0 is unknown.
        price: Dollars an hour.
        address: The public address; empty where there is none.
        ports: The outside port of each inside one: ``{"22/tcp": 40022}``.
        proxy: Address and port of Vast.ai's own SSH proxy; None where there is none.
    """

    id: int
    label: Label | None = None
    status: str = ""
    message: str = ""
    machine: int = 0
    price: float = 0.0
    address: str = ""
    ports: Mapping[str, int] = field(default_factory=dict)
    proxy: tuple[str, int] | None = None


def read_instance(document: Mapping[str, Any]) -> Instance | None:
    """A machine of an answer; None where it has no number."""
    number = document.get("id")
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    return Instance(
        id=number,
        label=read_label(document.get("label") if isinstance(document.get("label"), str) else None),
        status=_text(document, "actual_status"),
        message=_text(document, "status_msg"),
        machine=_whole(document.get("machine_id")),
        price=_price(document.get("dph_total")),
        address=_text(document, "public_ipaddr"),
        ports=_ports(document.get("ports")),
        proxy=_proxy(document),
    )


def ssh_addresses(instance: Instance) -> tuple[tuple[str, int], ...]:
    """Where SSH may answer, in order: the machine itself, then the proxy.

    Each host goes with its own port: the proxy doesn't forward the direct one, and the other way round.
    """
    direct = mapped_address(instance, 22)
    return tuple(address for address in (direct, instance.proxy) if address is not None)


def mapped_address(instance: Instance, port: int) -> tuple[str, int] | None:
    """Where an inside port is reached from the outside; None where it isn't."""
    outside = instance.ports.get(f"{port}/tcp")
    return (instance.address, outside) if instance.address and outside else None


class Stand(Enum):
    """How a machine stands on its way to a node."""

    WAIT = "wait"
    RUNS = "runs"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How it stands, and why, for people."""

    stand: Stand
    reason: str


def judge(instance: Instance | None, *, elapsed_s: float, timeout_s: float, was_seen: bool) -> Verdict:
    """What to make of a machine that is wanted.

    Args:
        instance: As the last listing that could be read has it; None where it isn't in there.
        elapsed_s: Since it was rented.
        timeout_s: Within which it must run.
        was_seen: A listing has had it before, so that its absence means its end. A listing may lag behind a rent.
    """
    if instance is None:
        if was_seen:
            return Verdict(Stand.FAILED, "it vanished from the account")
        if elapsed_s > timeout_s:
            return Verdict(Stand.FAILED, f"it was not listed within {timeout_s:g} s of being rented")
        return Verdict(Stand.WAIT, "not listed yet")
    said = f": {instance.message[:_SHOWN_CHARACTERS]}" if instance.message else ""
    if instance.status in DEAD_STATES:
        return Verdict(Stand.FAILED, f"its machine is {instance.status}{said}")
    if instance.status in HELD_STATES:
        return Verdict(Stand.FAILED, f"it is {instance.status} and billed (outbid, or stopped from outside){said}")
    if instance.status != "running" and any(text in instance.message.lower() for text in FATAL_TEXTS):
        return Verdict(Stand.FAILED, f"its container can't start{said}")
    if instance.status == "running":
        return Verdict(Stand.RUNS, "its machine runs")
    state = instance.status or "not started"
    if elapsed_s > timeout_s:
        return Verdict(Stand.FAILED, f"it is still {state} after {timeout_s:g} s{said}")
    return Verdict(Stand.WAIT, f"its machine is {state}")


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    return " ".join(value.split()) if isinstance(value, str) else ""


def _whole(value: object) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _price(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def _ports(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping):
        return {}
    found: dict[str, int] = {}
    for inside, outside in value.items():
        first = outside[0] if isinstance(outside, list) and outside else None
        port = _whole(first.get("HostPort")) if isinstance(first, Mapping) else 0
        if 0 < port < 65536:
            found[str(inside)] = port
    return found


def _proxy(document: Mapping[str, Any]) -> tuple[str, int] | None:
    host, port = _text(document, "ssh_host"), _whole(document.get("ssh_port"))
    return (host, port) if host and 0 < port < 65536 else None
