"""Wrong words: two lines that say what and how to mend it, exit 1 or 2, nothing left running."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from end_to_end_support import SMOLLM2

pytestmark = pytest.mark.slow

CASES = {
    "no stage at all": (["prompt", "-N", "0", "--model", SMOLLM2, "hi"], 2, "-N"),
    "more stages than layers": (["prompt", "-N", "31", "--model", SMOLLM2, "hi"], 2, "30"),
    "a split that doesn't add up": (["prompt", "-N", "2", "--split", "10,10", "--model", SMOLLM2, "hi"], 2, "30"),
    "a split with an empty stage": (["prompt", "-N", "2", "--split", "0,30", "--model", SMOLLM2, "hi"], 2, "split"),
    "a missing file": (["prompt", "--model", "nowhere/model.gguf", "hi"], 1, "nowhere/model.gguf"),
    "a file that is no GGUF": (["prompt", "--model", "{folder}/text.gguf", "hi"], 1, "GGUF"),
    "a missing package": (["prompt", "--model", "pkg:no_such_package/model.gguf", "hi"], 1, "no_such_package"),
    "a provider that isn't installed": (
        ["prompt", "--provider", "slurm", "--model", SMOLLM2, "hi"],
        1,
        "myelin-provider-slurm",
    ),
    "an engine that isn't installed": (["prompt", "--engine", "fpga", "--model", SMOLLM2, "hi"], 1, "fpga"),
    "no daemon for a provider": (
        ["prompt", "--provider", "docker", "--set", "docker.host=unix:///nowhere.sock", "--model", SMOLLM2, "hi"],
        1,
        "unix:///nowhere.sock",
    ),
    "no account for a provider": (["prompt", "--provider", "vastai", "--model", SMOLLM2, "hi"], 1, "VAST_API_KEY"),
    "a misspelt option": (
        ["prompt", "--set", "runtime.pipelin_stages=2", "--model", SMOLLM2, "hi"],
        2,
        "pipeline_stages",
    ),
    "a prompt longer than the context": (
        ["prompt", "--max-context", "16", "--model", SMOLLM2, "one two three four five six seven eight nine ten"],
        2,
        "16",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_words(myelin, tmp_path: Path, name: str):
    words, code, mention = CASES[name]
    (tmp_path / "text.gguf").write_text("This is a text.\n" * 100)
    done = myelin.run(*[word.replace("{folder}", str(tmp_path)) for word in words])
    assert done.code in (1, 2), done.err
    assert done.code == code, done.err
    assert done.out == ""
    said = [line for line in done.err.splitlines() if line.strip()]
    assert mention in "\n".join(said)
    assert "Traceback" not in done.err
    # What went before (plan, phases) may be shown; the error itself is the last two lines.
    assert said[-2].lower().startswith("error")
    assert not myelin.wait_until_gone(15)


def test_a_port_in_use(myelin):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = myelin.run("serve", "-N", "1", "--model", SMOLLM2, "--rpc-bind", f"127.0.0.1:{port}")
    assert done.code in (1, 2)
    assert str(port) in done.err
    assert "in use" in done.err
    assert not myelin.wait_until_gone(15)


def test_an_unknown_architecture_and_an_unsupported_type(myelin, tmp_path):
    import gguf
    import numpy as np

    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(str(path), "perceptron9000")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = myelin.run("prompt", "--model", str(path), "hi")
    assert done.code == 1, done.err
    assert "perceptron9000" in done.err
    assert "Traceback" not in done.err
