"""Our side of the bridge, against one that does as a test says; and that nobody pays for Ray who does not use it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import psutil
import pytest

from myelin.plugin import ProviderError
from myelin_provider_ray.driver import Driver

SCRIPT = """
import json, os, sys, time
print("Ray talks", file=sys.stderr, flush=True)
for line in sys.stdin:
    request = json.loads(line)
    call, told = request["call"], request["with"]
    if call == "die": os._exit(3)
    if call == "hang": continue
    if call == "late": continue
    if call == "refuse": answer = {"id": request["id"], "error": ["ConnectionError", "nobody there"]}
    else: answer = {"id": request["id"], "answer": {"call": call, "pid": os.getpid(), **told}}
    sys.stdout.write(json.dumps(answer) + chr(10)); sys.stdout.flush()
"""


def driver(script: str = SCRIPT, call_s: float = 60.0, connect_s: float = 60.0) -> Driver:
    return Driver({"address": "x"}, connect_s, call_s, (sys.executable, "-c", script))


async def test_calls_are_answered_each_with_its_own() -> None:
    made = driver()
    answers = await asyncio.gather(*(made.call("echo", name=str(number)) for number in range(20)))
    assert [answer["name"] for answer in answers] == [str(number) for number in range(20)]
    assert len({answer["pid"] for answer in answers}) == 1, "one process for all"
    await made.close()
    await made.close()


async def test_a_refusal_a_silence_and_an_end_are_errors_for_people() -> None:
    made = driver(call_s=0.3)
    first = await made.call("echo", timeout_s=60)
    with pytest.raises(ProviderError, match="there is no Ray cluster: nobody there"):
        await made.call("refuse", timeout_s=60)
    with pytest.raises(ProviderError, match=r"did not answer within 0\.3 s"):
        await made.call("hang")
    waiting = asyncio.create_task(made.call("hang", timeout_s=90))
    await asyncio.sleep(0.05)
    with pytest.raises(ProviderError, match="has ended: Ray talks"):
        await made.call("die", timeout_s=60)
    with pytest.raises(ProviderError, match="has ended"):
        await waiting
    again = await made.call("echo", timeout_s=60)
    assert again["pid"] != first["pid"], "it is started anew"
    await made.close()


async def test_a_cluster_that_does_not_let_us_in_is_given_up_and_nothing_is_left() -> None:
    made = driver("import time; time.sleep(99)", connect_s=0.3)
    with pytest.raises(ProviderError, match=r"did not let us in within 0\.3 s"):
        await made.call("echo")
    await made.close()


async def test_a_call_that_is_cancelled_harms_no_other() -> None:
    made = driver()
    await made.call("echo")
    hanging = asyncio.create_task(made.call("hang"))
    await asyncio.sleep(0.05)
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    assert (await made.call("echo"))["call"] == "echo"
    await made.close()


async def test_a_bridge_that_does_not_end_with_its_input_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myelin_provider_ray.driver.CLOSE_S", 0.2)
    made = driver(SCRIPT + "\nwhile True: time.sleep(9)\n")
    await made.call("echo")
    async with asyncio.timeout(60):
        await made.close()


async def test_a_bridge_is_killed_where_nobody_has_the_time_to_wait_for_it() -> None:
    made = driver(SCRIPT + "\nwhile True: time.sleep(9)\n")
    bridge = psutil.Process((await made.call("echo"))["pid"])
    closing = asyncio.create_task(made.close())
    await asyncio.sleep(0.1)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert not bridge.is_running(), "killed, and waited for: nothing of it is left in the event loop"


def test_a_launch_that_is_under_way_when_nobody_listens_any_more_is_finished(tmp_path: Path) -> None:
    """Its orchestrator was killed; a place that was made without its actor would stay for ever."""
    script = (
        "import os, pathlib, time; from myelin_provider_ray import bridge; "
        "bridge.CALLS = {'create': lambda name: (time.sleep(0.5), pathlib.Path(name).touch())}; "
        "bridge._leave = lambda: os._exit(0); bridge.main()"
    )
    request = {"id": 1, "call": "create", "with": {"name": str(tmp_path / "made")}}
    subprocess.run([sys.executable, "-c", script], input=json.dumps(request).encode(), timeout=90, check=True)
    assert (tmp_path / "made").exists()


def test_core_neither_imports_nor_requires_ray() -> None:
    told = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys; from myelin.plugins.registry import Registry; import myelin.orchestrator.bootstrap; "
            "import myelin.cli.main; found = {s.name for s in Registry.discover().config_sections()}; "
            "assert 'ray' in found, found; assert 'ray' not in sys.modules, 'imported'",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert not [line for line in requires("myelin-core") or [] if line.startswith("ray")]
    core = Path(__file__).parents[2] / "myelin-core" / "pyproject.toml"
    assert "ray" not in str(tomllib.loads(core.read_text())["project"]["dependencies"])
