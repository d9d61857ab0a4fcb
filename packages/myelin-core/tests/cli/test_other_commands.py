"""The other commands: what each answers, for people and as JSON."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from myelin.cli.plan import plan_document, plan_text
from myelin.errors import MyelinError, NodeError
from myelin.model.shard import ByteRange, ShardPlan, StageSlice
from myelin.planner.run_plan import EdgeKind, EdgePlan, RunPlan, StagePlan
from myelin.values import NodeId

Myelin = Callable[..., tuple[int, str, str]]


# serve


async def terminate() -> MyelinError:
    """A pipeline on which somebody sends SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def test_serve_says_where_and_ends_well_on_a_signal(myelin: Myelin, scripted: Any) -> None:
    scripted.pipeline.when_lost = terminate
    code, out, err = myelin("serve", "--rpc-bind", "127.0.0.1:0", "--run-id", "r", "--json")
    assert code == 0
    document = json.loads(out)
    assert set(document) == {"run_id", "rpc_addr", "http_url", "bootstrap_s", "stages"}
    assert f"Dashboard on {document['http_url']}/dashboard" in err
    assert document["run_id"] == "r"
    assert document["rpc_addr"] in err
    assert int(document["rpc_addr"].rpartition(":")[2]) > 0
    assert scripted.closed == 1


def test_serve_answers_while_it_is_up(myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, Any]] = []
    addresses: list[str] = []
    monkeypatch.setattr("myelin.cli.output.tell", lambda text: addresses.append(text))

    async def ask() -> MyelinError:
        line = next(text for text in addresses if text.startswith("Prompt RPC on "))
        port = int(line.split(";")[0].rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b'{"SubmitPrompt":{"request_id":1,"prompt_text":"hi"}}\n')
        while "Done" not in (answer := json.loads(await reader.readline())):
            answers.append(answer)
        answers.append(answer)
        writer.close()
        return await terminate()

    scripted.pipeline.when_lost = ask
    assert myelin("serve", "--rpc-bind", "127.0.0.1:0")[0] == 0
    assert answers[-1]["Done"]["final_text"] == "<[user=hi]>"


def test_serve_fails_with_its_pipeline(myelin: Myelin, scripted: Any) -> None:
    async def lost() -> MyelinError:
        return NodeError("stage-0 is gone", "start again")

    scripted.pipeline.when_lost = lost
    code, _, err = myelin("serve", "--rpc-bind", "127.0.0.1:0")
    assert code == 1
    assert "Error: stage-0 is gone\nHint: start again\n" in err


def test_a_signal_while_it_comes_up_is_an_interruption(myelin: Myelin, scripted: Any) -> None:
    async def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    scripted.before = interrupted
    for words in (["serve", "--rpc-bind", "127.0.0.1:0"], ["prompt", "hi"], ["bench"]):
        assert myelin(*words)[0] == 130
    assert scripted.opened == scripted.closed == 3


