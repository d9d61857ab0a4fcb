"""The provider with a small stand-in for the worker: launch, announce, logs, release, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from pydantic import SecretStr

from myelin.plugin import (
    Attempt,
    BootSpec,
    Endpoint,
    LaunchKey,
    Lease,
    LeaseId,
    LeaseState,
    LogLine,
    Need,
    NodeId,
    Offer,
    ProviderContext,
    ProviderError,
    RunId,
)
from myelin_provider_process.plugin import myelin_config_section, myelin_provider
from myelin_provider_process.provider import OFFER, ProcessProvider
from myelin_provider_process.section import ProcessSection

RUN = RunId("run-1")
LOCAL = Offer(OFFER, "process", "here")
WORKER = Path(__file__).with_name("fake_worker.py")


def key(node: str = "stage-0", attempt: int = 1) -> LaunchKey:
    return LaunchKey(RUN, NodeId(node), Attempt(attempt))


def boot(of: LaunchKey) -> BootSpec:
    return BootSpec(of.run, of.node, of.attempt, SecretStr("hush"))


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


Factory = Callable[..., ProcessProvider]


@pytest.fixture
async def make() -> AsyncIterator[Factory]:
    """Makes providers whose nodes behave as asked; nothing that they started may be left."""
    before = children()
    made: list[ProcessProvider] = []

    def factory(
        behaviour: str, grace_s: float = 5.0, log_lines: int = 10_000, nodes: int = 1, **section: bool
    ) -> ProcessProvider:
        context = ProviderContext(RUN, ProcessSection(grace_s=grace_s, log_lines=log_lines, **section), nodes)
        made.append(ProcessProvider(context, command=(sys.executable, str(WORKER), behaviour)))
        return made[-1]

    yield factory
    for provider in made:
        for lease in await provider.leases():
            await provider.release(lease.id)
        await provider.close()
    assert children() <= before


async def until(provider: ProcessProvider, lease: LeaseId, state: LeaseState) -> Lease:
    async with asyncio.timeout(60):
        while True:
            found = next(each for each in await provider.leases() if each.id == lease)
            if found.state == state:
                return found
            await asyncio.sleep(0.01)


async def all_logs(provider: ProcessProvider, lease: LeaseId) -> list[LogLine]:
    async with asyncio.timeout(60):
        return [line async for line in provider.logs(lease)]


async def test_a_node_starts_announces_itself_and_is_released(make: Factory) -> None:
    provider = make("good")
    lease = await provider.launch(LOCAL, boot(key()), key=key())
    assert lease.state == LeaseState.STARTING
    assert lease.endpoint is None
    running = await until(provider, lease.id, LeaseState.RUNNING)
    assert running.endpoint == Endpoint(("127.0.0.1:4711",))
    assert (running.key, running.offer, running.dollars_per_hour) == (key(), OFFER, 0.0)
    logs = asyncio.create_task(all_logs(provider, lease.id))
    await asyncio.sleep(0.05)
    await provider.release(lease.id)
    assert await provider.leases() == ()
    texts = [line.text for line in await logs]
    assert texts[0] == "stage-0 is up"
    assert texts[-1] == "it was released"
    await provider.release(lease.id)


@pytest.mark.parametrize(("cores", "nodes", "share"), [(8, 1, "8"), (8, 3, "2"), (2, 5, "1")])
async def test_nodes_share_the_cores(
    make: Factory, monkeypatch: pytest.MonkeyPatch, cores: int, nodes: int, share: str
) -> None:
    monkeypatch.setattr("myelin_provider_process.provider.cores", lambda: cores)
    provider = make("environment", nodes=nodes)
    lease = await provider.launch(LOCAL, boot(key()), key=key())
    async with asyncio.timeout(60):
        environment = json.loads((await anext(provider.logs(lease.id))).text)
    assert environment["MYELIN_NODE_CORES"] == share


@pytest.mark.parametrize(("cores", "nodes"), [((0, 1), 2), ((3, 7, 4, 5), 2), ((0, 1), 1), ((0,), 2)])
async def test_each_node_keeps_its_cores_from_attempt_to_attempt(
    make: Factory, monkeypatch: pytest.MonkeyPatch, cores: tuple[int, ...], nodes: int
) -> None:
    monkeypatch.setattr("myelin_provider_process.provider.core_numbers", lambda: cores)
    provider = make("environment", nodes=nodes)
    told = []
    for start in (key("stage-1"), key("stage-0"), key("stage-1", attempt=2)):
        lease = await provider.launch(LOCAL, boot(start), key=start)
        async with asyncio.timeout(10):
            told.append(json.loads((await anext(provider.logs(lease.id))).text).get("MYELIN_NODE_CORE_SET"))
    if 2 <= nodes <= len(cores):
        half = len(cores) // 2
        first, second = (",".join(map(str, part)) for part in (cores[:half], cores[half:]))
        assert told == [first, second, first]
    else:
        assert told == [None, None, None]


async def test_nodes_may_be_left_where_the_system_puts_them(make: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myelin_provider_process.provider.core_numbers", lambda: (0, 1))
    provider = make("environment", nodes=2, own_cores=False)
    lease = await provider.launch(LOCAL, boot(key()), key=key())
    async with asyncio.timeout(10):
        assert "MYELIN_NODE_CORE_SET" not in json.loads((await anext(provider.logs(lease.id))).text)


async def test_nodes_run_in_sessions_of_their_own(make: Factory) -> None:
    provider = make("good")
    lease = await provider.launch(LOCAL, boot(key()), key=key())
    pid = int(lease.id.split(".")[0])
    assert os.getsid(pid) == pid != os.getsid(0)


async def test_launching_a_key_again_gives_the_same_lease(make: Factory) -> None:
    provider = make("good")
    before = children()
    leases = await asyncio.gather(*(provider.launch(LOCAL, boot(key()), key=key()) for _ in range(5)))
    leases.append(await provider.launch(LOCAL, boot(key()), key=key()))
    assert len({lease.id for lease in leases}) == 1
    assert len(children() - before) == 1
    other = await provider.launch(LOCAL, boot(key(attempt=2)), key=key(attempt=2))
    assert other.id != leases[0].id
    assert len(await provider.leases()) == 2


@pytest.mark.parametrize("steps", range(12))
async def test_a_cancelled_launch_leaves_nothing(make: Factory, steps: int) -> None:
    provider = make("good")
    before = children()
    launch = asyncio.create_task(provider.launch(LOCAL, boot(key()), key=key()))
    for _ in range(steps):
        await asyncio.sleep(0)
    done = launch.done()
    launch.cancel()
    result = (await asyncio.gather(launch, return_exceptions=True))[0]
    if done:
        assert isinstance(result, Lease)
    else:
        assert isinstance(result, asyncio.CancelledError)
        assert await provider.leases() == ()
        assert children() <= before


async def test_one_of_two_launches_may_be_cancelled(make: Factory) -> None:
    provider = make("good")
    first = asyncio.create_task(provider.launch(LOCAL, boot(key()), key=key()))
    second = asyncio.create_task(provider.launch(LOCAL, boot(key()), key=key()))
    await asyncio.sleep(0)
    first.cancel()
    lease = await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert [each.id for each in await provider.leases()] == [lease.id]
    await until(provider, lease.id, LeaseState.RUNNING)


async def test_a_command_that_is_not_there(make: Factory) -> None:
    provider = ProcessProvider(ProviderContext(RUN, ProcessSection(python="/nowhere/python")))
    results = await asyncio.gather(
        *(provider.launch(LOCAL, boot(key()), key=key()) for _ in range(2)), return_exceptions=True
    )
    for error in results:
        assert isinstance(error, ProviderError)
        assert "/nowhere/python" in error.message
        assert error.hint
        assert "hush" not in error.message
    assert await provider.leases() == ()


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("broken", "exited with status 3: ModuleNotFoundError: No module named 'myelin'"),
        ("crash", "crashed (SIGSEGV)"),
        ("killed", "was killed (SIGKILL): by hand, or by the system for want of memory"),
    ],
)
async def test_a_node_that_ends_by_itself_says_why(
    make: Factory, monkeypatch: pytest.MonkeyPatch, behaviour: str, words: str
) -> None:
    # The kernel counts for the whole machine, on which another test may just have a node run out of memory.
    monkeypatch.setattr("myelin_provider_process.node.memory_kills", lambda: 7)
    provider = make(behaviour)
    lease = await provider.launch(LOCAL, boot(key()), key=key())
    ended = await until(provider, lease.id, LeaseState.EXITED)
    assert ended.exit_reason == words
    again = await provider.launch(LOCAL, boot(key()), key=key())
    assert (again.id, again.state) == (lease.id, LeaseState.EXITED)
    assert (await all_logs(provider, lease.id))[-1].text == f"it {words}"
    await provider.release(lease.id)
    assert await provider.leases() == ()


async def test_a_node_that_does_not_obey_is_killed(make: Factory) -> None:
    provider = make("stubborn", grace_s=0.3)
    lease = await provider.launch(LOCAL, boot(key()), key=key())
    await until(provider, lease.id, LeaseState.RUNNING)
    logs = asyncio.create_task(all_logs(provider, lease.id))
    await asyncio.sleep(0)
    begun = asyncio.get_running_loop().time()
    await asyncio.gather(provider.release(lease.id), provider.release(lease.id))
    assert 0.25 < asyncio.get_running_loop().time() - begun < 50.0
    assert any("is killed" in line.text for line in await logs)


async def test_a_cancelled_release_goes_on(make: Factory) -> None:
    provider = make("stubborn", grace_s=0.3)
    lease = await provider.launch(LOCAL, boot(key()), key=key())
    await until(provider, lease.id, LeaseState.RUNNING)
    node = psutil.Process(int(lease.id.split(".")[0]))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await provider.release(lease.id)
    await provider.close()
    assert await provider.leases() == ()
    assert not node.is_running()


async def test_output_held_open_by_a_grandchild_does_not_hide_the_end(make: Factory) -> None:
    provider = make("parent")
    lease = await provider.launch(LOCAL, boot(key()), key=key())
    ended = await until(provider, lease.id, LeaseState.EXITED)
    assert ended.exit_reason == "ended by itself (status 0)"
    logs = await all_logs(provider, lease.id)
    assert any("holds its output open" in line.text for line in logs)
    grandchild = int(next(line.text.split()[1] for line in logs if line.text.startswith("child ")))
    os.kill(grandchild, signal.SIGKILL)


async def test_logs_come_whole_from_both_streams(make: Factory) -> None:
    provider = make("chatty")
    lease = await provider.launch(LOCAL, boot(key()), key=key())
    await until(provider, lease.id, LeaseState.RUNNING)
    following = asyncio.create_task(all_logs(provider, lease.id))
    await asyncio.sleep(0.05)
    await provider.release(lease.id)
    lines = await following
    written = {stream: [line.text for line in lines if line.stream == stream] for stream in ("stdout", "stderr")}
    assert written["stdout"][:2500] == [f"line {number}" for number in range(0, 5000, 2)]
    assert written["stderr"] == [f"line {number}" for number in range(1, 5000, 2)]


async def test_a_node_does_not_see_our_credentials(make: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["VAST_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MYELIN_RUN_ID", "OPENAI_APIKEY"]:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    provider = make("environment")
    lease = await provider.launch(LOCAL, boot(key()), key=key())
    logs = provider.logs(lease.id)
    async with asyncio.timeout(60):
        environment = json.loads((await anext(logs)).text)
    assert not {"VAST_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MYELIN_RUN_ID", "OPENAI_APIKEY"} & set(
        environment
    )
    assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://localhost:4318"
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["MYELIN_PARENT_PID"] == str(os.getpid())


async def test_the_offer_is_this_machine(make: Factory) -> None:
    provider = make("good")
    need = Need(NodeId("stage-0"), 1_000_000, "cpu")
    (offer,) = await provider.offers(need)
    assert (offer.id, offer.provider, offer.dollars_per_hour) == (OFFER, "process", 0.0)
    assert 1_000_000 < offer.memory_bytes <= psutil.virtual_memory().total
    assert "core" in offer.description
    assert not await provider.offers(Need(NodeId("stage-0"), 1 << 60, "cpu"))
    assert not await provider.offers(Need(NodeId("stage-0"), 1, "cpu", exclude=frozenset({OFFER})))


async def test_unknown_leases(make: Factory) -> None:
    provider = make("good")
    await provider.release(LeaseId("4711.x"))
    assert await all_logs(provider, LeaseId("4711.x")) == []


ORCHESTRATOR = """
import asyncio, sys
from myelin.plugin import *
from myelin_provider_process.provider import ProcessProvider
from pydantic import SecretStr
async def main():
    key = LaunchKey(RunId("run-1"), NodeId("stage-0"), Attempt(1))
    provider = ProcessProvider(ProviderContext(key.run), command=(sys.executable, *sys.argv[1:]))
    lease = await provider.launch(Offer("local", "process", ""), BootSpec(*key_fields(key), SecretStr("s")), key=key)
    async for line in provider.logs(lease.id):
        print(lease.id.split(".")[0], line.text, flush=True)
