"""`myelin prompt --provider docker` on a real Docker engine, with the node image built by the package's Dockerfile.

No registry can be reached from everywhere that tests run: the image's base is made of this machine's own Python, and
everything that is installed in it comes from a folder of wheels.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from end_to_end_support import SMOLLM2, ask, wait_for_rpc
from pydantic import SecretStr

from myelin.plugin import Attempt, BootSpec, LaunchKey, LeaseState, Need, NodeId, ProviderContext, RunId
from myelin_provider_docker.image import ImageRequest, build
from myelin_provider_docker.provider import DockerProvider
from myelin_provider_docker.section import DockerSection
from myelin_testkit.docker_engine import Engine, root_file_system, why_not

# The first test also waits for the image, and for the first compilation of the kernels.
pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
QUESTION = "Explain in one sentence what a neuron does."
IMAGE = "myelin-node:end-to-end"
PLANTED = "hf_planted_token_0f1e2d3c"
BUILD_TOOLS = ("gcc", "cc", "cc1", "g++", "ld", "make", "cmake", "pip", "pip3", "apt", "git", "cargo")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that has the node image."""
    if why := why_not():
        if os.environ.get("CI"):
            pytest.fail(f"the Docker tests must run in CI, and this machine {why}")
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("docker")
    wheels = folder / "wheels"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation"),
            *("--wheel-dir", str(wheels), "--constraint", str(ROOT / "constraints.txt")),
            *(str(ROOT / "packages" / name) for name in ("myelin-core", "myelin-worker-cpu")),
        ],
        check=True,
    )
    with Engine(folder / "engine") as running:
        archive = folder / "base.tar"
        root_file_system(archive)
        client = docker.APIClient(base_url=running.url, version="auto")
        changes = ["ENV PATH=/usr/local/bin:/bin"]
        client.import_image_from_file(str(archive), repository="base", tag="1", changes=changes)
        client.close()
        archive.unlink()
        request = ImageRequest(tag=IMAGE, base="base:1", wheels=wheels)
        build(request, DockerSection.model_validate({"host": running.url}), lambda line: None)
        yield running


@pytest.fixture
def client(engine: Engine) -> Iterator[Any]:
    client = docker.APIClient(base_url=engine.url, version="auto")
    yield client
    for container in client.containers(all=True):
        client.remove_container(container["Id"], force=True, v=True)
    client.close()


@pytest.fixture
def environment(engine: Engine, tmp_path: Path) -> dict[str, str]:
    told = {"MYELIN_NODE_IMAGE": IMAGE, "HF_TOKEN": PLANTED, "MYELIN_RUNTIME_STATE_DIR": str(tmp_path / "state")}
    return {**engine.environment(), **told}


def words(tmp_path: Path, *more: str) -> list[str]:
    trace, logs = f"--trace-file={tmp_path / 'trace.jsonl'}", f"runtime.log_dir={tmp_path / 'logs'}"
    model = ["--provider", "docker", "--model", SMOLLM2, "--threads", "1", "--set", logs]
    return ["prompt", *model, "--log-level", "debug", trace, *more]


def test_two_containers_serve_and_are_removed(myelin, client, environment, tmp_path):
    local = myelin.run("prompt", "--model", SMOLLM2, "--threads", "1", "--max-tokens", "12", "--json", QUESTION)
    done = myelin.run(*words(tmp_path, "-N", "2", "--max-tokens", "12", "--json", QUESTION), **environment)
    assert done.code == 0, done.err
    document = done.json()
    assert document["tokens"] == local.json()["tokens"]
    assert [stage["provider"] for stage in document["stages"]] == ["docker", "docker"]
    assert all(stage["fetched_bytes"] == stage["planned_bytes"] for stage in document["stages"])
    assert client.containers(all=True) == []

    texts = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.suffix in (".jsonl", ".log")}
    assert "trace.jsonl" in texts
    # One for each attempt, and on a busy machine a node may need a second one.
    nodes = {name.split(".")[-3] for name in texts if name.endswith(".log")}
    assert nodes == {"stage-0", "stage-1"}
    assert "10.99." in texts["trace.jsonl"], "the nodes were reached on the bridge network"
    texts |= {"out": done.out, "err": done.err}
    assert [name for name, text in texts.items() if PLANTED in text] == []


