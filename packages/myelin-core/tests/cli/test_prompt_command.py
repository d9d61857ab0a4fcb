"""``myelin prompt`` and what all commands share: settings, JSON, errors in two lines, exit codes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_run import STAGES

from myelin.errors import NodeError, RequestError

Myelin = Callable[..., tuple[int, str, str]]


def test_text_goes_to_stdout_and_everything_else_to_stderr(myelin: Myelin, scripted: Any) -> None:
    code, out, err = myelin("prompt", "hi")
    assert (code, out) == (0, "<[user=hi]>\n")
    assert "stage-1" in err
    assert "stage 0: loading 1.0 kB of 1.0 kB" in err
    assert "tokens/s" in err
    assert scripted.closed == 1


def test_who_has_only_the_slow_engine_is_told_where_a_fast_one_is(myelin: Myelin, scripted: Any) -> None:
    assert "pip install" not in myelin("prompt", "hi", "--model", "/some/model.gguf")[2]
    scripted.pipeline.stages = tuple(replace(stage, engine="reference") for stage in STAGES)
    assert "pip install myelin-worker-cpu" in myelin("prompt", "hi", "--model", "/some/model.gguf")[2]


def test_json_is_one_document_of_the_agreed_shape(myelin: Myelin, scripted: Any) -> None:
    code, out, err = myelin("prompt", "hi", "--json", "--max-tokens", "5", "-N", "2")
    document = json.loads(out)
    assert code == 0
    timings = document.pop("timings")
    assert document == {
        "text": "<[use",
        "tokens": list(b"<[use"),
        "prompt_tokens": len("[user=hi]"),
        "finish_reason": "length",
        "stages": [
            {
                "index": 0,
                "layers": [0, 2],
                "node": "stage-0",
                "provider": "process",
                "engine": "cpu",
                "threads": 2,
                "planned_bytes": 1000,
                "fetched_bytes": 1000,
            },
            {
                "index": 1,
                "layers": [2, 3],
                "node": "stage-1",
                "provider": "process",
                "engine": "cpu",
                "threads": 2,
                "planned_bytes": 500,
                "fetched_bytes": 500,
            },
        ],
    }
    assert set(timings) == {"bootstrap_s", "ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s"}
    assert timings["bootstrap_s"] == 1.25
    assert err


def test_raw_system_and_standard_input(myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert myelin("prompt", "hi", "--raw")[1] == "<hi>\n"
    assert myelin("prompt", "hi", "--system", "s")[1] == "<[system=s][user=hi]>\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert myelin("prompt", "-", "--raw")[1] == "<from a pipe>\n"
    assert myelin("prompt", "hi", "--raw", "--system", "s")[0] == 2


def test_options_reach_the_run(myelin: Myelin, scripted: Any, tmp_path: Path) -> None:
    words = [
        *("--model", "m.gguf", "-N", "3", "--split", "1,2,3", "--engine", "reference", "--threads", "4"),
        *("--max-context", "99", "--run-id", "my-run", "--provider", "process", "--trace-file", str(tmp_path / "t")),
        *("--temperature", "0.5", "--seed", "9", "--max-tokens", "7", "--set", "runtime.kv_dtype=f32"),
        *("--set", "prompt.stop=a,b", "--set", "relay.endpoint_addr_mask=10."),
    ]
    assert myelin("prompt", "hi", *words)[0] == 0
    request = scripted.request
    assert (request.model_uri, request.stages, request.split) == ("m.gguf", 3, (1, 2, 3))
    assert (request.engine, request.run, request.provider) == ("reference", "my-run", "process")
    options = request.engine_options
    assert (options.threads, options.max_context, options.kv_dtype) == (4, 99, "f32")
    assert request.trace_file == str(tmp_path / "t")
    assert request.endpoint_mask == "10."
    (call,) = scripted.pipeline.calls
    assert (call.sampling.temperature, call.sampling.seed, call.max_tokens) == (0.5, 9, 7)


def test_a_run_without_a_name_gets_one(myelin: Myelin, scripted: Any) -> None:
    myelin("prompt", "hi")
    first = scripted.request.run
    myelin("prompt", "hi")
    assert first.startswith("run-")
    assert scripted.request.run != first


def test_settings_come_from_the_file_and_the_environment_too(
    myelin: Myelin, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "myelin.toml").write_text("[runtime]\nthreads = 3\n[prompt]\nmax_tokens = 4\n")
    monkeypatch.setenv("MYELIN_PIPELINE_STAGES", "2")
    code, out, _ = myelin("prompt", "hi", "--threads", "5")
    assert (code, out) == (0, "<[us\n")
    assert (scripted.request.stages, scripted.request.engine_options.threads) == (2, 5)


def two_lines(err: str) -> tuple[str, str]:
    """The last two lines of stderr, which are the error."""
    first, second = err.rstrip("\n").split("\n")[-2:]
    assert first.startswith("Error: ")
    assert second.startswith("Hint: ")
    return first.removeprefix("Error: "), second.removeprefix("Hint: ")


@pytest.mark.parametrize(
    ("words", "code", "message", "hint"),
    [
        (["prompt"], 2, "Missing argument 'TEXT'", "see `myelin prompt --help`"),
        (["prompt", "hi", "-N", "0"], 2, "runtime.pipeline_stages (from -N 0) is wrong", "how many nodes"),
        (["prompt", "hi", "-N", "two"], 2, "runtime.pipeline_stages (from -N) is wrong", "how many nodes"),
        (["prompt", "hi", "--split", "1,x"], 2, "runtime.split (from --split) is wrong", "layers of each stage"),
        (["prompt", "hi", "--temperature", "-1"], 2, "prompt.temperature (from --temperature -1) is wrong", ""),
        (["prompt", "hi", "--run-id", "a b"], 2, "runtime.run_id (from --run-id) is wrong", "letters"),
        (["prompt", "hi", "--set", "runtime.thread=1"], 2, "Unknown setting 'runtime.thread'", "runtime.threads?"),
        (["prompt", "hi", "--nonsense"], 2, "--nonsense", "see `myelin prompt --help`"),
        (
            ["prompt", "hi", "--provider", "nosuch"],
            1,
            "provider 'nosuch' is not installed",
            "pip install myelin-provider-nosuch",
        ),
        (
            ["prompt", "hi", "--engine", "nosuch"],
            1,
            "engine 'nosuch' is not installed",
            "pip install myelin-worker-nosuch",
        ),
        (["prompt", "hi", "--profile", "none"], 2, "no profile 'none'", "local and deploy"),
        (["prompt", "hi", "--config", "none.toml"], 2, "no configuration file none.toml", "--config"),
        (["prompt", "x" * 200], 2, "tokens, and the context 100", "shorten it"),
        (["prmpt"], 2, "No such command 'prmpt'", "see `myelin --help`"),
        (["worker"], 2, "told who it is", "--boot-stdin"),
        (["bench", "-p", "0", "-n", "0"], 2, "nothing to measure", ""),
        (["bench", "--compare", "vllm"], 2, "nothing to compare with by the name 'vllm'", "llamacpp"),
        (["serve", "--rpc-bind", "nonsense"], 2, "'nonsense' is no address", "127.0.0.1:19777"),
        (["serve", "--rpc-bind", "0.0.0.0:0"], 2, "other machines could reach", "SSH"),
        (["inspect", "/nonexistent.gguf"], 1, "/nonexistent.gguf", ""),
    ],
)
def test_bad_words_are_two_lines_and_the_right_exit_code(
    myelin: Myelin, scripted: Any, words: list[str], code: int, message: str, hint: str
) -> None:
    found, out, err = myelin(*words)
    what, how = two_lines(err)
    assert message in what
    assert hint in how
    assert (found, out) == (code, "")
    assert "Traceback" not in err
    assert scripted.opened == scripted.closed


def test_several_wrong_things_are_still_two_lines(myelin: Myelin, scripted: Any) -> None:
    code, _, err = myelin("prompt", "hi", "--provider", "a", "--engine", "b")
    assert code == 1
    assert err.count("\n") == 2
    assert "2 plugins" in err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (NodeError("stage-1 is gone", "start again"), 1, "stage-1 is gone"),
        (RequestError("no", "yes"), 2, "no"),
        (ExceptionGroup("all", [ValueError("x"), ExceptionGroup("", [NodeError("lost")])]), 1, "lost"),
        (ValueError("several\nlines"), 1, "ValueError: several lines"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_goes_wrong_in_a_run_is_told_in_two_lines(
    myelin: Myelin, scripted: Any, error: BaseException, code: int, message: str
) -> None:
    scripted.error = error
    found, out, err = myelin("prompt", "hi")
    assert (found, out) == (code, "")
    assert scripted.closed == 1
    assert "Traceback" not in err
    if code == 130:
        assert err.endswith("Interrupted\n")
    else:
        assert message in two_lines(err)[0]


def test_debug_shows_the_traceback_too(myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.error = NodeError("stage-1 is gone")
    for words in (["--debug"], []):
        monkeypatch.setenv("MYELIN_DEBUG", "" if words else "1")
        _, _, err = myelin("prompt", "hi", *words)
        assert "Traceback" in err
        assert two_lines(err)[0] == "stage-1 is gone"


def test_log_levels(myelin: Myelin, scripted: Any) -> None:
    quiet = myelin("prompt", "hi")[2]
    info = myelin("prompt", "hi", "--log-level", "info")[2]
    debug = myelin("prompt", "hi", "--log-level", "debug")[2]
    assert "stage_provision" not in quiet
    assert "stage_provision done (0.50 s)" in info
    assert "a line of a node" not in info
    assert "stage-0 stderr | a line of a node" in debug