def test_a_port_in_use_starts_nothing(myelin: Myelin, scripted: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = myelin("serve", "--rpc-bind", f"127.0.0.1:{taken.getsockname()[1]}")
    assert code == 1
    assert "can't listen on" in err
    assert scripted.opened == 0


# chat


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_chat_keeps_the_conversation_until_it_is_reset(
    myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.pipeline.answer = lambda text: str(text.count("="))
    talk(monkeypatch, "one", "", "two", "/reset", "three", "/exit", "four")
    code, out, _ = myelin("chat", "--system", "s")
    assert code == 0
    assert out.split() == ["2", "4", "2"]
    assert [call.text for call in scripted.pipeline.calls] == [
        "[system=s][user=one]",
        "[system=s][user=one][assistant=2][user=two]",
        "[system=s][user=three]",
    ]


def test_chat_goes_on_after_what_does_not_fit_or_is_no_command(
    myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(monkeypatch, "x" * 200, "/nonsense", "well")
    code, out, err = myelin("chat")
    assert (code, out) == (0, "<[user=well]>\n\n")
    assert "the context 100" in err
    assert "no command /nonsense" in err


def test_chat_needs_a_template(myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.has_template = False
    talk(monkeypatch, "hi")
    code, _, err = myelin("chat")
    assert code == 2
    assert "no chat template" in err
    assert scripted.closed == 1


def test_chat_ends_with_its_pipeline(myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost() -> MyelinError:
        return NodeError("stage-0 is gone")

    scripted.pipeline.when_lost = lost
    scripted.pipeline.delay_s = 10.0
    talk(monkeypatch, "hi")
    code, _, err = myelin("chat")
    assert code == 1
    assert "stage-0 is gone" in err


def test_an_interrupt_stops_only_the_answer(myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(text: str) -> str:
        if text.endswith("[user=long]"):
            os.kill(os.getpid(), signal.SIGINT)
            return "x" * 5000
        return "short"

    scripted.pipeline.answer = answer
    scripted.pipeline.delay_s = 0.002
    talk(monkeypatch, "long", "next")
    code, out, _ = myelin("chat", "--max-tokens", "5000")
    assert code == 0
    assert out.endswith(" […]\nshort\n\n")
    assert [call.text for call in scripted.pipeline.calls] == ["[user=long]", "[user=next]"]
    assert scripted.pipeline.calls[0].cancelled


def test_chat_may_talk_with_a_server(myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def serve() -> None:
        for _ in range(3):
            connection, _ = listener.accept()
            with connection, connection.makefile("rw", encoding="utf-8") as lines:
                if line := lines.readline():
                    asked.append(json.loads(line)["SubmitPrompt"])
                    lines.write('{"TextDelta":{"request_id":0,"text":"well"}}\n{"Done":{"request_id":0}}\n')

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    talk(monkeypatch, "one", "two")
    code, out, _ = myelin("chat", "--connect", address, "--seed", "3", "--set", "prompt.stop=a,b")
    server.join(60)
    listener.close()
    assert (code, out) == (0, "well\nwell\n\n")
    assert [len(request["messages"]) for request in asked] == [1, 3]
    assert asked[0] == {
        "request_id": 0,
        "messages": [{"role": "user", "content": "one"}],
        "seed": 3,
        "stop": ["a", "b"],
    }
    assert scripted.opened == 0


def test_options_of_a_pipeline_have_no_effect_on_a_server(myelin: Myelin) -> None:
    code, _, err = myelin("chat", "--connect", "127.0.0.1:1", "-N", "2")
    assert code == 2
    assert "-N has no effect with --connect" in err
    code, _, err = myelin("chat", "--connect", "127.0.0.1:1")
    assert code == 1
    assert "nobody answers at 127.0.0.1:1" in err


# bench


def test_bench_measures_what_it_says(myelin: Myelin, scripted: Any) -> None:
    scripted.pipeline.answer = lambda text: "x" * 50
    scripted.pipeline.tokenizer.encode = lambda *_: pytest.fail("bench takes random tokens")
    # Random ids are no text.
    scripted.pipeline.parameters = SimpleNamespace(vocab_size=128)
    code, out, err = myelin("bench", "-p", "16", "-n", "8", "-r", "3", "--json")
    assert code == 0
    document = json.loads(out)
    for key in ("pp", "tg"):
        runs = document[f"{key}_runs"]
        assert len(runs) == 3
        assert document[key] == sorted(runs)[1] > 0
    assert (document["threads"], document["stages"], document["n_prompt"], document["n_gen"]) == (2, 2, 16, 8)
    assert document["peak_resident_bytes"] == [7000, 7000]
    calls = scripted.pipeline.calls
    assert [(len(call.prompt), call.max_tokens) for call in calls] == [(16, 1), (1, 9)] * 4
    assert all(call.ignore_end for call in calls)
    assert calls[0].prompt == calls[2].prompt
    assert "round 3 of 3" in err


def test_bench_rows_are_for_people(myelin: Myelin, scripted: Any) -> None:
    scripted.pipeline.answer = lambda text: "x" * 50
    scripted.pipeline.parameters = SimpleNamespace(vocab_size=128)
    code, out, _ = myelin("bench", "-p", "0", "-n", "4", "-r", "1")
    assert code == 0
    assert "tg4" in out
    assert "pp" not in out


def test_bench_tells_when_the_context_is_too_short(myelin: Myelin, scripted: Any) -> None:
    scripted.pipeline.answer = lambda text: "x"
    scripted.pipeline.parameters = SimpleNamespace(vocab_size=128)
    code, _, err = myelin("bench", "-p", "0", "-n", "4", "-r", "1")
    assert code == 1
    assert "gave 1 tokens where 5" in err


def test_bench_asks_for_context_enough(myelin: Myelin, scripted: Any) -> None:
    scripted.error = NodeError("enough")
    myelin("bench", "-p", "5000")
    assert scripted.request.engine_options.max_context == 5001
    myelin("bench", "-p", "4000")
    assert scripted.request.engine_options.max_context == 0
    myelin("bench", "-p", "5000", "--max-context", "10")
    assert scripted.request.engine_options.max_context == 10


# plan


def stage(index: int, first: int, end: int) -> StagePlan:
    return StagePlan(index, NodeId(f"stage-{index}"), StageSlice(first, end, 3), 9, 2_000_000, 1_000, 500)


PLANNED = SimpleNamespace(
    plan=RunPlan(
        "m.gguf",
        (stage(0, 0, 2), stage(1, 2, 3)),
        (EdgePlan(EdgeKind.ACTIVATION, "stage-0", "stage-1", 256, 4096),),
        100,
        2,
        16,
        "pipeline",
        ("a note",),
    ),
    facts=SimpleNamespace(architecture="llama", tensor_bytes=4_000_000),
    parameters=SimpleNamespace(n_layers=3),
    engine=SimpleNamespace(name="cpu"),
)


def test_plan_shows_stages_layers_and_bytes(myelin: Myelin, monkeypatch: pytest.MonkeyPatch) -> None:
    async def planned(*_: object) -> object:
        return PLANNED

    shard = ShardPlan((ByteRange(0, 100, 300),), tensors=5, tensor_bytes=200, fraction=0.25)
    monkeypatch.setattr("myelin.cli.composition.plan_run", planned)
    monkeypatch.setattr("myelin.cli.plan._shards", lambda _: [shard, shard])
    code, out, _ = myelin("plan")
    assert code == 0
    assert "25.0 %" in out
    assert out.rstrip("\n") == plan_text(PLANNED)
    for part in ("stage-1", "0-1", "2.0 MB", "1.0 kB", "activation", "256 B", "a note", "engine cpu"):
        assert part in out
    code, out, _ = myelin("plan", "--json")
    document = json.loads(out)
    assert document == plan_document(PLANNED)
    assert document["stages"][0]["layers"] == [0, 2]
    assert document["stages"][0]["shard"] == {"tensors": 5, "bytes": 200, "fraction": 0.25, "ranges": [[0, 100, 300]]}
    assert document["stages"][0]["memory_bytes"] == 2_001_500
    assert document["edges"][0]["kind"] == "activation"


# plugins, config, doctor


def test_plugins_lists_rows_of_the_agreed_shape(myelin: Myelin) -> None:
    code, out, err = myelin("plugins", "--json")
    rows = json.loads(out)
    assert (code, err) == (0, "")
    assert all(list(row) == ["group", "name", "distribution", "version", "state", "reason"] for row in rows)
    states = {(row["group"], row["name"]): row["state"] for row in rows}
    assert states["myelin.planners", "pipeline"] == "loaded"
    code, out, _ = myelin("plugins")
    assert out.splitlines()[0].split() == ["group", "name", "distribution", "version", "state", "reason"]


def test_plugins_shows_what_the_settings_name_and_nothing_brings(myelin: Myelin) -> None:
    _, out, _ = myelin("plugins", "--json", "--set", "provider.name=nosuch")
    (row,) = [row for row in json.loads(out) if row["name"] == "nosuch"]
    assert row["state"] == "missing"


def test_plugins_works_however_wrong_the_settings_are(myelin: Myelin) -> None:
    code, out, _ = myelin("plugins", "--set", "no.such=1", "--set", "runtime.disabled_plugins=hf")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.split()[:2] == ["sources", "hf"]]
    assert "disabled" in line


def test_config_explains_each_value(myelin: Myelin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "myelin.toml").write_text("[prompt]\nseed = 3\n")
    monkeypatch.setenv("HF_TOKEN", "hush-hush")
    code, out, _ = myelin("config", "--json", "-N", "2")
    document = json.loads(out)
    assert code == 0
    assert document["file"] == "myelin.toml"
    assert document["profile"] is None
    rows = {row["key"]: row for row in document["settings"]}
    assert rows["prompt.seed"] == {"key": "prompt.seed", "value": 3, "layer": "file", "origin": "myelin.toml"}
    assert rows["runtime.pipeline_stages"]["origin"] == "-N"
    assert rows["model.token"]["value"] == "********"
    plain = myelin("config")[1]
    assert "hush-hush" not in out + plain
    assert "prompt.seed" in plain


def test_doctor_looks_at_everything(myelin: Myelin, tmp_path: Path) -> None:
    code, out, _ = myelin(
        "doctor", "--json", "--set", f"model.cache_dir={tmp_path / 'a' / 'b'}", "--rpc-bind", "127.0.0.1:0"
    )
    checks = {check["name"]: check for check in json.loads(out)}
    assert {"python", "processor", "memory", "plugins", "model cache", "prompt RPC"} <= set(checks)
    assert "engine reference" in checks
    assert checks["model cache"]["state"] == "ok"
    assert code == 0
    assert "core" in checks["processor"]["detail"]


def test_doctor_fails_where_something_must_be_mended(myelin: Myelin, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, _ = myelin("doctor", "--json", "--set", f"model.cache_dir={tmp_path / 'file' / 'x'}")
    checks = {check["name"]: check for check in json.loads(out)}
    assert code == 1
    assert checks["model cache"]["state"] == "failed"
    assert "model.cache_dir" in checks["model cache"]["remedy"]
    code, out, _ = myelin("doctor", "--set", "provider.name=nosuch")
    assert code == 1
    assert "pip install myelin-provider-nosuch" in out


def test_doctor_warns_of_a_port_in_use(myelin: Myelin) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, _ = myelin("doctor", "--json", "--rpc-bind", f"127.0.0.1:{taken.getsockname()[1]}")
    (check,) = [check for check in json.loads(out) if check["name"] == "prompt RPC"]
    assert (code, check["state"]) == (0, "warning")


# inspect


def test_inspect_tells_what_a_model_is_made_of(myelin: Myelin, tmp_path: Path) -> None:
    from myelin_testkit.synthetic import Recipe, write_model

    (path,) = write_model(Recipe(n_layers=3), tmp_path / "small.gguf")
    code, out, _ = myelin("inspect", str(path), "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["architecture"], document["servable"], document["problems"]) == ("llama", True, [])
    assert document["legal_cuts"] == [1, 2]
    assert sum(kind["tensors"] for kind in document["types"]) == document["tensors"]
    assert sum(kind["bytes"] for kind in document["types"]) == document["tensor_bytes"]
    assert document["hyperparameters"]["n_layers"] == 3
    assert document["tokenizer"]["vocab_size"] > 0
    assert {engine["name"] for engine in document["engines"]} >= {"reference"}
    text = myelin("inspect", str(path))[1]
    assert "can be served" in text
    assert "may be cut before layers 1-2" in text


def test_inspect_says_why_a_model_cannot_be_served(myelin: Myelin, tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "odd.gguf"
    writer = GGUFWriter(path, "mamba")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    code, out, err = myelin("inspect", str(path), "--json")
    document = json.loads(out)
    assert code == 1
    assert document["servable"] is False
    assert any("mamba" in problem for problem in document["problems"])
    assert "Error" not in err
    assert "can't be served" in myelin("inspect", str(path))[1]


def test_inspect_of_no_model_is_an_error(myelin: Myelin, tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"this is a text file, not a model")
    code, out, err = myelin("inspect", str(path))
    assert (code, out) == (1, "")
    assert err.startswith("Error: ")
    assert err.count("\n") == 2
