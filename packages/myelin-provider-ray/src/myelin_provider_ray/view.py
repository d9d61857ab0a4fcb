"""The cluster as it was at one moment: nodes, placement groups, actors. Made of what the bridge has read. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from myelin.plugin import LaunchKey, RunId
from myelin_provider_ray.names import read_name

_TYPE_LABEL = "ray.io/accelerator-type"
_TYPE_RESOURCE = "accelerator_type:"


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of the cluster: a machine or a container with a raylet.

    Attributes:
        id: Ray's, in hexadecimal.
        address, host: Its IP address in the cluster, and its host name.
        alive: Ray believes that it lives.
        answers: Whether its raylet's port took a connection just now; None where that wasn't tried. Ray itself takes
            about 15 s to notice a raylet that was killed.
        total, free: Resources by Ray's names: ``CPU``, ``GPU``, ``memory`` (bytes), and others.
        labels: Of the node.
        death_reason, death_text: Of one that is dead.
        drained_in_s: Seconds until it is taken away; 0 where nobody knows when; None where it isn't.
    """

    id: str
    address: str
    host: str = ""
    alive: bool = True
    answers: bool | None = None
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    death_reason: int = 0
    death_text: str = ""
    drained_in_s: float | None = None

    @property
    def gpu_type(self) -> str:
        """The type of its GPUs; empty where it has none, or doesn't tell."""
        told = self.labels.get(_TYPE_LABEL, "")
        return told or next(
            (name.removeprefix(_TYPE_RESOURCE) for name in self.total if name.startswith(_TYPE_RESOURCE)), ""
        )

    @property
    def usable(self) -> bool:
        """It can be given something to do."""
        return self.alive and self.answers is not False and self.drained_in_s is None


@dataclass(frozen=True, slots=True)
class Group:
    """One of our placement groups.

    Attributes:
        id: Ray's, in hexadecimal.
        key: The launch that it was made for.
        state: ``PENDING``, ``PREPARED``, ``CREATED``, ``RESCHEDULING``.
        scheduling: ``INFEASIBLE``, ``NO_RESOURCES``, ``FINISHED`` and others.
        node: The id of the node that it was given a place on; empty where none was yet.
        bundle: What it reserves.
    """

    id: str
    key: LaunchKey
    state: str
    scheduling: str
    node: str
    bundle: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All that matters of the cluster.

    Attributes:
        nodes: Dead ones too, as long as Ray remembers them.
        groups: Ours, of every run.
        actors: Names of the actors that live, or wait for their place.
        strays: Launches of which there is an actor that has no placement group (any more).
        autoscaling: Whether it can add nodes.
    """

    nodes: tuple[ClusterNode, ...]
    groups: tuple[Group, ...] = ()
    actors: frozenset[str] = frozenset()
    strays: frozenset[LaunchKey] = frozenset()
    autoscaling: bool = False

    def node(self, id: str) -> ClusterNode | None:
        """The node of that id."""
        return next((node for node in self.nodes if node.id == id), None)

    def of_run(self, run: RunId) -> tuple[Group, ...]:
        """The placement groups of one run."""
        return tuple(group for group in self.groups if group.key.run == run)


def read_view(answer: Mapping[str, Any], autoscaling: bool | None = None) -> ClusterView:
    """The view in a bridge's answer.

    Args:
        answer: See :func:`myelin_provider_ray.bridge.snapshot`.
        autoscaling: What the configuration says of it; None leaves it to the cluster.
    """
    draining: Mapping[str, float] = answer["draining"]
    groups = tuple(group for entry in answer["groups"] if (group := _group(entry)) is not None)
    nodes = tuple(
        ClusterNode(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            host=node.get("NodeManagerHostname", ""),
            alive=bool(node["Alive"]),
            answers=answer["answering"].get(node["NodeID"]),
            total=node.get("Resources", {}),
            free=_free(node.get("Resources", {}), answer["free"].get(node["NodeID"], {}), groups, node["NodeID"]),
            labels=node.get("Labels", {}),
            death_reason=int(node.get("DeathReason", 0)),
            death_text=node.get("DeathReasonMessage", ""),
            drained_in_s=draining.get(node["NodeID"]),
        )
        for node in answer["nodes"]
    )
    actors = frozenset(answer["actors"])
    # Those that were there before the groups were read: of one that is just being made, the group may have come later.
    named = [read_name(name) for name in actors.intersection(answer["actors_before"])]
    strays = frozenset(key for key in named if key) - {group.key for group in groups}
    grows = bool(answer["autoscaling"]) if autoscaling is None else autoscaling
    return ClusterView(nodes, groups, actors, strays, grows)


def _free(
    total: Mapping[str, float], told: Mapping[str, float], groups: Sequence[Group], node: str
) -> dict[str, float]:
    """What is free of a node: what Ray says, which lags a moment behind, or less where our own groups have more."""
    ours = [group.bundle for group in groups if group.node == node]
    return {
        name: min(told.get(name, 0.0), amount - sum(bundle.get(name, 0.0) for bundle in ours))
        for name, amount in total.items()
    }


def autoscales(report: Mapping[str, Any]) -> bool:
    """Whether the autoscaler that wrote a report can add nodes.

    Every cluster has one; that of a cluster which was started by hand only watches, and calls each node a type of its
    own, ``node_<id>``.
    """
    types: Mapping[str, str] = report.get("node_type_mapping") or {}
    return any(name != f"node_{key}" for key, name in types.items())


def _group(entry: Mapping[str, Any]) -> Group | None:
    key = read_name(str(entry.get("name", "")))
    if key is None or entry["state"] == "REMOVED":
        return None
    nodes: Sequence[str] = list(entry["bundles_to_node_id"].values())
    bundles: Sequence[Mapping[str, float]] = list(entry["bundles"].values())
    scheduling = str(entry.get("stats", {}).get("scheduling_state", ""))
    return Group(entry["placement_group_id"], key, entry["state"], scheduling, nodes[0] if nodes else "", bundles[0])
