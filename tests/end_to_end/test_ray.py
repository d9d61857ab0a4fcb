"""`myelin` over a real Ray cluster of three nodes on this machine, which share its address and its cores."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest
from end_to_end_support import SMOLLM2
from ray_cluster_support import ThreeNodes, short_folder

QUESTION = "Explain in one sentence what a neuron does."
WORDS = ("prompt", "-N", "3", "--model", SMOLLM2, "--threads", "1", "--max-tokens", "12", "--max-context", "512")
ROOMY, SMALL = 2_000_000_000, 435_000_000


@pytest.fixture(autouse=True, scope="module")
def _short() -> Iterator[None]:
    with short_folder():
        yield


def on(cluster: ThreeNodes, *more: str) -> list[str]:
    address = f"ray.address={cluster.address}"
    return [*WORDS, "--provider", "ray", "--set", address, "--log-level", "debug", *more, "--json", QUESTION]


def clean(cluster: ThreeNodes) -> bool:
    """The cluster is as it was: no actor, no placement group, no worker."""
    return not (cluster.actors() or cluster.groups() or cluster.workers("--boot-stdin"))


def placed(log: str) -> dict[str, str]:
    """The cluster node of each stage, by what is told of launches."""
    return dict(re.findall(r"(stage-\d) is placed on ([0-9a-f]{56})", log))


@pytest.mark.slow
def test_three_stages_on_three_nodes_say_what_local_processes_say(myelin):
    local = myelin.run(*WORDS, "--json", QUESTION)
    assert local.code == 0, local.err
    cluster = ThreeNodes(memories=(ROOMY,) * 3, cpus=1)
    try:
        done = myelin.run(*on(cluster))
        assert done.code == 0, done.err
        document = done.json()
        assert document["tokens"] == local.json()["tokens"]
        assert [stage["provider"] for stage in document["stages"]] == ["ray"] * 3
        assert len(set(placed(done.err).values())) == 3, "one stage on each node"
        assert clean(cluster)
    finally:
        cluster.close()


@pytest.mark.slow
def test_a_small_node_gets_less_one_too_small_nothing_and_what_never_fits_is_explained(myelin):
    cluster = ThreeNodes(memories=(ROOMY, SMALL, ROOMY), cpus=2)
    try:
        small = cluster.nodes[1].node_id
        less = myelin.run(*on(cluster))
        assert less.code == 0, less.err
        (stage,) = [stage for stage, node in placed(less.err).items() if node == small]
        layers = {each["node"]: each["layers"][1] - each["layers"][0] for each in less.json()["stages"]}
        assert layers[stage] < min(count for node, count in layers.items() if node != stage)

        around = myelin.run(*on(cluster, "--set", f"ray.overhead_mb={SMALL // 10**6 - 1}"))
        assert around.code == 0, around.err
        nodes = Counter(placed(around.err).values())
        assert small not in nodes
        assert sorted(nodes.values()) == [1, 2]
        assert around.json()["tokens"] == less.json()["tokens"]

        never = myelin.run(*on(cluster, "--set", "ray.cpus=3"))
        assert never.code == 1
        assert "it takes a node with 3 CPUs" in never.err
        assert "of the cluster's 3 nodes" in never.err
        assert clean(cluster)
    finally:
        cluster.close()
