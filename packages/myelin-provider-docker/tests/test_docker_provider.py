"""What a container gets and doesn't, how it ends, and what people are told, on a real Docker engine."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from myelin.plugin import LeaseId, LeaseState, Need, NodeId, ProviderError
from myelin_provider_docker.containers import CACHE_FOLDER
from myelin_provider_docker.provider import DockerProvider

pytestmark = pytest.mark.docker

SECRETS = ("planted-run-secret", "hf_planted_token")


LOOK_AROUND = """
import json, os

def can(path):
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "a").close()
    except OSError:
        return False
    return True

status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps({
    "uid": os.getuid(), "pid": os.getpid(), "root": can("/x"), "tmp": can("/tmp/x"),
    "home": can(os.environ["HOME"] + "/x"), "model": open("MODEL").read(), "write": can("MODEL"), "path": sys.path,
    "capabilities": status["CapEff"].strip(), "privileges": status["NoNewPrivs"].strip(),
    "cores": os.environ["MYELIN_NODE_CORES"],
}))
"""


def script(text: str) -> tuple[str, ...]:
    """A node that runs some Python, once it has read its boot line."""
    return ("python", "-c", f"import sys; sys.stdin.readline()\n{text}")


def inspected(rig: Any, lease: Any) -> dict[str, Any]:
    return rig.client.inspect_container(lease.id)


async def test_a_node_is_reached_by_its_container_and_by_a_port_on_loopback(rig: Any) -> None:
    lease = await rig.running(rig.provider())
    assert lease.endpoint is not None
    inside, published = lease.endpoint.candidates
    assert re.fullmatch(r"10\.99\.\d+\.\d+:19700", inside)
    host, _, port = published.partition(":")
    assert host == "127.0.0.1"
    _, writer = await asyncio.open_connection(*inside.split(":"))
    writer.close()
    code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('open')"
    words = rig.engine.inside(sys.executable, "-c", code)
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=False)
    assert done.stdout == "open\n", done.stderr


async def test_neighbours_reach_each_other(rig: Any) -> None:
    """By the address that comes first in a neighbour's endpoint, from inside another container."""
    first = await rig.running(rig.provider())
    host, _, port = first.endpoint.candidates[0].partition(":")
    dialler = rig.provider(
        command=script(f"import socket; socket.create_connection(('{host}', {port}), 5); print('ok')")
    )
    second = await rig.launch(dialler, node=1)
    assert await rig.exited(dialler, second) == "ended by itself (status 0)"


async def test_a_container_may_do_little(rig: Any, tmp_path: Path) -> None:
    model = tmp_path / "site-packages" / "some_model" / "model.gguf"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"GGUF")
    provider = rig.provider(
        command=script(LOOK_AROUND.replace("MODEL", str(model))),
        files=(model,),
        memory="256m",
        cpus=1.5,
        pids=64,
        nodes=2,
    )
    lease = await rig.launch(provider)
    assert await rig.exited(provider, lease) == "ended by itself (status 0)", await rig.log_text(provider, lease)
    (line,) = [line for line in await rig.log(provider, lease) if line.stream == "stdout"]
    seen = json.loads(line.text)
    assert seen.pop("pid") != 1, "there is an init, which reaps, and hands signals on"
    assert str(tmp_path / "site-packages") in seen.pop("path")
    assert seen == {
        "uid": 10001,
        "root": False,
        "home": True,
        "tmp": True,
        "model": "GGUF",
        "write": False,
        "capabilities": "0" * 16,
        "privileges": "1",
        "cores": "1",
    }
    host = inspected(rig, lease)["HostConfig"]
    assert (host["Memory"], host["MemorySwap"]) == (256 << 20, 256 << 20)
    assert (host["NanoCpus"], host["PidsLimit"]) == (1_500_000_000, 64)
    assert host["Privileged"] is False
    assert list(host["PortBindings"].values()) == [[{"HostIp": "127.0.0.1", "HostPort": ""}]]


async def test_a_cache_outlives_its_container(rig: Any) -> None:
    write = rig.provider(command=script(f"open('{CACHE_FOLDER}/kept', 'w').write('kernels')"), cache="a-cache")
    first = await rig.launch(write)
    assert await rig.exited(write, first) == "ended by itself (status 0)", await rig.log_text(write, first)
    await write.release(first.id)
    read = rig.provider(command=script(f"print(open('{CACHE_FOLDER}/kept').read())"), cache="a-cache")
    second = await rig.launch(read, attempt=2)
    await rig.exited(read, second)
    assert "stdout: kernels" in await rig.log_text(read, second)
    await read.release(second.id)
    rig.client.remove_volume("a-cache")


async def test_secrets_are_in_nothing_that_the_daemon_shows(rig: Any) -> None:
    provider = rig.provider()
    lease = await rig.running(provider)
    log = b"".join(rig.client.logs(lease.id, stdout=True, stderr=True, stream=True, follow=False))
    processes = json.dumps(rig.client.top(lease.id, "-eo pid,args"))
    listing = json.dumps(rig.client.containers(all=True))
    shown = [json.dumps(inspected(rig, lease)), log.decode(), processes, listing, rig.engine.log(), repr(lease)]
    assert [secret for text in shown for secret in SECRETS if secret in text] == []
    assert "19700" in shown[0], "what is looked through must be the real thing"


