"""`myelin` with a model on a hub: only what is needed comes, kill -9 costs little, and the tokens are right."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end_support import SMOLLM2

from myelin_testkit.hub import FakeHub
from myelin_testkit.models import smollm2_path

MODEL = "hf:someone/model/SmolLM2-135M-Instruct.Q4_1.gguf"
WORDS = ("prompt", "-N", "2", "--max-tokens", "8", "--threads", "1", "--json", "Name three rivers.")


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("someone/model", "SmolLM2-135M-Instruct.Q4_1.gguf", smollm2_path().read_bytes())
        yield hub


def environment(hub: FakeHub, cache: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "MYELIN_MODEL_CACHE_DIR": str(cache),
        "HF_HUB_CACHE": str(cache / "none"),
        "HF_TOKEN": "",
    }


def test_two_stages_of_a_host_fetch_the_model_once_and_answer_alike(myelin, hub, tmp_path):
    local = myelin.run(*WORDS, "--model", SMOLLM2).json()
    before = hub.served
    trace = tmp_path / "trace.jsonl"
    done = myelin.run(*WORDS, "--model", MODEL, "--trace-file", str(trace), **environment(hub, tmp_path / "cache"))
    assert done.code == 0, done.err
    assert done.json()["tokens"] == local["tokens"]
    assert hub.served - before <= smollm2_path().stat().st_size
    spans = [
        span
        for line in trace.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    shards = [
        {one["key"]: one["value"] for one in span["attributes"]}
        for span in spans
        if any(one["key"] == "myelin.shard.fraction" for one in span.get("attributes", ()))
    ]
    assert len(shards) == 4  # planned by the orchestrator, fetched by the nodes
    assert all(0 < shard["myelin.shard.fraction"]["doubleValue"] < 0.9 for shard in shards)
    assert all(int(shard["myelin.shard.bytes"]["intValue"]) > 40_000_000 for shard in shards)
    key = "myelin.shard.network_bytes"
    network = [int(shard[key]["intValue"]) for shard in shards if key in shard]
    assert len(network) == 2
    assert 90_000_000 < sum(network) <= hub.served - before

    offline = myelin.run(*WORDS, "--model", MODEL, MYELIN_OFFLINE="1", **environment(hub, tmp_path / "cache"))
    assert offline.code == 0, offline.err
    assert offline.json()["tokens"] == local["tokens"]

    listed = myelin.run("cache", "list", "--json", **environment(hub, tmp_path / "cache")).json()
    assert [file["source"] for file in listed["files"]] == [f"{MODEL} at {hub.url}"]
    pruned = myelin.run("cache", "prune", "--json", **environment(hub, tmp_path / "cache")).json()
    assert pruned["freed_bytes"] == listed["held_bytes"] > 90_000_000
    nothing = myelin.run(*WORDS, "--model", MODEL, MYELIN_OFFLINE="1", **environment(hub, tmp_path / "cache"))
    assert nothing.code == 1
    assert "switched off" in nothing.err


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_runs_that_are_killed_while_they_fetch_leave_nothing_wrong_behind(myelin, hub, tmp_path, times):
    expected = myelin.run(*WORDS, "--model", SMOLLM2).json()["tokens"]
    chance = random.Random(times)
    hub.bytes_per_s = 4e6
    try:
        for _ in range(times):
            process = myelin.start(*WORDS, "--model", MODEL, **environment(hub, tmp_path / "cache"))
            myelin.wait_for_nodes(2)
            time.sleep(chance.uniform(0.2, 2.0))
            for running in [*myelin.alive()]:
                running.kill()
            process.wait()
            assert not myelin.wait_until_gone(15)
    finally:
        hub.bytes_per_s = 0.0
    done = myelin.run(*WORDS, "--model", MODEL, **environment(hub, tmp_path / "cache"))
    assert done.code == 0, done.err
    assert done.json()["tokens"] == expected


def test_the_doctor_and_the_planner_read_the_header_alone(myelin, hub, tmp_path):
    (tmp_path / "nodes.toml").write_text(
        '[[node]]\nname = "a"\nmemory = "2GB"\nbandwidth = "20GB/s"\nlink_latency = "1ms"\nprice_per_hour = 0.1\n'
        "count = 2\n"
    )
    for number, words in enumerate(
        (
            ("inspect", MODEL, "--memory", "2GB,1GB"),
            ("plan", "-N", "2", "--model", MODEL),
            ("plan", "--nodes", "nodes.toml", "--model", MODEL),
        )
    ):
        requests, served = len(hub.seen), hub.served
        done = myelin.run(*words, "--json", **environment(hub, tmp_path / f"cache-{number}"))
        assert done.code == 0, done.err
        assert len(hub.seen) - requests <= 3
        assert hub.served - served <= 1_785_664 + 1_000_000
    assert len(done.json()["alternatives"]) == 2
