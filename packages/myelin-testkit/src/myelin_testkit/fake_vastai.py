"""A Vast.ai on loopback, with the service's shapes, rate limits, states and misbehaviour; its machines are ``sshd``s.

::

    with FakeVastai(tmp_path) as fake:
        fake.next_machines(Trouble(answer="created-504"), Trouble(state="loading"))
        ...  # a provider with api_url=fake.url, api_key=fake.api_key
        assert not fake.live()

It notes every request and every machine that ever was, so that a test can say how many were rented at once, and what
was sent where. Shapes: see the documentation of Vast.ai's REST API, and the source of its own client.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from myelin_testkit.fake_machine import DIRECT_HOST, PROXY_HOST, FakeMachine

SPACING_S = {"create": 4.5, "destroy": 3.0, "show": 2.0, "list": 1.0, "ssh": 1.0, "search": 6.0}
"""Least seconds between two calls of a kind."""
PAGE = 25
_READY_S = 90.0
"""How long a machine may take to start before it is taken for one that never will, and is ended half-made."""
_SEARCH_WORDS = frozenset({"order", "type", "limit", "allocated_storage"})
_PORT_OPTION = re.compile(r"-p (\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with one create, or with the machine that comes of it.

    Attributes:
        answer: How the create is answered in place of success: ``created-504`` (the machine was made all the same),
            ``lost-504`` (it was not), ``error-and-contract``, ``broken`` (made, and the connection is cut), or the
            refusals ``no_such_ask-404``, ``no_such_ask-410``, ``no_such_ask-400``.
        state: The ``actual_status`` in which it stays; empty where it comes to run.
        message: Its ``status_msg``.
        ssh: Whether ``sshd`` ever answers.
        ssh_after_s: How long after it runs ``sshd`` starts.
        mapped: Whether ports are mapped to the outside.
        listed_after_s: How long listings don't show it.
        vanishes_after_s: How long after a listing first showed it it is gone by itself; 0 is never.
        deaf_destroys: How many destroys are answered by success, and do nothing.
        key_attached: Whether the account's keys let one in without being attached.
    """

    answer: str = ""
    state: str = ""
    message: str = ""
    ssh: bool = True
    ssh_after_s: float = 0.0
    mapped: bool = True
    listed_after_s: float = 0.0
    vanishes_after_s: float = 0.0
    deaf_destroys: int = 0
    key_attached: bool = False


@dataclass(frozen=True, slots=True)
class VastRequest:
    """A request as it came. ``key`` says whose key it had: ``account``, ``machine`` or ``none``."""

    method: str
    path: str
    body: str
    key: str
    status: int
    time: float


@dataclass(slots=True)
class Rented:
    """A machine that was rented, also after its end."""

    id: int
    ask: int
    machine_id: int
    price: float
    label: str
    trouble: Trouble
    machine: FakeMachine
    created: float
    key: str
    ready: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    """Nothing runs in it any more; it is listed until then."""
    first_listed: float = float("inf")
    state: str = ""
    message: str = ""
    destroyed_by: str = ""


def offer(number: int, **changes: object) -> dict[str, Any]:
    """An offer, with all the fields that matter; every number a machine and host of its own."""
    return {
        "id": 1000 + number,
        "machine_id": 100 + number,
        "host_id": 10 + number,
        "gpu_name": "RTX 3090",
        "num_gpus": 1,
        "gpu_ram": 24576,
        "cpu_ram": 64000,
        "compute_cap": 860,
        "cuda_max_good": 12.8,
        "dph_total": 0.20 + 0.01 * number,
        "min_bid": 0.1,
        "reliability2": 0.99,
        "verification": "verified",
        "rentable": True,
        "direct_port_count": 100,
        "inet_up": 500.0,
        "inet_down": 800.0,
        "geolocation": "Iceland, IS",
        "duration": 2_000_000.0,
        "static_ip": True,
        "public_ipaddr": f"{DIRECT_HOST}\n",
        **changes,
    }


