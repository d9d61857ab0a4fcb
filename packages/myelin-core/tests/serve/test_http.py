"""The HTTP server, asked over a real socket: who is let in, whether it is honest about health, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from myelin.errors import ConfigError, TransportError
from myelin.orchestrator.events import NodeEvent, NodeState, PhaseEvent
from myelin.serve.dashboard.feed import Feed
from myelin.serve.dashboard.pages import dashboard_router
from myelin.serve.http.address import Listening, listen
from myelin.serve.http.app import create_app
from myelin.serve.http.guard import PUBLIC, Access, Verdict, is_public
from myelin.serve.http.health import Health
from myelin.serve.http.server import HttpServer
from myelin.serve.request_book import RequestBook
from myelin.values import Attempt, NodeId

TOKEN = "a token of some length"
SECRET_PATHS = ("/metrics", "/dashboard/events", "/dashboard/state")


@dataclass
class Served:
    feed: Feed
    health: Health
    server: HttpServer
    client: httpx.AsyncClient
    url: str


@asynccontextmanager
async def served(token: str = "", **options: Any) -> AsyncIterator[Served]:
    feed, health = Feed(RequestBook(), tick_s=0.02), Health()
    listening = listen("127.0.0.1:0", SecretStr(token) if token else None)
    access = Access.make(token, listening.host, listening.port)
    server = HttpServer(
        listening, lambda: create_app(access, health, lambda: b"# figures\n", [dashboard_router(feed, access)])
    )
    tasks = [asyncio.create_task(feed.run()), asyncio.create_task(server.run())]
    async with httpx.AsyncClient(base_url=listening.url, timeout=60, **options) as client:
        yield Served(feed, health, server, client, listening.url)
    feed.close()
    await server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# Where it listens.


def test_an_address_that_others_reach_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="no token") as caught:
        listen("0.0.0.0:0", None)
    assert "MYELIN_SERVE_TOKEN" in caught.value.hint
    listening = listen("0.0.0.0:0", SecretStr(TOKEN))
    assert not listening.loopback
    assert TOKEN not in repr(listening)
    listening.close()


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(TransportError, match="HTTP can't be answered"):
        listen(f"127.0.0.1:{taken.getsockname()[1]}", None)


def test_the_url_is_one_that_a_person_can_open() -> None:
    listening: Listening = listen("127.0.0.1:0", None)
    assert listening.url == f"http://127.0.0.1:{listening.port}"
    listening.close()


# Who is let in: the decision.


@given(st.text(max_size=30))
def test_only_names_of_this_machine_are_ours(host: str) -> None:
    access = Access.make("", "127.0.0.1", 8080)
    verdict = access.verdict("/dashboard", {"host": host})
    name = host.partition(":")[0].lower().removesuffix(".")
    ours = name in ("localhost", "127.0.0.1") or name.endswith(".localhost") or host.startswith("[::1]")
    assert (verdict is Verdict.ADMIT) == ours


@pytest.mark.parametrize(
    ("host", "verdict"),
    [
        ("127.0.0.1:8080", Verdict.ADMIT),
        ("localhost", Verdict.ADMIT),
        ("LOCALHOST:9", Verdict.ADMIT),
        ("[::1]:8080", Verdict.ADMIT),
        ("myelin.localhost:8080", Verdict.ADMIT),
        ("attacker.example", Verdict.WRONG_HOST),
        ("127.0.0.1.attacker.example", Verdict.WRONG_HOST),
        ("localhost.attacker.example:8080", Verdict.WRONG_HOST),
        ("", Verdict.WRONG_HOST),
    ],
)
def test_dns_rebinding_is_turned_away(host: str, verdict: Verdict) -> None:
    assert Access.make("", "127.0.0.1", 8080).verdict("/health", {"host": host}) is verdict


@given(st.text(max_size=40).filter(lambda text: text.strip() != TOKEN))
def test_no_other_token_is_let_in(shown: str) -> None:
    access = Access.make(TOKEN, "0.0.0.0", 8080)
    for headers in ({"authorization": f"Bearer {shown}"}, {"cookie": f"{access.cookie}={shown}"}, {"cookie": shown}):
        assert access.verdict("/metrics", headers) is Verdict.NO_TOKEN
    assert access.verdict("/metrics", {"authorization": f"bearer {TOKEN}"}) is Verdict.ADMIT
    assert access.verdict("/metrics", {"cookie": f"a=b; {access.cookie}={access.session}"}) is Verdict.ADMIT


def test_another_site_may_lead_here_but_ask_for_nothing() -> None:
    access = Access.make("", "127.0.0.1", 8080)
    headers = {"host": "127.0.0.1", "sec-fetch-site": "cross-site"}
    assert access.verdict("/dashboard/state", headers) is Verdict.CROSS_SITE
    assert access.verdict("/dashboard", {**headers, "sec-fetch-mode": "navigate"}) is Verdict.ADMIT


def test_what_is_public_shows_nothing_of_the_run() -> None:
    assert all(is_public(path) for path in PUBLIC)
    assert not any(is_public(path) for path in (*SECRET_PATHS, "/dashboard", "/", "/health/x", "/dashboard/static"))


# Who is let in: the server.


async def test_without_a_token_this_machine_sees_everything() -> None:
    async with served() as here:
        for path in ("/dashboard", "/dashboard/state", "/metrics", "/dashboard/static/main.js"):
            answer = await here.client.get(path)
            assert answer.status_code == 200, path
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in answer.headers
        assert (await here.client.get("/metrics")).text == "# figures\n"
        assert (await here.client.get("/dashboard", headers={"host": "attacker.example"})).status_code == 421
        assert (await here.client.get("/dashboard/static/../pages.py")).status_code in (404, 405)
        assert (await here.client.get("/dashboard/static/%2e%2e/pages.py")).status_code == 404
        assert (await here.client.get("/docs")).status_code == 404
        assert (await here.client.get("/")).headers["location"] == "/dashboard"


async def test_with_a_token_nothing_is_seen_without_it() -> None:
    async with served(TOKEN) as here:
        for path in SECRET_PATHS:
            answer = await here.client.get(path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert (await here.client.get(path + "?token=" + TOKEN)).status_code == 401
        assert (await here.client.get("/health")).status_code == 503
        good = {"authorization": f"Bearer {TOKEN}"}
        assert (await here.client.get("/metrics", headers=good)).status_code == 200
        page = await here.client.get("/dashboard", headers={"accept": "text/html"})
        assert page.status_code == 303
        assert page.headers["location"] == "/dashboard/sign-in"


async def test_a_browser_signs_in_once() -> None:
    async with served(TOKEN, follow_redirects=True) as here:
        wrong = await here.client.post("/dashboard/sign-in", data={"token": "wrong"})
        assert wrong.status_code == 401
        assert "not this server" in wrong.text
        assert not here.client.cookies
        page = await here.client.post("/dashboard/sign-in", data={"token": TOKEN})
        assert page.status_code == 200
        assert "<title>Myelin</title>" in page.text
        (cookie,) = here.client.cookies.jar
        assert cookie.value is not None
        assert TOKEN not in cookie.value
        assert cookie.has_nonstandard_attr("HttpOnly")
        assert cookie.get_nonstandard_attr("SameSite") == "strict"
        assert (await here.client.get("/dashboard/state")).status_code == 200


async def test_a_link_with_the_token_signs_in_and_forgets_it() -> None:
    async with served(TOKEN, follow_redirects=True) as here:
        page = await here.client.get("/dashboard", params={"token": TOKEN}, headers={"accept": "text/html"})
        assert page.status_code == 200
        assert page.url.path == "/dashboard"
        assert TOKEN not in str(page.url)
        here.client.cookies.clear()
        refused = await here.client.get("/dashboard", params={"token": "wrong"}, headers={"accept": "text/html"})
        assert refused.status_code == 401


async def test_a_form_without_end_is_not_read() -> None:
    async with served(TOKEN) as here:
        answer = await here.client.post("/dashboard/sign-in", content=b"token=" + b"x" * 100_000)
        assert answer.status_code == 413


# Health.


async def test_health_tells_the_truth() -> None:
    async with served() as here:
        said: list[tuple[int, str]] = []

        async def look() -> None:
            answer = await here.client.get("/health")
            said.append((answer.status_code, answer.json()["status"]))

        events: list[Callable[[], None]] = [
            lambda: here.health.phase(PhaseEvent("pipeline_probe", "done", 0.1)),
            lambda: here.health.phase(PhaseEvent("serving", "started")),
            lambda: here.health.node(NodeEvent(NodeId("stage-0"), 0, Attempt(1), NodeState.LOST)),
            lambda: here.health.phase(PhaseEvent("recovery", "started")),
            lambda: here.health.phase(PhaseEvent("recovery", "done", 1.0)),
            lambda: here.health.phase(PhaseEvent("serving", "failed", 2.0, "lost for good")),
        ]
        await look()
        for event in events:
            event()
            await look()
        assert said == [
            (503, "starting"),
            (503, "starting"),
            (200, "serving"),
            (503, "recovering"),
            (503, "recovering"),
            (200, "serving"),
            (503, "lost"),
        ]
        assert (await here.client.get("/health/live")).status_code == 503


# Events.


async def test_events_begin_with_a_snapshot_and_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as here, here.client.stream("GET", "/dashboard/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()

        async def read() -> None:
            kind = ""
            async for line in stream.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    events.put_nowait((kind, json.loads(value)))

        reading = asyncio.create_task(read())
        kind, body = await asyncio.wait_for(events.get(), 60)
        assert kind == "snapshot"
        here.feed.phase(PhaseEvent("serving", "started"))
        kind, increment = await asyncio.wait_for(events.get(), 60)
        assert kind == "increment"
        assert increment["version"] > body["version"]
        assert increment["rows"]["run"]["run"]["state"] == "serving"
        assert abs(increment["now"] - time.time()) < 60
        monkeypatch.setattr("myelin.serve.http.server.CLOSE_TIMEOUT_S", 100.0)
        began = time.monotonic()
        here.feed.close()
        await here.server.close()
        assert time.monotonic() - began < 50, "in good order, not by the end of its time"
        await asyncio.wait_for(reading, 60)
        kinds = [events.get_nowait()[0] for _ in range(events.qsize())]
        assert kinds[-1] == "bye"


async def test_it_ends_in_time_though_a_client_reads_nothing() -> None:
    async with served() as here:
        address = here.server.listening
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET /dashboard/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readline()
        for number in range(2000):
            here.feed.facts(model="x" * 1000 + str(number))
            here.feed.tick()
            if number % 100 == 0:
                await asyncio.sleep(0)
        began = time.monotonic()
        here.feed.close()
        await here.server.close()
        assert time.monotonic() - began < 50
        writer.close()


async def test_signals_stay_whose_they_are() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with served() as here:
        assert (await here.client.get("/health/live")).status_code == 200
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