async def test_a_node_without_memory_says_so(rig: Any) -> None:
    provider = rig.provider(command=script("kept = [bytearray(8 << 20) for _ in range(100)]"), memory="48m")
    lease = await rig.launch(provider)
    assert await rig.exited(provider, lease) == "was killed because it ran out of memory (its limit of 48 MiB)"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(3)", "exited with status 3"),
        ("raise ValueError('the shard is torn')", "exited with status 1: ValueError: the shard is torn"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV)"),
    ],
)
async def test_an_end_has_its_reason(rig: Any, code: str, reason: str) -> None:
    provider = rig.provider(command=script(code))
    lease = await rig.launch(provider)
    assert await rig.exited(provider, lease) == reason
    assert await rig.exited(rig.provider(), lease) == reason, "a new object finds the same"


async def test_a_killed_container_says_so(rig: Any) -> None:
    provider = rig.provider()
    lease = await rig.running(provider)
    rig.client.kill(lease.id)
    assert "SIGKILL" in await rig.exited(provider, lease)


async def test_a_node_that_does_not_stop_is_killed(rig: Any) -> None:
    provider = rig.provider(
        command=script("import signal, time; signal.signal(15, print); print('deaf'); time.sleep(99)"), grace_s=1
    )
    lease = await rig.launch(provider)
    async for line in provider.logs(lease.id):
        assert line.text == "deaf"
        break
    async with asyncio.timeout(60):
        await provider.release(lease.id)
    assert rig.containers() == set()


async def test_input_stays_open_when_its_writer_has_left(rig: Any) -> None:
    """So that a node goes on without its orchestrator, until its dead-man's time is over."""
    provider = rig.provider(command=script("import time; print('reads', flush=True); sys.stdin.read(); print('ended')"))
    lease = await rig.launch(provider)
    async for line in provider.logs(lease.id):
        assert line.text == "reads"
        break
    await provider.close()
    await asyncio.sleep(0.5)
    again = rig.provider()
    (found,) = await again.leases()
    assert (found.id, found.state) == (lease.id, LeaseState.STARTING)
    assert rig.client.logs(lease.id) == b"reads\n"


async def test_output_is_told_apart_with_its_times(rig: Any) -> None:
    says = "print('out', n, flush=True); print('err', n, file=sys.stderr); time.sleep(0.05)"
    code = f"import time\nfor n in range(3):\n    {says}"
    provider = rig.provider(command=script(code))
    lease = await rig.launch(provider)
    await rig.exited(provider, lease)
    lines = [line async for line in provider.logs(lease.id)]
    assert [line.text for line in lines if line.stream == "stdout"] == ["out 0", "out 1", "out 2"]
    assert [line.text for line in lines if line.stream == "stderr"] == ["err 0", "err 1", "err 2"]
    times = [line.time for line in lines if line.stream == "stdout"]
    assert 0.04 < times[1] - times[0] < 60


async def test_a_container_that_was_never_started_is_made_anew(rig: Any) -> None:
    """Its creator has gone before it could hand the boot line over."""
    from myelin_provider_docker.containers import creation, plan_container

    plan = plan_container(rig.key(), "docker", rig.section(), command=("python", "/tiny_worker.py"))
    left = rig.client.create_container(**creation(rig.client, plan))["Id"]
    provider = rig.provider()
    (found,) = await provider.leases()
    assert found.state is LeaseState.STARTING, "it is there, and is listed"
    lease = await rig.running(provider)
    assert lease.id != left[:12]
    assert len(await provider.leases()) == 1


async def test_a_boot_line_waits_for_the_start(rig: Any) -> None:
    """Whoever wrote it may be gone by then: there is no node that waits for its word for ever."""
    from myelin.plugin import BootSpec, boot_line
    from myelin_provider_docker.containers import boot_inside, creation, plan_container

    provider, key = rig.provider(), rig.key()
    plan = plan_container(key, "docker", rig.section(), command=("python", "/tiny_worker.py"))
    container = rig.client.create_container(**creation(rig.client, plan))["Id"]
    line = boot_line(boot_inside(BootSpec(key.run, key.node, key.attempt, SecretStr("a-secret")), rig.section()))
    with provider._daemon.handed_over(container, line):
        pass
    await asyncio.sleep(0.3)
    rig.client.start(container)
    (lease,) = await provider.leases()
    assert (await rig.wait(provider, lease)).state is LeaseState.RUNNING


