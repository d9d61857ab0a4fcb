"""However the orchestrator ends, no node outlives it."""

from __future__ import annotations

import random
import signal
import time

import pytest
from end_to_end_support import SMOLLM2, ask, wait_for_rpc

pytestmark = pytest.mark.slow

PROMPT = ("prompt", "-N", "2", "--model", SMOLLM2, "--max-tokens", "400", "Tell me a long story.")


@pytest.mark.parametrize("delay", [0.1, 0.5, 1.0, 1.6, 2.2, 3.0, 4.0])
def test_an_interrupt_in_any_phase(myelin, delay):
    process = myelin.start(*PROMPT)
    time.sleep(delay + random.random() * 0.2)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=120)
    assert not myelin.wait_until_gone(15)
    # It may have ended by itself before the signal, or have been interrupted.
    assert process.returncode in (0, 130, -signal.SIGINT)


@pytest.mark.parametrize("delay", [0.8, 1.8, 3.0, 5.0])
def test_kill_9_on_the_orchestrator(myelin, delay):
    process = myelin.start(*PROMPT)
    time.sleep(delay + random.random() * 0.2)
    process.kill()
    process.wait(timeout=60)
    assert not myelin.wait_until_gone(30)


def test_a_stopped_node_is_noticed_and_cleaned_up(myelin):
    words = ("--rpc-bind", "127.0.0.1:0", "--max-context", "512", "--set", "runtime.recover=false")
    process = myelin.start("serve", "-N", "2", "--model", SMOLLM2, *words)
    wait_for_rpc(process)
    node = myelin.wait_for_nodes(2)[1]
    node.send_signal(signal.SIGSTOP)
    process.wait(timeout=120)
    assert process.returncode == 1
    assert not myelin.wait_until_gone(15)


def test_a_killed_node_ends_the_run_with_its_name(myelin):
    process = myelin.start(
        *("prompt", "-N", "2", "--model", SMOLLM2, "--max-tokens", "2000", "--max-context", "4096"),
        *("--set", "runtime.recover=false", "Count to a thousand."),
    )
    nodes = myelin.wait_for_nodes(2)
    assert process.stdout is not None
    process.stdout.read(1)  # the first words are out
    nodes[0].kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert "stage-" in err
    assert "Traceback" not in err
    assert not myelin.wait_until_gone(15)


def test_serve_ends_in_good_order_on_sigterm(myelin):
    process = myelin.start("serve", "-N", "2", "--model", SMOLLM2, "--rpc-bind", "127.0.0.1:0")
    address = wait_for_rpc(process)
    answer = ask(address, "Explain in one sentence what a neuron does.", 12)
    assert answer["kind"] == "Done"
    assert "".join(answer["deltas"]) == answer["final_text"]
    assert "neuron" in answer["final_text"]
    assert answer["tokens_generated"] <= 12
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=120)
    assert process.returncode == 0
    assert not myelin.wait_until_gone(15)
