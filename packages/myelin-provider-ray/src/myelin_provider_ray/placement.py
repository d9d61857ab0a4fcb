"""Where a stage can go: what it reserves, which nodes have that, which is best, and what is lacking. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from myelin.plugin import Need, Offer
from myelin_provider_ray.gpus import GPUS
from myelin_provider_ray.section import RaySection, Strategy
from myelin_provider_ray.view import ClusterNode, ClusterView, Group

HOST_ENGINES = frozenset({"cpu", "reference"})
"""Engines that compute in the host's memory; all others need a GPU."""
AUTOSCALER = "autoscaler"
"""The id of the offer that is a node which the cluster has yet to add."""
NODE_LABEL = "ray.io/node-id"
_EPSILON = 1e-6


def reserved(need: Need, section: RaySection) -> dict[str, float]:
    """What a stage reserves: Ray's resources, memory in bytes."""
    on_host = need.engine in HOST_ENGINES
    stage = need.memory_bytes if on_host else 0
    memory = section.memory_mb * 10**6 or stage + section.overhead_mb * 10**6
    gpus = section.gpus if section.gpus is not None else (0.0 if on_host else 1.0)
    bundle = {"CPU": section.cpus, "GPU": gpus, "memory": float(memory)}
    return {name: amount for name, amount in bundle.items() if amount > 0}


def fits(node: ClusterNode, bundle: Mapping[str, float], taken: Mapping[str, float] = {}) -> bool:
    """Whether a node has that free, beside what is ``taken`` of it but not yet shown to be."""
    return all(
        node.free.get(name, 0.0) - taken.get(name, 0.0) >= amount - _EPSILON * max(1.0, amount)
        for name, amount in bundle.items()
    )


def stage_memory(node: ClusterNode, need: Need, section: RaySection) -> int:
    """Bytes that a stage may use on a node; 0 is unknown."""
    if need.engine in HOST_ENGINES:
        if section.memory_mb:
            return max(1, (section.memory_mb - section.overhead_mb) * 10**6)
        return max(1, int(node.free.get("memory", 0.0)) - section.overhead_mb * 10**6)
    gpu = GPUS.get(node.gpu_type)
    count = section.gpus if section.gpus is not None else 1.0
    return int(gpu.memory_bytes * count) if gpu else 0


def bandwidth(node: ClusterNode, need: Need) -> float:
    """Bytes per second of the memory that a stage computes from; 0 is unknown."""
    gpu = None if need.engine in HOST_ENGINES else GPUS.get(node.gpu_type)
    return gpu.bandwidth if gpu else 0.0


def room(node: ClusterNode, bundle: Mapping[str, float], strategy: Strategy) -> int:
    """How many stages can share a node, as far as processors go; memory is the planner's to divide."""
    if strategy is Strategy.STRICT_SPREAD:
        return 1
    counts = [node.free.get(name, 0.0) / amount for name, amount in bundle.items() if name != "memory"]
    return max(1, int(min(counts, default=1.0) + _EPSILON))


def offers(
    view: ClusterView,
    need: Need,
    section: RaySection,
    groups: Sequence[Group] = (),
    claims: Mapping[str, Sequence[Mapping[str, float]]] = {},
) -> tuple[Offer, ...]:
    """What could be started for ``need``, best first.

    Args:
        view: The cluster.
        need: What the stage needs.
        section: The configuration.
        groups: The run's placement groups.
        claims: What has been promised to other stages of the run and isn't in the view yet, by node.
    """
    bundle = reserved(need, section)
    here = Counter(group.node for group in groups if group.node and group.key.node != need.node)
    here.update({node: len(promised) for node, promised in claims.items()})
    nodes = [
        node
        for node in view.nodes
        if node.usable
        and node.id not in need.exclude
        and _labelled(node, section.labels)
        and not (section.strategy is Strategy.STRICT_SPREAD and here[node.id])
        and fits(node, bundle, _sum(claims.get(node.id, ())))
        and _roomy(node, need, section)
    ]
    sign = -1 if section.strategy is Strategy.PACK else 1
    nodes.sort(key=lambda node: (sign * here[node.id], -node.free.get("memory", 0.0), -node.free.get("CPU", 0.0)))
    found = [_offer(node, need, section, bundle) for node in nodes]
    if view.autoscaling and AUTOSCALER not in need.exclude:
        found.append(Offer(AUTOSCALER, "ray", f"a node with {amounts(bundle)} that the cluster may add"))
    return tuple(found)


