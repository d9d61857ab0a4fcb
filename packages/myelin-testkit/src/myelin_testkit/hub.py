"""A model hub on loopback that behaves like the real one, misbehaviour included.

Two servers, as in life: the *hub* answers ``/owner/name/resolve/revision/file`` with a redirect to the *store* on
another port, which serves bytes with ranges and ETags. Both note every request, so that a test can say what was sent
where (a token to the store, say). Faults are queued and used up one a request::

    with FakeHub() as hub:
        hub.add("someone/model", "model.gguf", data)
        hub.fail(Fault(cut_after=1000), Fault(status=503, retry_after=0))
        ...  # open f"hf:someone/model/model.gguf" with hub_endpoint=hub.url

``hub.file_url("name.bin")`` is a plain file at the store itself, for ``https:`` sources.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import quote, unquote, urlsplit

_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one GET of the store.

    Attributes:
        status: Answer with this status and nothing else.
        retry_after: ``Retry-After`` of that answer, in seconds.
        cut_after: Close the connection after so many bytes of the body, which was announced whole.
        ignore_range: Answer 200 with the whole file although a range was asked for.
        wrong_range: Answer 206 with a ``Content-Range`` that begins one byte later than what was asked for.
        gzip: Send the body with ``Content-Encoding: gzip`` although nobody asked for it.
        stall_s: Wait so long before answering.
        short: Announce and send only so many bytes, as if the file had been cut at the source.
        flip_at: Turn over the bits of this byte of the body.
        bytes_per_s: Send the body no faster.
    """

    status: int = 0
    retry_after: float | None = None
    cut_after: int | None = None
    ignore_range: bool = False
    wrong_range: bool = False
    gzip: bool = False
    stall_s: float = 0.0
    short: int | None = None
    flip_at: int | None = None
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as it came: ``server`` is ``hub`` or ``store``; header names are in lower case."""

    server: str
    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(slots=True)
class _File:
    data: bytes
    etag: str


@dataclass(slots=True)
class _Repository:
    commits: dict[str, dict[str, str]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    token: str = ""


class FakeHub:
    """Both servers. A context manager; everything stops at its end.

    Attributes:
        seen: Every request so far, in order of arrival.
        served: Bytes of bodies that the store has sent.
        open_connections: Accepted by either server and not yet done with: while there are any, ``served`` may grow,
            even where their clients are gone.
        bytes_per_s: How fast each body of the store is sent; 0 is as fast as it goes.
    """

    def __init__(self) -> None:
        self.seen: list[SeenRequest] = []
        self.served = 0
        self.open_connections = 0
        self.bytes_per_s = 0.0
        self._files: dict[str, _File] = {}
        self._repositories: dict[str, _Repository] = {}
        self._faults: deque[Fault] = deque()
        self._hub_faults: deque[Fault] = deque()
        self._lock = threading.Lock()
        self._servers = {name: self._server(name) for name in ("hub", "store")}
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
            for server in self._servers.values()
        ]

    # What tests say --------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Base URL of the hub: a source's ``hub_endpoint``."""
        return self._url("hub")

    @property
    def store_url(self) -> str:
        """Base URL of the store."""
        return self._url("store")

    def add(self, repository: str, file: str, data: bytes, *, revision: str = "main") -> str:
        """Publish a file in a new commit of ``revision`` on top of its last one; returns the commit's 40 hex digits."""
        with self._lock:
            known = self._repositories.setdefault(repository, _Repository())
            files = dict(known.commits.get(known.refs.get(revision, ""), {}))
            name = f"{repository}/{hashlib.sha256(data).hexdigest()[:16]}/{file}"
            files[file] = name
            self._files[name] = _File(data, f'"{hashlib.sha256(data).hexdigest()}"')
            commit = hashlib.sha1(
                repr((repository, sorted(files.items()), known.refs.get(revision))).encode()
            ).hexdigest()
            known.commits[commit] = files
            known.refs[revision] = commit
            return commit

    def swap(self, repository: str, file: str, data: bytes, *, revision: str = "main") -> None:
        """Change what the store has for a file that was published, behind the hub's back."""
        with self._lock:
            known = self._repositories[repository]
            name = known.commits[known.refs[revision]][file]
            self._files[name] = _File(data, f'"{hashlib.sha256(data).hexdigest()}"')

    def gate(self, repository: str, token: str) -> None:
        """Let only those in who show this token."""
        with self._lock:
            known = self._repositories.setdefault(repository, _Repository())
            known.gated, known.token = True, token

    def put(self, name: str, data: bytes) -> str:
        """Publish (or replace) a plain file at the store; returns its URL."""
        with self._lock:
            self._files[name] = _File(data, f'"{hashlib.sha256(data).hexdigest()[:20]}"')
        return self.file_url(name)

    def file_url(self, name: str) -> str:
        """The URL of a plain file at the store."""
        return f"{self.store_url}/files/{quote(name)}"

    def redirect_url(self, name: str) -> str:
        """A URL at the hub that redirects to that file at the store."""
        return f"{self.url}/to/{quote(name)}"

    def fail(self, *faults: Fault) -> None:
        """Let the next GETs of the store go wrong, one fault each."""
        with self._lock:
            self._faults.extend(faults)

    def fail_hub(self, *faults: Fault) -> None:
        """Let the next requests of the hub itself go wrong (``status`` and ``stall_s`` only)."""
        with self._lock:
            self._hub_faults.extend(faults)

    def gets(self, server: str = "store") -> list[SeenRequest]:
        """The GET requests that a server has seen."""
        with self._lock:
            return [request for request in self.seen if request.server == server and request.method == "GET"]

    # Life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> FakeHub:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()

    def _url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._servers[name].server_address[1]}"

    def _server(self, name: str) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._serve(self, name)

            def do_HEAD(self) -> None:
                hub._serve(self, name)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: tests look at :attr:`FakeHub.seen`."""

        class Server(ThreadingHTTPServer):
            request_queue_size = 100  # one beyond the usual five would be tried again by the system a second later

            def process_request(self, request: Any, client_address: Any) -> None:
                with hub._lock:
                    hub.open_connections += 1
                super().process_request(request, client_address)

            def shutdown_request(self, request: Any) -> None:
                super().shutdown_request(request)
                with hub._lock:
                    hub.open_connections -= 1

            def handle_error(self, request: object, client_address: object) -> None:
                """Nothing: clients that are gone are what tests are about."""

        server = Server(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        return server

    # Answers ---------------------------------------------------------------------------------------------

    def _serve(self, request: BaseHTTPRequestHandler, server: str) -> None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        with self._lock:
            self.seen.append(SeenRequest(server, request.command, request.path, headers))
        try:
            if server == "hub":
                self._serve_hub(request, headers)
            else:
                self._serve_store(request, headers)
        except (BrokenPipeError, ConnectionResetError):
            request.close_connection = True

    def _serve_hub(self, request: BaseHTTPRequestHandler, headers: Mapping[str, str]) -> None:
        with self._lock:
            fault = self._hub_faults.popleft() if self._hub_faults else Fault()
        time.sleep(fault.stall_s)
        if fault.status:
            retry = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
            return _answer(request, fault.status, retry)
        path = unquote(urlsplit(request.path).path)
        if path.startswith("/to/"):
            return _answer(request, 302, {"Location": self.file_url(path.removeprefix("/to/"))})
        match = _RESOLVE.fullmatch(path)
        if match is None:
            return _answer(request, 404, {})
        with self._lock:
            known = self._repositories.get(match["repo"])
        if known is None:
            # The real hub doesn't tell strangers which repositories exist.
            return _answer(request, 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        if known.gated and headers.get("authorization") != f"Bearer {known.token}":
            status = 403 if "authorization" in headers else 401
            return _answer(request, status, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        commit = known.refs.get(match["revision"], match["revision"])
        if commit not in known.commits:
            return _answer(request, 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Revision not found"})
        name = known.commits[commit].get(match["file"])
        if name is None:
            return _answer(
                request,
                404,
                {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit},
            )
        file = self._files[name]
        return _answer(
            request,
            302,
            {
                "Location": self.file_url(name),
                "X-Repo-Commit": commit,
                "X-Linked-ETag": file.etag,
                "X-Linked-Size": str(len(file.data)),
                "ETag": f'"{commit}"',
            },
        )

    def _serve_store(self, request: BaseHTTPRequestHandler, headers: Mapping[str, str]) -> None:
        name = unquote(urlsplit(request.path).path).removeprefix("/files/")
        fault = Fault()
        with self._lock:
            file = self._files.get(name)
            if request.command == "GET" and self._faults:
                fault = self._faults.popleft()
        time.sleep(fault.stall_s)
        if fault.status:
            retry = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
            return _answer(request, fault.status, retry)
        if file is None:
            return _answer(request, 404, {})
        if headers.get("if-none-match") == file.etag:
            return _answer(request, 304, {"ETag": file.etag})
        data = file.data if fault.short is None else file.data[: fault.short]
        answer = {"ETag": file.etag, "Accept-Ranges": "bytes"}
        asked = _RANGE.fullmatch(headers.get("range", ""))
        status, start, end = 200, 0, len(data)
        if asked is not None and headers.get("if-range", file.etag) == file.etag and not fault.ignore_range:
            start, end = int(asked[1]), min(int(asked[2] or len(data)) + (1 if asked[2] else 0), len(data))
            if start >= len(data):
                return _answer(request, 416, {"Content-Range": f"bytes */{len(data)}"})
            status = 206
            answer["Content-Range"] = f"bytes {start + fault.wrong_range}-{end - 1}/{len(data)}"
        body = data[start:end]
        if fault.flip_at is not None:
            at = fault.flip_at % max(1, len(body))
            body = body[:at] + bytes([body[at] ^ 0xFF]) + body[at + 1 :]
        if fault.gzip:
            body = gzip.compress(body)
            answer["Content-Encoding"] = "gzip"
        return _answer(
            request, status, answer, body, fault.cut_after, fault.bytes_per_s or self.bytes_per_s, self._count
        )

    def _count(self, size: int) -> None:
        with self._lock:
            self.served += size


def _answer(
    request: BaseHTTPRequestHandler,
    status: int,
    headers: Mapping[str, str],
    body: bytes = b"",
    cut_after: int | None = None,
    bytes_per_s: float = 0.0,
    sent_some: Callable[[int], None] = lambda size: None,
) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    sent = b"" if request.command == "HEAD" else body if cut_after is None else body[:cut_after]
    # Counted before it is sent, the first of it before the headers are: whoever has read enough may look at once.
    sent_some(len(sent[:_CHUNK]))
    request.end_headers()
    if request.command == "HEAD":
        return
    for start in range(0, len(sent), _CHUNK):
        chunk = sent[start : start + _CHUNK]
        if start:
            sent_some(len(chunk))
        request.wfile.write(chunk)
        if bytes_per_s:
            time.sleep(len(chunk) / bytes_per_s)
    if cut_after is not None and cut_after < len(body):
        request.wfile.flush()
        request.close_connection = True
