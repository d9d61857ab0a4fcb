"""`myelin prompt --provider vastai` against the fake service, whose machines are real SSH servers on loopback."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from end_to_end_support import SMOLLM2, wait_for_text

from myelin_testkit.fake_machine import sshd_path
from myelin_testkit.fake_vastai import FakeVastai, Trouble

QUESTION = "Explain in one sentence what a neuron does."


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeVastai]:
    if not sshd_path():
        pytest.skip("needs sshd: apt-get install openssh-server")
    # Machines of a real image would compile the CPU engine's kernels once; these share what this user has compiled.
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    with FakeVastai(tmp_path / "machines", login={"XDG_CACHE_HOME": caches}) as service:
        yield service


@pytest.fixture
def environment(fake: FakeVastai, tmp_path: Path) -> dict[str, str]:
    """All that the command is told, by variables alone: nothing secret is in its words."""
    identity = tmp_path / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(identity)], check=True)
    return {
        "VAST_API_KEY": fake.api_key,
        "VAST_URL": fake.url,
        "MYELIN_VASTAI_CONFIRM_LEASE": "false",
        "MYELIN_VASTAI_SSH_IDENTITY": str(identity),
        "MYELIN_VASTAI_SSH_USER": getpass.getuser(),
        "MYELIN_VASTAI_PYTHON": sys.executable,
        "MYELIN_VASTAI_SETUP": ":",
        "MYELIN_VASTAI_NODE_BIND": "127.0.0.1",
        "MYELIN_VASTAI_POLL_S": "0.1",
        "MYELIN_VASTAI_CALL_SPACING": "0.011",
    }


def words(tmp_path: Path, *more: str) -> list[str]:
    trace, logs = f"--trace-file={tmp_path / 'trace.jsonl'}", f"runtime.log_dir={tmp_path / 'logs'}"
    model = ["--provider", "vastai", "--model", SMOLLM2, "--threads", "1", "--set", logs]
    return ["prompt", *model, "--log-level", "debug", trace, *more]


def inside(fake: FakeVastai) -> list[psutil.Process]:
    """What still runs in any machine."""
    return [process for rented in fake.rented for process in rented.machine.processes()]


@pytest.mark.slow
def test_two_rented_machines_serve_and_are_destroyed(myelin, fake, environment, tmp_path):
    local = myelin.run("prompt", "--model", SMOLLM2, "--threads", "1", "--max-tokens", "12", "--json", QUESTION)
    done = myelin.run(*words(tmp_path, "-N", "2", "--max-tokens", "12", "--json", QUESTION), **environment)
    assert done.code == 0, done.err
    document = done.json()
    assert document["tokens"] == local.json()["tokens"]
    assert [stage["provider"] for stage in document["stages"]] == ["vastai", "vastai"]

    assert len(fake.rented) == 2
    assert len({rented.machine_id for rented in fake.rented}) == 2
    assert fake.most_at_once == 2
    assert fake.live() == []
    assert [rented.destroyed_by for rented in fake.rented] == ["account", "account"]
    assert inside(fake) == []

    # One trace, from the first search for offers to the last machine's end.
    frames = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text("utf-8").splitlines()]
    scopes = [scope for frame in frames for resource in frame["resourceSpans"] for scope in resource["scopeSpans"]]
    spans = {span["spanId"]: span for scope in scopes for span in scope["spans"]}
    assert len({span["traceId"] for span in spans.values()}) == 1
    assert [span["name"] for span in spans.values() if not span.get("parentSpanId")] == ["myelin.run"]
    searches = [span for span in spans.values() if span["name"] == "provider.offers"]
    around = {spans[span["parentSpanId"]]["name"] for span in searches}
    assert around == {"myelin.bootstrap.node_spec", "myelin.bootstrap.provider_start.node"}

    # Nothing secret is in what was said, traced, logged or sent in the open.
    secrets = [fake.api_key, "OPENSSH PRIVATE KEY", *(rented.key for rented in fake.rented)]
    texts = {path: path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file() and kept(path)}
    assert any(path.name == "trace.jsonl" for path in texts)
    assert any(path.parent.name == "logs" for path in texts)
    texts[Path("out")], texts[Path("err")] = done.out, done.err
    texts[Path("requests")] = "".join(request.path + request.body for request in fake.seen)
    assert [(path, secret) for path, text in texts.items() for secret in secrets if secret in text] == []


@pytest.mark.slow
def test_the_page_and_the_metrics_say_what_is_spent(myelin, fake, environment):
    began = time.monotonic()
    serving = myelin.start(
        *("serve", "--provider", "vastai", "-N", "1", "--model", SMOLLM2, "--threads", "1"),
        *("--rpc-bind", "127.0.0.1:0", "--http-bind", "127.0.0.1:0"),
        **environment,
    )
    seen = wait_for_text(serving.stderr, r"Prompt RPC on", 120)
    url = re.search(r"Dashboard on (http://\S+)/dashboard", seen)[1]

    def read(path: str) -> str:
        with urllib.request.urlopen(f"{url}{path}", timeout=60) as answer:
            return answer.read().decode()

    (rented,) = fake.live()
    deadline = time.monotonic() + 60
    while "dollars" not in (state := read("/dashboard/state")):
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    run = json.loads(state)["tables"]["run"]["run"]
    assert run["dollars_per_hour"] == pytest.approx(rented.price)
    assert 0 < run["dollars"] < rented.price * (time.monotonic() - began) / 3600
    told = dict(line.rsplit(" ", 1) for line in read("/metrics").splitlines() if line.startswith("myelin_spend"))
    (rate,) = [float(value) for name, value in told.items() if "rate" in name or "per_hour" in name]
    (total,) = [float(value) for name, value in told.items() if "total" in name]
    assert rate == pytest.approx(rented.price)
    assert 0 < total < rented.price * (time.monotonic() - began) / 3600
    serving.send_signal(signal.SIGINT)
    _, rest = serving.communicate(timeout=90)
    assert serving.returncode == 0
    assert "The run has cost" in rest
    assert fake.live() == []


def kept(path: Path) -> bool:
    """Not the key files themselves."""
    return path.name not in ("id_ed25519", "host_key")


@pytest.mark.slow
def test_machines_without_open_ports_serve_through_ssh(myelin, fake, environment, tmp_path):
    fake.next_machines(Trouble(mapped=False), Trouble(mapped=False))
    done = myelin.run(*words(tmp_path, "-N", "2", "--max-tokens", "4", "--json", QUESTION), **environment)
    assert done.code == 0, done.err
    assert len(done.json()["tokens"]) == 4
    assert "reached through SSH" in done.err
    assert fake.live() == []


@pytest.mark.slow
def test_a_machine_that_fails_at_once_is_replaced(myelin, fake, environment, tmp_path):
    fake.next_machines(Trouble(answer="created-504"), Trouble(answer="no_such_ask-410"))
    done = myelin.run(*words(tmp_path, "-N", "2", "--max-tokens", "2", "--json", QUESTION), **environment)
    assert done.code == 0, done.err
    assert fake.most_at_once == 2
    assert fake.live() == []


@pytest.mark.slow
@pytest.mark.parametrize("dead", [1, 3])
def test_a_machine_that_never_runs_is_replaced_until_there_were_too_many(myelin, fake, environment, tmp_path, dead):
    fake.next_machines(*[Trouble(state="created", message="OCI runtime create failed: no such device")] * dead)
    done = myelin.run(*words(tmp_path, "-N", "1", "--max-tokens", "2", QUESTION), **environment)
    assert done.code == (0 if dead < 3 else 1), done.err
    assert "OCI runtime create failed" in done.err
    assert "Traceback" not in done.err
    assert len(fake.rented) == min(dead + 1, 3)
    assert fake.most_at_once <= 2
    assert fake.live() == []


@pytest.mark.slow
@pytest.mark.parametrize("at", ["rented", "serving"])
def test_ctrl_c_leaves_nothing_rented(myelin, fake, environment, tmp_path, at):
    if at == "rented":
        fake.next_machines(Trouble(state="loading"), Trouble(state="loading"))
    process = myelin.start(*words(tmp_path, "-N", "2", "--max-tokens", "2000", QUESTION), **environment)
    deadline = time.monotonic() + 60
    while len(fake.rented) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    if at == "serving":
        assert process.stdout is not None
        process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert len(fake.rented) == 2
    assert fake.live() == []


def test_nothing_is_rented_unless_confirmed(myelin, fake, environment, tmp_path):
    told = {**environment, "MYELIN_VASTAI_CONFIRM_LEASE": "true"}
    done = myelin.run(*words(tmp_path, "-N", "1", QUESTION), **told)
    assert done.code == 2
    assert "no terminal to ask at" in done.err
    assert "--yes" in done.err
    assert fake.rented == []


def test_nothing_is_rented_above_the_cap(myelin, fake, environment, tmp_path):
    done = myelin.run(*words(tmp_path, "-N", "2", "--max-cost", "0.01", QUESTION), **environment)
    assert done.code == 1
    assert "more than the cap of $0.01" in done.err
    assert fake.rented == []


@pytest.mark.slow
def test_a_killed_orchestrators_machines_are_found_and_destroyed(myelin, fake, environment, tmp_path):
    fake.next_machines(Trouble(state="loading"), Trouble(state="loading"))
    process = myelin.start(*words(tmp_path, "-N", "2", "--yes", "--run-id", "lost", QUESTION), **environment)
    deadline = time.monotonic() + 60
    while len(fake.rented) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert len(fake.live()) == 2
    status = myelin.run("status", "--json", **environment).json()
    assert [(run["run_id"], run["state"]) for run in status] == [("lost", "left behind")]
    assert status[0]["dollars_per_hour"] > 0
    dry = myelin.run("gc", "--dry-run", "--json", **environment)
    assert (dry.code, len(fake.live())) == (0, 2)
    done = myelin.run("gc", "--json", **environment)
    assert done.code == 0, done.err
    assert fake.live() == []
    assert [run["state"] for run in myelin.run("status", "--all", "--json", **environment).json()] == ["ended"]


@pytest.mark.slow
def test_down_ends_a_run_from_outside(myelin, fake, environment, tmp_path):
    fake.next_machines(Trouble(state="loading"))
    process = myelin.start(*words(tmp_path, "-N", "1", "--yes", "--run-id", "far", QUESTION), **environment)
    deadline = time.monotonic() + 60
    while not fake.rented and time.monotonic() < deadline:
        time.sleep(0.02)
    done = myelin.run("down", "far", **environment)
    assert done.code == 0, done.err
    assert "far: ended by its orchestrator" in done.out
    assert process.wait(timeout=90) == 130
    assert fake.live() == []