class FakeVastai:
    """The service. A context manager; every machine is stopped at its end.

    Args:
        folder: Where machines have their folders.
        boot_s: From a create until the machine runs.
        pace: Scales the rate limits; 0 has none.
        login: Variables of every login on a machine, as an image sets them (``XDG_CACHE_HOME``, where caches are warm).
    """

    def __init__(
        self, folder: Path, *, boot_s: float = 0.2, pace: float = 0.01, login: Mapping[str, str] | None = None
    ) -> None:
        self.api_key = "planted-account-key-0123456789abcdef"
        self.offers: list[dict[str, Any]] = [offer(number) for number in range(4)]
        self.seen: list[VastRequest] = []
        self.rented: list[Rented] = []
        self.ssh_keys: list[str] = []
        self.list_faults: deque[str] = deque()
        """How the next listings fail: ``deprecated``, ``500``, ``html``, ``empty-object``, ``429``."""
        self.too_often: deque[str] = deque()
        """The next calls, of whatever kind, are answered by 429 with this ``Retry-After`` (or without, where empty)."""
        self.search_quota_exceeded = False
        self.foreign = 0
        """Machines of the account that aren't ours to touch."""
        self._folder = folder
        self._login = dict(login or {})
        self._boot_s = boot_s
        self._pace = pace
        self._troubles: deque[Trouble] = deque()
        self._last: dict[str, float] = {}
        self._lock = threading.RLock()
        self._most = 0
        self._server = _Server((DIRECT_HOST, 0), _handler(self))
        self.url = f"http://{DIRECT_HOST}:{self._server.server_address[1]}"

    def __enter__(self) -> FakeVastai:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="fake vastai", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        for rented in self.rented:
            rented.ready.wait(_READY_S)
            rented.machine.stop()

    def next_machines(self, *troubles: Trouble) -> None:
        """What goes wrong with the next creates, one each."""
        self._troubles.extend(troubles)

    def live(self) -> list[Rented]:
        """Machines that are billed now."""
        with self._lock:
            return [rented for rented in self.rented if not rented.destroyed_by]

    @property
    def most_at_once(self) -> int:
        """How many were ever billed at the same time."""
        return self._most

    def requests(self, method: str, path: str) -> list[VastRequest]:
        """What came, by method and a regular expression of the whole path."""
        return [each for each in self.seen if each.method == method and re.fullmatch(path, each.path)]

    def outbid(self, rented: Rented) -> None:
        """Someone paid more: it stops, and is billed on."""
        rented.state = "stopped"
        rented.machine.stop_sshd()

    def answer(self, method: str, target: str, raw: bytes, authorization: str) -> tuple[int, Mapping[str, str], bytes]:
        """The status, headers and body for a request. A status of 0 cuts the connection."""
        url = urlsplit(target)
        whose, owner = self._whose(authorization)
        with self._lock:
            status, body, headers = self._route(method, url.path, parse_qs(url.query), raw, whose, owner)
            self.seen.append(
                VastRequest(method, url.path, raw.decode(errors="replace"), whose, status, time.monotonic())
            )
        if isinstance(body, str):
            return status, {"Content-Type": "text/html", **headers}, body.encode()
        return status, {"Content-Type": "application/json", **headers}, json.dumps(body).encode()

    def _whose(self, authorization: str) -> tuple[str, int]:
        key = authorization.removeprefix("Bearer ")
        if key == self.api_key:
            return "account", 0
        owner = next((rented.id for rented in self.rented if rented.key == key), 0)
        return ("machine", owner) if owner else ("none", 0)

    def _route(
        self, method: str, path: str, query: Mapping[str, list[str]], raw: bytes, whose: str, owner: int
    ) -> tuple[int, Any, Mapping[str, str]]:
        kind = kind_of_call(method, path)
        if whose == "none":
            return 401, {"success": False, "error": "auth_error", "msg": "Invalid user key"}, {}
        if self.too_often:
            told = self.too_often.popleft()
            return 429, "API requests too frequent", {"Retry-After": told} if told else {}
        now = time.monotonic()
        if whose == "account" and kind and now - self._last.get(kind, float("-inf")) < SPACING_S[kind] * self._pace:
            return 429, f"API requests too frequent endpoint threshold={SPACING_S[kind]}", {}
        self._last[kind] = now
        body = json.loads(raw) if raw else {}
        if whose == "machine" and path != f"/api/v0/instances/{owner}/":
            return 403, {"success": False, "error": "auth_error"}, {}
        if (method, path) == ("POST", "/api/v0/bundles/"):
            return self._search(body)
        if method == "PUT" and (match := re.fullmatch(r"/api/v0/asks/(\d+)/", path)):
            return self._create(int(match[1]), body)
        if (method, path) == ("GET", "/api/v1/instances/"):
            return self._list(query)
        if (method, path) == ("GET", "/api/v0/instances/"):
            return 200, {"success": False, "error": "deprecated_endpoint"}, {}
        if path == "/api/v0/ssh/":
            return self._keys(method, body)
        if method == "POST" and (match := re.fullmatch(r"/api/v0/instances/(\d+)/ssh/", path)):
            return self._attach(int(match[1]), body)
        if match := re.fullmatch(r"/api/v0/instances/(\d+)/", path):
            return self._one(method, int(match[1]), whose)
        return 404, {"success": False, "error": "not_found"}, {}

    def _search(self, query: Mapping[str, Any]) -> tuple[int, Any, Mapping[str, str]]:
        if self.search_quota_exceeded:
            return 429, {"success": False, "error": "search_quota_exceeded", "msg": "until midnight UTC"}, {}
        found = [each for each in self.offers if _matches(each, query)]
        found.sort(key=lambda each: each["dph_total"])
        return 200, {"offers": found[: int(query.get("limit", 64))]}, {}

    def _create(self, ask: int, body: Mapping[str, Any]) -> tuple[int, Any, Mapping[str, str]]:
        trouble = self._troubles.popleft() if self._troubles else Trouble()
        word, _, status = trouble.answer.partition("-")
        offered = next((each for each in self.offers if each["id"] == ask), None)
        if word == "no_such_ask" or offered is None:
            return int(status or 404), {"success": False, "error": "no_such_ask", "msg": "already taken"}, {}
        if trouble.answer == "lost-504":
            return 504, "<html>504 Gateway Time-out</html>", {}
        rented = self._rent(offered, body, trouble)
        if trouble.answer == "created-504":
            return 504, "<html>504 Gateway Time-out</html>", {}
        if trouble.answer == "error-and-contract":
            return 400, {"success": False, "error": "insufficient_something", "new_contract": rented.id}, {}
        if trouble.answer == "broken":
            return 0, "", {}
        return 200, {"success": True, "new_contract": rented.id}, {}

    def _rent(self, offered: Mapping[str, Any], body: Mapping[str, Any], trouble: Trouble) -> Rented:
        number = 7000 + len(self.rented)
        if any(rented.ask == offered["id"] for rented in self.live()):
            trouble = replace(trouble, state="exited", message="the other one got it")
        mapped = [match for name in body.get("env", {}) if (match := _PORT_OPTION.fullmatch(name))]
        key = f"planted-machine-key-{number}"
        environment = {"CONTAINER_ID": str(number), "CONTAINER_API_KEY": key, "PUBLIC_IPADDR": DIRECT_HOST}
        machine = FakeMachine(
            self._folder / f"machine-{number}",
            environment,
            str(body.get("onstart") or ""),
            tuple(int(match[2]) for match in mapped),
            self._login,
        )
        rented = Rented(
            id=number,
            ask=offered["id"],
            machine_id=offered["machine_id"],
            price=offered["dph_total"],
            label=str(body.get("label") or ""),
            trouble=trouble,
            machine=machine,
            created=time.monotonic(),
            key=key,
            state=trouble.state,
            message=trouble.message,
        )
        self.rented.append(rented)
        self._most = max(self._most, len(self.live()))
        if trouble.key_attached:
            for known in self.ssh_keys:
                machine.authorize(known)
        if trouble.state:
            rented.ready.set()
        else:
            threading.Thread(target=self._boot, args=(rented,), name=f"boot {number}", daemon=True).start()
        return rented

    def _boot(self, rented: Rented) -> None:
        trouble = rented.trouble
        try:
            rented.machine.start(mapped=trouble.mapped, ssh=trouble.ssh and not trouble.ssh_after_s)
        finally:
            rented.ready.set()
        if trouble.ssh and trouble.ssh_after_s:
            time.sleep(self._boot_s + trouble.ssh_after_s)
            if not rented.destroyed_by:
                rented.machine.start_sshd()

    def _list(self, query: Mapping[str, list[str]]) -> tuple[int, Any, Mapping[str, str]]:
        if self.list_faults:
            return {
                "deprecated": (200, {"success": False, "error": "deprecated_endpoint"}, {}),
                "500": (500, {"success": False}, {}),
                "html": (200, "<html>please wait</html>", {}),
                "empty-object": (200, {"success": True}, {}),
                "429": (429, "API requests too frequent", {}),
            }[self.list_faults.popleft()]
        shown = [self._document(rented) for rented in self._listed()]
        strangers = [{"id": number, "actual_status": "running", "label": None} for number in range(self.foreign)]
        everything = sorted([*strangers, *shown], key=lambda each: each["id"])
        after = int((query.get("after_token") or ["-1"])[0])
        limit = min(PAGE, int((query.get("limit") or [str(PAGE)])[0]))
        rest = [each for each in everything if each["id"] > after]
        page = rest[:limit]
        token = str(page[-1]["id"]) if len(rest) > limit else None
        return 200, {"success": True, "instances": page, "total_instances": len(everything), "next_token": token}, {}

    def _listed(self) -> list[Rented]:
        now = time.monotonic()
        for rented in self.live():
            if 0 < rented.trouble.vanishes_after_s < now - rented.first_listed and rented.ready.is_set():
                rented.destroyed_by = "itself"
                rented.machine.stop()
                rented.ended.set()
        there = [rented for rented in self.rented if not rented.ended.is_set()]
        shown = [rented for rented in there if now - rented.created >= rented.trouble.listed_after_s]
        for rented in shown:
            rented.first_listed = min(rented.first_listed, now)
        return shown

    def _document(self, rented: Rented) -> dict[str, Any]:
        age = time.monotonic() - rented.created
        state = rented.state or self._state(rented, age)
        running = state == "running"
        ports = {
            f"{inside}/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(outside)}]
            for inside, outside in rented.machine.ports.items()
        }
        return {
            "id": rented.id,
            "machine_id": rented.machine_id,
            "actual_status": state,
            "cur_state": "running" if running else "unloaded",
            "next_state": "running",
            "intended_status": "running",
            "status_msg": rented.message or None,
            "label": rented.label,
            "dph_total": rented.price,
            "ssh_host": PROXY_HOST if running else None,
            "ssh_port": rented.machine.proxy_port if running else None,
            "public_ipaddr": f" {DIRECT_HOST}\n" if running else None,
            "ports": ports if running and ports else None,
            "start_date": time.time() if running else None,
        }

    def _state(self, rented: Rented, age: float) -> str | None:
        if age < self._boot_s / 3:
            return None
        if age < 2 * self._boot_s / 3:
            return "created"
        return "running" if age >= self._boot_s and rented.ready.is_set() else "loading"

    def _keys(self, method: str, body: Mapping[str, Any]) -> tuple[int, Any, Mapping[str, str]]:
        if method == "GET":
            return 200, [{"id": number, "key": key} for number, key in enumerate(self.ssh_keys)], {}
        self.ssh_keys.append(str(body["ssh_key"]))
        return 200, {"success": True, "key": {"key": body["ssh_key"]}}, {}

    def _attach(self, number: int, body: Mapping[str, Any]) -> tuple[int, Any, Mapping[str, str]]:
        rented = next((each for each in self.live() if each.id == number), None)
        if rented is None:
            return 404, {"success": False, "error": "no_such_instance"}, {}
        rented.machine.authorize(str(body["ssh_key"]))
        return 200, {"success": True, "msg": "SSH key added to instance."}, {}

    def _one(self, method: str, number: int, whose: str) -> tuple[int, Any, Mapping[str, str]]:
        rented = next((each for each in self.live() if each.id == number), None)
        if method == "GET":
            return 200, {"instances": self._document(rented) if rented is not None else None}, {}
        if rented is None:
            return 404, {"success": False, "error": "no_such_instance", "msg": "not found"}, {}
        if method == "DELETE":
            if rented.trouble.deaf_destroys > 0:
                rented.trouble = replace(rented.trouble, deaf_destroys=rented.trouble.deaf_destroys - 1)
            else:
                rented.destroyed_by = whose
                threading.Thread(target=_end, args=(rented,), daemon=True).start()
            return 200, {"success": True}, {}
        return 405, {"success": False, "error": "method_not_allowed"}, {}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 100  # a connection beyond the usual five would be tried again by the system a second later


