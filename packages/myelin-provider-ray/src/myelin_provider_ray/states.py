"""What became of a launch, from what is known of its place, its actor and its worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from myelin.plugin import Endpoint, LeaseState
from myelin_provider_ray.endings import actor_death, draining, exit_reason, node_death
from myelin_provider_ray.placement import amounts
from myelin_provider_ray.view import ClusterNode, ClusterView, Group

_WAITING = frozenset({"PENDING", "PREPARED"})


@dataclass(frozen=True, slots=True)
class Stand:
    """How a launch stands.

    Attributes:
        state: See :class:`~myelin.plugin.LeaseState`.
        reason: Of an end.
        detail: What a stage that isn't running yet waits for.
        endpoint: Where it listens.
    """

    state: LeaseState
    reason: str = ""
    detail: str = ""
    endpoint: Endpoint | None = None


def ended(reason: str) -> Stand:
    """It has ended."""
    return Stand(LeaseState.EXITED, reason=reason)


def before_looking(
    group: Group, view: ClusterView, *, has_actor: bool, waited_s: float, patience_s: float, pinned: str
) -> Stand | None:
    """What can be told without asking the actor; None where it must be asked.

    Args:
        group: Its place.
        view: The cluster.
        has_actor: An actor of its name lives, waits for its place, or is just being made.
        waited_s: How long it has waited for its place.
        patience_s: How long it may.
        pinned: The node that it was to be placed on; empty where that was left to the cluster, or isn't known.
    """
    node = view.node(group.node or pinned)
    if node is not None and (why := lost_node(node)):
        return ended(why)
    if group.state == "RESCHEDULING":
        return ended("the raylet of its node died")
    if not has_actor:
        return None  # an obituary says why
    if group.state in _WAITING:
        wanted = amounts(group.bundle)
        if waited_s > patience_s:
            return ended(f"it was given no place within {patience_s:g} s: it waited for {wanted}")
        if group.scheduling == "INFEASIBLE" and not view.autoscaling:
            return ended(f"no node of the cluster has {wanted}, and the cluster adds none")
        who = "the autoscaler to add a node" if view.autoscaling and not pinned else "a node to have room"
        return Stand(LeaseState.STARTING, detail=f"waits for {who} with {wanted}")
    return None


def lost_node(node: ClusterNode) -> str:
    """Why a stage on ``node`` is lost; empty where it isn't."""
    if not node.alive:
        return node_death(node.address, node.death_reason, node.death_text)
    if node.answers is False:
        return node_death(node.address, 0, "nobody listens on its port")
    if node.drained_in_s is not None:
        return draining(node.address, node.drained_in_s)
    return ""


def after_looking(answer: Mapping[str, Any], before: Stand | None) -> Stand | None:
    """What the actor's answer tells.

    Args:
        answer: Of :func:`myelin_provider_ray.bridge.look`.
        before: What was known when it last answered.

    Returns:
        None where it is dead, and an obituary must say why.
    """
    worker = answer.get("worker")
    if worker is None:
        if "silent" in answer:  # unknown, which is neither an end nor a beginning
            return before or Stand(LeaseState.STARTING, detail="its actor starts")
        return None
    endpoint = Endpoint(tuple(worker["endpoint"])) if worker["endpoint"] else None
    if worker["ended"]:
        if worker["failure"]:
            return ended(f"its worker could not be started: {worker['failure']}")
        return ended(exit_reason(worker["status"] or 0, worker["last"], memory_kills=worker["kills"]))
    state = LeaseState.RUNNING if endpoint else LeaseState.STARTING
    waits = "" if endpoint else "its worker starts" if worker["booted"] else "its actor has not been told what to start"
    return Stand(state, endpoint=endpoint, detail=waits)


def unbooted(answer: Mapping[str, Any]) -> bool:
    """Whether an actor's answer (see :func:`after_looking`) tells that no boot line has come."""
    worker = answer.get("worker")
    return worker is not None and not worker["booted"]


def after_death(obituary: Mapping[str, Any] | None, heard: str = "") -> Stand:
    """What an actor that is gone died of.

    Args:
        obituary: Of :func:`myelin_provider_ray.bridge.obituaries`; None where Ray has none.
        heard: What a call to it was answered.
    """
    if obituary is not None:
        return ended(actor_death(obituary))
    if heard:
        return ended(actor_death({"text": heard}))
    return ended("its actor is gone")
