"""`myelin` over a real Ray cluster of three nodes on this machine, which share its address and its cores."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from end_to_end_support import SMOLLM2, ask, wait_for_rpc
from ray_cluster_support import ThreeNodes, short_folder

QUESTION = "Explain in one sentence what a neuron does."
WORDS = ("-N", "3", "--model", SMOLLM2, "--threads", "1", "--max-context", "512")
ROOMY, SMALL = 2_000_000_000, 435_000_000


@pytest.fixture(autouse=True, scope="module")
def _short() -> Iterator[None]:
    with short_folder():
        yield


def on(cluster: ThreeNodes, *more: str) -> list[str]:
    return ["prompt", *WORDS, "--max-tokens", "12", *place(cluster), *more, "--json", QUESTION]


def place(cluster: ThreeNodes) -> list[str]:
    return ["--provider", "ray", "--set", f"ray.address={cluster.address}", "--log-level", "debug"]


def clean(cluster: ThreeNodes) -> bool:
    """The cluster is as it was: no actor, no placement group, no worker."""
    return not (cluster.actors() or cluster.groups() or cluster.workers("--boot-stdin"))


def placed(log: str) -> dict[str, str]:
    """The cluster node of each stage, by what is told of launches."""
    return dict(re.findall(r"(stage-\d) is placed on ([0-9a-f]{56})", log))


@pytest.mark.slow
def test_three_stages_on_three_nodes_say_what_local_processes_say(myelin):
    local = myelin.run("prompt", *WORDS, "--max-tokens", "12", "--json", QUESTION)
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


@pytest.mark.slow
def test_a_raylet_that_is_killed_costs_a_pause_and_the_stage_comes_back_on_another_node(myelin):
    cluster = ThreeNodes(memories=(ROOMY,) * 3, cpus=2)
    try:
        rpc = ["--rpc-bind", "127.0.0.1:0"]
        serving = myelin.start("serve", *WORDS, *place(cluster), *rpc)
        address = wait_for_rpc(serving)
        before = ask(address, QUESTION, 12)
        places = cluster.places()
        assert len(set(places.values())) == 3
        # Any stage will do, but for one on the node of the cluster's own head.
        stage, lost = next((stage, node) for stage, node in places.items() if node != cluster.nodes[0].node_id)
        next(node for node in cluster.nodes if node.node_id == lost).kill_raylet()
        after = ask(address, QUESTION, 12)
        assert after["kind"] == before["kind"] == "Done"
        assert after["deltas"] == before["deltas"]
        moved = cluster.places()
        assert moved[stage] != lost
        assert {each: node for each, node in moved.items() if each != stage} == {
            each: node for each, node in places.items() if each != stage
        }, "the others stay where they are"
        serving.send_signal(signal.SIGINT)
        serving.wait(30)
        assert clean(cluster)
    finally:
        cluster.close()


@pytest.mark.slow
def test_when_the_orchestrator_is_killed_nothing_stays_on_the_cluster_for_long(myelin):
    cluster = ThreeNodes(memories=(ROOMY,) * 3, cpus=1)
    try:
        impatient = {"MYELIN_NODE_DEAD_MAN_S": "2"}
        serving = myelin.start(
            *("serve", *WORDS, *place(cluster), "--rpc-bind", "127.0.0.1:0", "--set", "ray.linger_s=2"), **impatient
        )
        wait_for_rpc(serving)
        assert len(cluster.places()) == 3
        serving.kill()
        deadline = time.monotonic() + 60
        while not clean(cluster) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert clean(cluster)
    finally:
        cluster.close()