def _end(rented: Rented) -> None:
    rented.ready.wait(_READY_S)
    rented.machine.stop()
    rented.ended.set()


def kind_of_call(method: str, path: str) -> str:
    """Which rate limit a call falls under."""
    if path.startswith("/api/v0/bundles"):
        return "search"
    if path.startswith("/api/v0/asks"):
        return "create"
    if "/ssh/" in path:
        return "ssh"
    if method == "DELETE":
        return "destroy"
    return "list" if path.endswith("/instances/") else "show"


def _matches(offered: Mapping[str, Any], query: Mapping[str, Any]) -> bool:
    """Whether an offer passes a search's filters."""
    for name, tests in query.items():
        if name in _SEARCH_WORDS:
            continue
        value = offered.get("verification") == "verified" if name == "verified" else offered.get(name)
        if not all(_passes(value, operator, wanted) for operator, wanted in tests.items()):
            return False
    return True


def _passes(value: Any, operator: str, wanted: Any) -> bool:
    if operator == "eq":
        return str(value) == str(wanted)
    if operator == "in":
        return value in wanted
    above = value is not None and value >= wanted
    return above if operator == "gte" else value is not None and value <= wanted


def _handler(service: FakeVastai) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, body = service.answer(
                self.command, self.path, raw, self.headers.get("Authorization") or ""
            )
            if status == 0:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815  (names that the base class looks up)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: tests read :attr:`FakeVastai.seen`."""

    return Handler