async def test_leases_of_every_run_are_listed_and_released(rig: Any) -> None:
    mine, other = rig.provider(), rig.provider(run="another-run")
    first = await rig.running(mine)
    rig.run = "another-run"
    second = await rig.running(other)
    third = rig.provider(run="a-third-run")
    assert {lease.id for lease in await third.all_leases()} == {first.id, second.id}
    assert {str(lease.key.run) for lease in await third.all_leases()} == {str(first.key.run), "another-run"}
    assert await third.leases() == ()
    await third.release(second.id)
    assert [lease.id for lease in await third.all_leases()] == [first.id]


async def test_containers_of_others_are_left_alone(rig: Any) -> None:
    stranger = rig.client.create_container("myelin-test-base:1", ["sleep", "60"], name="a-stranger")["Id"]
    provider = rig.provider()
    assert await provider.all_leases() == ()
    for name in (stranger[:12], "a-stranger"):
        await provider.release(LeaseId(name))
        assert [line async for line in provider.logs(LeaseId(name))] == []
    assert rig.containers() == {"/a-stranger"}


@pytest.mark.parametrize(
    ("changes", "reason", "mention"),
    [
        ({"image": "no-such-image:1"}, "image-missing", "myelin docker build"),
        ({"gpus": "all"}, "no-gpu", "NVIDIA Container Toolkit"),
        ({"network": "no-such-network"}, "refused", "no-such-network"),
        ({"publish_address": "203.0.113.7"}, "refused", "203.0.113.7"),
    ],
)
async def test_what_cannot_be_started_says_why_and_leaves_nothing(
    rig: Any, changes: dict[str, object], reason: str, mention: str
) -> None:
    provider = rig.provider(**changes)
    with pytest.raises(ProviderError) as caught:
        await rig.launch(provider)
    assert caught.value.reason == reason, caught.value
    assert mention in caught.value.message + caught.value.hint
    assert "stage-0 could not be started" in caught.value.message
    assert rig.containers() == set()


async def test_a_model_that_is_not_there_says_so(rig: Any) -> None:
    provider = rig.provider(files=(Path("/nowhere/model.gguf"),))
    with pytest.raises(ProviderError) as caught:
        await rig.launch(provider)
    assert caught.value.reason == "mount-missing"
    assert "/nowhere/model.gguf" in caught.value.message
    assert rig.containers() == set()


async def test_no_daemon_says_so(rig: Any, tmp_path: Path) -> None:
    provider = rig.provider(host=f"unix://{tmp_path}/nothing.sock")
    for work in (provider.offers(Need(NodeId("stage-0"), 1, "cpu")), provider.leases(), provider.all_leases()):
        with pytest.raises(ProviderError) as caught:
            await work
        assert caught.value.reason == "daemon-unreachable"
        assert f"{tmp_path}/nothing.sock can't be reached (no such file or directory)" in caught.value.message
        assert "DOCKER_HOST" in caught.value.hint


async def test_a_remote_daemon_must_publish_where_we_are(rig: Any) -> None:
    """Reached over TCP; its containers' loopback is not ours."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(rig.engine.url.removeprefix("unix://"))

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                target.write(data)
            target.close()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True)

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        provider = rig.provider(host=f"tcp://127.0.0.1:{port}")
        with pytest.raises(ProviderError) as caught:
            await rig.launch(provider)
        assert caught.value.reason == "remote-loopback"
        open_to_all = rig.provider(host=f"tcp://127.0.0.1:{port}", publish_address="0.0.0.0")
        lease = await rig.running(open_to_all)
        outside, inside = lease.endpoint.candidates
        assert outside.startswith("127.0.0.1:"), "the host that the daemon is reached at comes first"
        assert inside.startswith("10.99.")
        await open_to_all.release(lease.id)
        await asyncio.gather(provider.close(), open_to_all.close())


async def test_the_host_network_needs_no_ports(rig: Any) -> None:
    provider = rig.provider(network="host")
    lease = await rig.running(provider)
    (address,) = lease.endpoint.candidates
    assert address.startswith("127.0.0.1:")
    assert not address.endswith(":19700")


async def test_the_offer_tells_what_the_machine_has(rig: Any) -> None:
    provider = rig.provider(memory="1g")
    (offer,) = await provider.offers(Need(NodeId("stage-0"), 1 << 20, "cpu"))
    assert offer.memory_bytes == 1 << 30
    assert re.search(r"\d+ cores?, \d+\.\d GB, 1\.1 GB for each node", offer.description)
    assert offer.details["version"]
    assert await provider.offers(Need(NodeId("stage-0"), 2 << 30, "cpu")) == ()


def test_the_daemon_comes_from_the_section_or_the_environment() -> None:
    from myelin.plugin import ProviderContext, RunId
    from myelin_provider_docker.section import DockerSection

    def host(told: str, environment: dict[str, str]) -> str:
        context = ProviderContext(RunId("r"), DockerSection.model_validate({"host": told}))
        return DockerProvider(context, environment=environment)._daemon.host

    assert host("", {}) == "unix:///var/run/docker.sock"
    assert host("", {"DOCKER_HOST": "tcp://there:2375"}) == "tcp://there:2375"
    assert host("ssh://me@box", {"DOCKER_HOST": "tcp://there:2375"}) == "ssh://me@box"