def as_if_released(view: ClusterView, groups: Sequence[Group]) -> ClusterView:
    """The view with what these groups hold counted as free: a run that is planned anew has its own places already."""
    nodes = []
    for node in view.nodes:
        held = _sum([group.bundle for group in groups if group.node == node.id])
        free = {name: min(node.total.get(name, 0.0), free + held.get(name, 0.0)) for name, free in node.free.items()}
        nodes.append(replace(node, free=free))
    return replace(view, nodes=tuple(nodes))


def selector(offer: str, section: RaySection) -> dict[str, str]:
    """The labels that the place of a stage must have."""
    return dict(section.labels) if offer == AUTOSCALER else {**section.labels, NODE_LABEL: offer}


def lacking(view: ClusterView, need: Need, section: RaySection, stages: int) -> str:
    """What a cluster that has no offer would need, and what it has."""
    bundle = reserved(need, section)
    where = "".join(f" labelled {name}={value}" for name, value in section.labels.items())
    nodes = "nodes" if stages != 1 else "node"
    many = f"{stages} {nodes}" if section.strategy is Strategy.STRICT_SPREAD else "a node"
    wanted = f"it takes {many} with {amounts(bundle)} free{where}"
    alive = [node for node in view.nodes if node.alive]
    if not alive:
        return f"{wanted}; the cluster has no node"
    have = "; ".join(f"{node.address} has {amounts(node.free, bundle)}" for node in alive[:8])
    more = f"; and {len(alive) - 8} more" if len(alive) > 8 else ""
    return f"{wanted}; of the cluster's {len(alive)} node{'s' if len(alive) != 1 else ''}, {have}{more}"


def amounts(resources: Mapping[str, float], like: Mapping[str, float] | None = None) -> str:
    """Resources for people: ``2 CPUs and 1.5 GB``; those of ``like`` alone where it is given."""
    parts = []
    for name in sorted(like or resources, key=lambda name: (name == "memory", name)):
        amount = resources.get(name, 0.0)
        if name == "memory":
            parts.append(f"{amount / 1e9:.1f} GB" if amount >= 1e9 else f"{math.ceil(amount / 1e6)} MB")
        else:
            parts.append(f"{amount:g} {name}{'s' if amount != 1 else ''}")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _offer(node: ClusterNode, need: Need, section: RaySection, bundle: Mapping[str, float]) -> Offer:
    shown = {name: value for name, value in node.labels.items() if not name.startswith("ray.io/")}
    kind = f", {node.gpu_type}" if node.gpu_type and "GPU" in bundle else ""
    labels = "".join(f", {name}={value}" for name, value in sorted(shown.items()))
    return Offer(
        id=node.id,
        provider="ray",
        description=f"node {node.address}{kind}: {amounts(node.free, bundle)} free{labels}",
        memory_bytes=stage_memory(node, need, section),
        bandwidth=bandwidth(node, need),
        room=room(node, bundle, section.strategy),
        shared=need.engine in HOST_ENGINES,  # each stage has GPUs of its own
        details={"host": node.host, **shown},
    )


def _roomy(node: ClusterNode, need: Need, section: RaySection) -> bool:
    memory = stage_memory(node, need, section)
    return not memory or need.memory_bytes <= memory


def _labelled(node: ClusterNode, labels: Mapping[str, str]) -> bool:
    return all(node.labels.get(name) == value for name, value in labels.items())


def _sum(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in {n for bundle in bundles for n in bundle}
    }
