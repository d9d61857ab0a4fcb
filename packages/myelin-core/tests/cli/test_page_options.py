"""The live page from the command line: when there is one, where, and what keeps a run from starting."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from myelin.errors import MyelinError, NodeError

Myelin = Callable[..., tuple[int, str, str]]
SERVE = ("serve", "--rpc-bind", "127.0.0.1:0")


def while_up(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, look: Callable[[httpx.AsyncClient], Awaitable[None]]
) -> list[str]:
    """Have somebody look at the server over HTTP once the pipeline is there; then it is told to stop. What it said."""
    said: list[str] = []
    monkeypatch.setattr("myelin.cli.output.tell", said.append)

    async def looked() -> MyelinError:
        url = next(match[0] for line in said if (match := re.search(r"http://[\d.]+:\d+", line)))
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await look(client)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    scripted.pipeline.when_lost = looked
    return said


def test_serve_shows_its_page_and_tells_of_its_health(
    myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, httpx.Response] = {}

    async def look(client: httpx.AsyncClient) -> None:
        for path in ("/dashboard", "/health", "/metrics", "/dashboard/state"):
            seen[path] = await client.get(path)

    said = while_up(scripted, monkeypatch, look)
    assert myelin(*SERVE)[0] == 0
    assert any(line.startswith("Dashboard on http://127.0.0.1:") for line in said)
    assert seen["/dashboard"].status_code == 200
    assert seen["/metrics"].status_code == 200
    assert seen["/health"].json()["phase"] == "stage_provision"
    assert seen["/dashboard/state"].json()["tables"]["nodes"]["stage-0"]["state"] == "loading"


def test_without_the_page_there_is_still_health(myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}

    async def look(client: httpx.AsyncClient) -> None:
        for path in ("/dashboard", "/dashboard/events", "/health/live", "/metrics"):
            seen[path] = (await client.get(path)).status_code

    said = while_up(scripted, monkeypatch, look)
    assert myelin(*SERVE, "--no-dashboard")[0] == 0
    assert seen == {"/dashboard": 404, "/dashboard/events": 404, "/health/live": 200, "/metrics": 200}
    assert any(line.startswith("Health and metrics on ") for line in said)


def test_an_empty_address_means_no_http(myelin: Myelin, scripted: Any) -> None:
    async def lost() -> MyelinError:
        return NodeError("gone", "start again")

    scripted.pipeline.when_lost = lost
    code, _, err = myelin(*SERVE, "--http-bind", "")
    assert code == 1
    assert "http://" not in err


@pytest.mark.parametrize("words", [SERVE, ("prompt", "hi", "--dashboard"), ("chat", "--dashboard")])
def test_a_port_in_use_starts_nothing(myelin: Myelin, scripted: Any, words: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = myelin(*words, "--http-bind", f"127.0.0.1:{taken.getsockname()[1]}")
    assert code == 1
    assert re.fullmatch(r"Error: HTTP can't be answered on .*\nHint: .*--http-bind\n", err)
    assert scripted.opened == 0


def test_another_address_needs_a_token(myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = myelin(*SERVE, "--http-bind", "0.0.0.0:0")
    assert code == 2
    assert re.fullmatch(r"Error: .*there is no token.*\nHint: set MYELIN_SERVE_TOKEN .*\n", err)
    monkeypatch.setenv("MYELIN_SERVE_TOKEN", "not-so-secret")
    code, _, err = myelin(*SERVE, "--http-bind", "0.0.0.0:0")
    assert code == 2
    assert "serve.token" in err
    assert "not-so-secret" not in err
    assert scripted.opened == 0


def test_a_token_is_never_told(myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "a-token-of-this-test-alone"
    monkeypatch.setenv("MYELIN_SERVE_TOKEN", token)
    seen: list[int] = []

    async def look(client: httpx.AsyncClient) -> None:
        seen.append((await client.get("/metrics")).status_code)
        seen.append((await client.get("/metrics", headers={"authorization": f"Bearer {token}"})).status_code)

    said = while_up(scripted, monkeypatch, look)
    code, out, err = myelin(*SERVE, "--json")
    assert code == 0
    assert seen == [401, 200]
    assert token not in out + err + "".join(said)
    assert token not in myelin("config")[1]


def test_prompt_has_a_page_only_where_it_is_wanted(
    myelin: Myelin, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = myelin("prompt", "hi")
    assert code == 0
    assert "Dashboard" not in err
    code, with_page, err = myelin("prompt", "hi", "--dashboard")
    assert code == 0
    assert with_page == out
    assert re.search(r"Dashboard on http://127\.0\.0\.1:\d+/dashboard", err)
    monkeypatch.setenv("MYELIN_DASHBOARD", "true")
    assert "Dashboard on" in myelin("prompt", "hi")[2]
    assert "Dashboard on" not in myelin("prompt", "hi", "--no-dashboard")[2]


def test_the_page_means_nothing_to_a_server_elsewhere(myelin: Myelin) -> None:
    code, _, err = myelin("chat", "--connect", "127.0.0.1:1", "--dashboard")
    assert code == 2
    assert "--dashboard has no effect with --connect" in err


def test_what_needs_no_page_imports_no_web_framework() -> None:
    source = (
        "import sys, myelin.cli.main, myelin.cli.serve, myelin.cli.page, myelin.serve.generation, myelin.serve.chat;"
        "import myelin.serve.prompt_rpc, myelin.serve.http.address, myelin.serve.http.health, myelin.serve.http.server;"
        "import myelin.serve.dashboard.feed;"
        "print([name for name in ('fastapi', 'starlette', 'uvicorn', 'sse_starlette', 'prometheus_client')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