def key_fields(key): return key.run, key.node, key.attempt
asyncio.run(main())
"""

DEAF_WORKER = """
import sys, time
from myelin.plugin import die_with_parent
print("armed" if die_with_parent() else "not armed", flush=True)
while True: time.sleep(1)
"""


@pytest.mark.parametrize("worker", ["good", "deaf"])
def test_a_killed_orchestrator_leaves_no_node(worker: str, tmp_path: Path) -> None:
    """Whether the node watches its standard input or only asked the kernel, SIGKILL of its parent ends it."""
    (tmp_path / "deaf.py").write_text(DEAF_WORKER)
    arguments = [str(WORKER), "good"] if worker == "good" else [str(tmp_path / "deaf.py")]
    with subprocess.Popen([sys.executable, "-c", ORCHESTRATOR, *arguments], stdout=subprocess.PIPE) as orchestrator:
        assert orchestrator.stdout is not None
        pid, text = orchestrator.stdout.readline().decode().split(maxsplit=1)
        assert text.strip() in ("armed", "stage-0 is up")
        node = psutil.Process(int(pid))
        orchestrator.kill()
    deadline = time.monotonic() + 60
    while not ended(node) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ended(node)


def ended(process: psutil.Process) -> bool:
    """Whether it is gone, or waits for nothing but its new parent's interest in its end."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_plugin_answers_for_its_own_name_only() -> None:
    assert isinstance(myelin_provider("process", ProviderContext(RUN)), ProcessProvider)
    assert myelin_provider("docker", ProviderContext(RUN)) is None
    section = myelin_config_section()
    assert section.name == "process"
    assert section.model().model_dump() == {"grace_s": 5.0, "python": "", "own_cores": True, "log_lines": 2000}
