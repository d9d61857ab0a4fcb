"""Several clients of `myelin serve` at once, and clients that go away."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
from end_to_end_support import SMOLLM2, ask, wait_for_rpc

pytestmark = pytest.mark.slow


def test_connections_queue_and_a_client_that_goes_away_cancels_its_own(myelin):
    serving = myelin.start(
        "serve", "-N", "2", "--model", SMOLLM2, "--rpc-bind", "127.0.0.1:0", "--max-context", "1024", "--threads", "1"
    )
    address = wait_for_rpc(serving)
    alone = ask(address, "Name three colours.", 20)
    assert alone["kind"] == "Done"

    # One that asks for much and goes away.
    leaver = socket.create_connection(address, timeout=120)
    request = {"SubmitPrompt": {"request_id": "gone", "prompt_text": "Tell me everything.", "max_tokens": 900}}
    leaver.sendall((json.dumps(request) + "\n").encode())
    leaver.recv(10)
    leaver.close()

    answers: dict[int, dict] = {}

    def client(number: int) -> None:
        answers[number] = ask(address, "Name three colours.", 20, f"r{number}")

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    begun = time.monotonic()
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(timeout=150)
    assert len(answers) == 6
    # Batch invariance, seen from outside: company changes nothing.
    assert {answer["final_text"] for answer in answers.values()} == {alone["final_text"]}
    assert time.monotonic() - begun < 150

    fault = ask(address, "word " * 3000, 10, "long")
    assert fault["kind"] == "Fault"
    assert "1024" in fault["error"]
    assert ask(address, "Still there?", 4)["kind"] == "Done"
