"""`myelin prompt` over real nodes: text, cuts, memory, bytes, traces."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from end_to_end_support import SMOLLM2, ask, wait_for_rpc

QUESTION = "Explain in one sentence what a neuron does."


@pytest.fixture(scope="module")
def answers() -> dict[int, dict]:
    """Documents of the same question by number of stages, filled in by the tests."""
    return {}


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_same_answer_for_any_number_of_stages(myelin, answers, stages):
    done = myelin.run(
        "prompt", "-N", str(stages), "--model", SMOLLM2, "--max-tokens", "24", "--threads", "1", "--json", QUESTION
    )
    assert done.code == 0, done.err
    document = done.json()
    answers[stages] = document
    assert "neuron" in document["text"]
    assert document["tokens"] == answers.get(1, document)["tokens"]
    assert document["finish_reason"] in ("stop", "length")
    assert document["prompt_tokens"] > 10
    assert set(document["timings"]) >= {"bootstrap_s", "ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s"}
    layers = [stage["layers"] for stage in document["stages"]]
    assert len(layers) == stages
    assert layers[0][0] == 0
    assert layers[-1][1] == 30
    assert all(before[1] == after[0] for before, after in itertools.pairwise(layers))
    for stage in document["stages"]:
        # Only its own tensors' bytes are read, each once.
        assert stage["fetched_bytes"] == stage["planned_bytes"]
    assert not myelin.wait_until_gone(15)


def test_a_split_by_hand_is_obeyed(myelin):
    done = myelin.run(
        "prompt", "-N", "2", "--split", "7,23", "--model", SMOLLM2, "--max-tokens", "4", "--json", QUESTION
    )
    assert done.code == 0, done.err
    assert [stage["layers"] for stage in done.json()["stages"]] == [[0, 7], [7, 30]]


def test_a_node_holds_little_more_than_its_share(myelin):
    """Weights of the stage, keys and values, and the fixed overhead that the README states."""
    serving = myelin.start(
        "serve", "-N", "2", "--model", SMOLLM2, "--rpc-bind", "127.0.0.1:0", "--max-context", "512", "--threads", "1"
    )
    nodes = myelin.wait_for_nodes(2)
    address = wait_for_rpc(serving)
    ask(address, "Hello", 8)
    overhead = 260 * 2**20
    for node in nodes:
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{node.pid}/status").read_text())[1]) * 1024
        assert peak < 98_362_432 * 0.7 + overhead


def test_text_on_the_terminal_is_the_answer_alone(myelin):
    done = myelin.run("prompt", "-N", "2", "--model", SMOLLM2, "--max-tokens", "12", QUESTION)
    assert done.code == 0, done.err
    assert "neuron" in done.out
    assert "stage" not in done.out
    assert "stage" in done.err


def test_a_trace_file_holds_every_phase(myelin, tmp_path):
    path = tmp_path / "trace.jsonl"
    done = myelin.run("prompt", "-N", "2", "--model", SMOLLM2, "--max-tokens", "2", "--trace-file", str(path), QUESTION)
    assert done.code == 0, done.err
    spans = [
        span
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    names = {span["name"] for span in spans}
    wanted = (
        "config telemetry run_plan transport membership provisioner node_spec stage_shard_plan provider_start "
        "node_runtime_ready runtime_ready_ack stage_provision weights_loaded pipeline_probe serving shutdown "
        "provider_stop"
    )
    assert {f"myelin.bootstrap.{phase}" for phase in wanted.split()} <= names
    assert len({span["traceId"] for span in spans}) == 1


def test_the_raw_text_is_continued_without_a_template(myelin):
    done = myelin.run(
        "prompt", "--raw", "-N", "1", "--model", SMOLLM2, "--max-tokens", "8", "--json", "The capital of France is"
    )
    assert done.code == 0, done.err
    assert "Paris" in done.json()["text"]
    assert done.json()["prompt_tokens"] == 5