def test_ctrl_c_leaves_none_and_nothing_secret_was_to_be_seen(myelin, engine, client, environment, tmp_path):
    process = myelin.start(*words(tmp_path, "-N", "2", "--max-tokens", "2000", QUESTION), **environment)
    assert process.stdout is not None
    process.stdout.read(10)
    running = client.containers()
    assert len(running) == 2
    shown = [json.dumps(client.inspect_container(each["Id"])) for each in running]
    shown += [json.dumps(client.top(each["Id"], "-eo pid,args")) for each in running]
    shown += [client.logs(each["Id"]).decode() for each in running]
    shown += [json.dumps(client.containers(all=True)), engine.log()]
    shown += [path.read_bytes().decode(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline")]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert client.containers(all=True) == []
    assert [text[:200] for text in [*shown, err] if PLANTED in text] == []


@pytest.mark.parametrize("moment", [0.0, 0.3, 1.0])
def test_ctrl_c_while_containers_start_leaves_none(myelin, client, environment, tmp_path, moment):
    process = myelin.start(*words(tmp_path, "-N", "2", QUESTION), **environment)
    deadline = time.monotonic() + 60
    while not client.containers(all=True) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.containers(all=True)
    time.sleep(moment)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert client.containers(all=True) == []


def test_the_image_holds_no_build_tools_and_runs_as_a_user(engine, client):
    code = (
        "import os, sys, pathlib; "
        f"names = set({BUILD_TOOLS!r}); "
        "found = [os.path.join(at, n) for at, _, files in os.walk('/') if not at.startswith(('/proc', '/sys')) "
        "for n in files if n in names]; "
        "own = pathlib.Path('/opt/myelin'); "
        "print(os.getuid(), os.getgid(), found, (own / 'pip').exists(), (own / 'setuptools').exists(), "
        "os.access('/opt/myelin', os.W_OK))"
    )
    container = client.create_container(IMAGE, ["python", "-c", code])["Id"]
    client.start(container)
    assert client.wait(container)["StatusCode"] == 0, client.logs(container)
    assert client.logs(container).decode().strip() == "10001 10001 [] False False False"
    described = client.inspect_image(IMAGE)
    assert described["Config"]["User"] == "10001:10001"
    assert described["Config"]["Labels"]["myelin.variant"] == "cpu"
    assert described["Config"]["Labels"]["org.opencontainers.image.version"]


async def test_a_node_that_nobody_dials_ends_by_itself(engine, client):
    """Its orchestrator broke between starting it and dialling it."""
    section = DockerSection.model_validate({"host": engine.url, "image": IMAGE})
    key = LaunchKey(RunId("alone"), NodeId("stage-0"), Attempt(1))
    patience = {"MYELIN_NODE_FIRST_DIAL_S": SecretStr("1")}
    boot = BootSpec(key.run, key.node, key.attempt, SecretStr("a-secret"), environment=patience)
    first = DockerProvider(ProviderContext(key.run, section))
    offers = await first.offers(Need(key.node, 1 << 20, "cpu"))
    lease = await first.launch(offers[0], boot, key=key)
    await first.close()
    again = DockerProvider(ProviderContext(key.run, section))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        (found,) = await again.leases()
        if found.state is LeaseState.EXITED:
            break
        await asyncio.sleep(0.1)
    assert (found.id, found.state) == (lease.id, LeaseState.EXITED)
    assert "nobody opened a control stream" in "\n".join([line.text async for line in again.logs(lease.id)])
    await again.release(lease.id)
    assert await again.leases() == ()
    await again.close()
    assert client.containers(all=True) == []


def test_an_orchestrator_that_is_killed_leaves_nodes_that_end(myelin, client, environment, tmp_path):
    """Within the dead-man's time; what is left is a stopped container, which tells why, and `myelin gc` removes it."""
    patience = ["--set", "runtime.dead_man_s=2"]
    process = myelin.start(*words(tmp_path, "-N", "1", "--max-tokens", "2000", *patience, QUESTION), **environment)
    assert process.stdout is not None
    process.stdout.read(10)
    (running,) = client.containers()
    process.kill()
    process.wait(timeout=60)
    assert client.wait(running["Id"], timeout=60)["StatusCode"] == 1
    assert "the control stream has been lost for 2 s" in client.logs(running["Id"]).decode()
    swept = myelin.run("gc", "--set", "provider.name=docker", "--json", **environment)
    assert swept.code == 0, swept.err
    assert [(found["why"], found["done"]) for found in swept.json()] == [("left behind", "released")]
    assert client.containers(all=True) == []


def test_a_container_that_is_killed_comes_back(myelin, client, environment, tmp_path):
    serving = myelin.start("serve", *words(tmp_path, "-N", "2", "--rpc-bind", "127.0.0.1:0")[1:], **environment)
    address = wait_for_rpc(serving)
    before = ask(address, QUESTION, 12)
    assert before["kind"] == "Done"
    running = {each["Id"]: each["Labels"] for each in client.containers()}
    lost = next(name for name, labels in running.items() if labels["myelin.node"] == "stage-1")
    client.kill(lost)
    deadline, after = time.monotonic() + 60, {"kind": ""}
    while after["kind"] != "Done" and time.monotonic() < deadline:
        after = ask(address, QUESTION, 12)
    assert after["kind"] == "Done", after
    assert after["final_text"] == before["final_text"]
    now = {each["Id"]: each["Labels"] for each in client.containers(all=True)}
    assert lost not in now
    assert sorted((labels["myelin.node"], labels["myelin.attempt"]) for labels in now.values()) == [
        ("stage-0", "1"),
        ("stage-1", "2"),
    ]
    serving.send_signal(signal.SIGTERM)
    serving.wait(timeout=90)
    assert client.containers(all=True) == []
