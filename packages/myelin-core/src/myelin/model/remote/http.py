"""A file behind a URL: asked about once, then read by ranges, with patience and without trust.

Every answer is checked against what the file was at first: status, ``Content-Range``, size, ETag, encoding. What may be
over in a moment is tried again (:data:`MOST_FAILURES` times in a row without a byte, with growing pauses); whatever
else is wrong is one :class:`~myelin.errors.ModelError`.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urljoin, urlsplit, urlunsplit

from opentelemetry import trace
from pydantic import SecretStr

from myelin.errors import ModelError

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

T = TypeVar("T")

MOST_FAILURES = 6
"""Attempts in a row that may bring not a single byte."""
MOST_QUESTIONS = 5
"""Attempts in a row to learn what a file is."""
MOST_REDIRECTS = 8
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
CONNECT_TIMEOUT_S = 15.0
SILENCE_TIMEOUT_S = 30.0

_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_GONE = frozenset({401, 403, 404, 410})
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a file is, and who may know our token.

    Attributes:
        url: Its URL.
        token: Sent as a bearer token to ``token_origin`` alone (``scheme://host:port``), never to another that it
            redirects to.
        is_hub: It is asked about as the Hub wants it: by HEAD, the answer being in the redirect itself.
    """

    url: str
    token: SecretStr | None = None
    token_origin: str = ""
    is_hub: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says of a file.

    Attributes:
        etag: Its version, as the server spells it; empty where it doesn't say.
        size: Bytes in all.
        sha256: Checksum of the content, hexadecimal; empty where it doesn't say.
        commit: The commit of a revision on the Hub; empty elsewhere.
        location: Where its bytes are served.
        has_ranges: Whether the server gives parts of it.
    """

    etag: str
    size: int
    sha256: str = ""
    commit: str = ""
    location: str = ""
    has_ranges: bool = True


class RefusedError(Exception):
    """The server said a definite no. ``code`` is the Hub's word for it (``X-Error-Code``), or empty."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"the server answers {status}")
        self.status = status
        self.code = code


class UnreachableError(Exception):
    """The server could not be reached, or never gave a useful answer, in all attempts."""


class _TransientError(Exception):
    """May be over in a moment; ``wait_s`` is what the server asked for, ``progressed`` says whether bytes came."""

    def __init__(self, message: str, wait_s: float = 0.0, progressed: bool = False) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.progressed = progressed


def shown_url(url: str) -> str:
    """A URL fit for a message: without query, which may hold a signature, and without user and password."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def origin(url: str) -> str:
    """``scheme://host:port``, with the port that the scheme implies where none is given."""
    parts = urlsplit(url)
    port = parts.port or {"https": 443, "http": 80}.get(parts.scheme, 0)
    return f"{parts.scheme}://{parts.hostname}:{port}"


class HttpClient:
    """Connections, shared by all files of a model. Thread-safe; made at the first request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._client: httpx.Client | None = None

    def get(self) -> httpx.Client:
        """The client."""
        import httpx

        with self._lock:
            if self._client is None:
                timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
                self._client = httpx.Client(timeout=timeout, follow_redirects=False)
            return self._client

    def hold(self) -> None:
        """Another file uses them."""
        with self._lock:
            self._users += 1

    def let_go(self) -> None:
        """A file doesn't need them any more; they close with the last one."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self.close()

    def close(self) -> None:
        """Close every connection; twice is fine."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None


def ask(client: HttpClient, address: Address, *, known: bool = False) -> Answer:
    """Ask what the file is: one request and its redirects; no more than one byte of the file comes.

    Args:
        known: An earlier answer would do, too: there is no point in waiting long for news.

    Raises:
        RefusedError: It isn't there, or may not be read.
        UnreachableError: There is nobody to ask.
        ModelError: The answer is of no use.
    """
    return _patiently(lambda: _ask(client.get(), address), 2 if known else MOST_QUESTIONS)


class HttpFile:
    """A file that was asked about; its bytes by range. Thread-safe.

    Args:
        client: Connections.
        address: Where it is.
        answer: What :func:`ask` said; without ``location``, bytes are asked for at the address itself.
    """

    def __init__(self, client: HttpClient, address: Address, answer: Answer) -> None:
        self.answer = answer
        self._client = client
        self._address = address
        self._lock = threading.Lock()
        self._location = answer.location
        # At the Hub, the ETag is that of the content; the store behind it has one of its own.
        self._etag = "" if address.is_hub else answer.etag
        client.hold()

    def close(self) -> None:
        """Let go of the connections; once."""
        self._client.let_go()

    def fetch(self, start: int, end: int, sink: Callable[[bytes], None]) -> None:
        """Give the bytes ``[start, end)`` to ``sink`` as they come, in order, each once. Blocking.

        Raises:
            ModelError: They can't be had, or aren't those of the file that was asked about.
        """
        at = start

        def attempt() -> None:
            nonlocal at
            before = at
            try:
                for chunk in self._stream(at, end):
                    sink(chunk)
                    at += len(chunk)
            except _TransientError as error:
                error.progressed = at > before
                raise
            if at != end:
                raise _TransientError(f"only {at - start} of {end - start} bytes came", progressed=at > before)

        try:
            _patiently(attempt, MOST_FAILURES)
        except UnreachableError as error:
            raise ModelError(
                f"{shown_url(self._address.url)} can't be fetched: {error}",
                "Check the connection and try again: what has come so far is kept.",
                reason="model-fetch",
            ) from None
        except RefusedError as error:
            raise refusal(shown_url(self._address.url), error.status) from None

    def _stream(self, start: int, end: int) -> Iterator[bytes]:
        """One request for ``[start, end)``, skipping what a server without ranges sends before it."""
        with self._lock:
            location, etag = self._location, self._etag
        headers = {"Accept-Encoding": "identity"}
        if self.answer.has_ranges:
            headers["Range"] = f"bytes={start}-{end - 1}"
            if etag.startswith('"'):
                headers["If-Range"] = etag
        try:
            with _following(self._client.get(), self._address, "GET", headers, location) as (response, url):
                skip = self._judge(response, start, end, moved=bool(location))
                with self._lock:
                    self._location = url
                left = end - start
                # As they come: a chunk size would hold bytes back, and lose them where the body is cut.
                for chunk in response.iter_raw():
                    wanted = chunk[skip : skip + left]
                    skip = max(0, skip - len(chunk))
                    left -= len(wanted)
                    if wanted:
                        yield wanted
                    if not left and response.status_code == 200:
                        return  # the rest of a part is read to its end, so that the connection can be used again
        except _http_errors() as error:
            raise _failed(error) from None

    def _judge(self, response: httpx.Response, start: int, end: int, *, moved: bool) -> int:
        """Check the answer; how many bytes of its body come before ``start``."""
        status, headers = response.status_code, response.headers
        if moved and status in _GONE:
            with self._lock:
                self._location = ""  # a signed address that is over: ask the first one again
                if self._address.is_hub:
                    self._etag = ""  # of the same content, but perhaps in another store
            raise _TransientError(f"the store answers {status}")
        found = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
        if status == 416 and found is not None and int(found[3]) != self.answer.size:
            raise self._changed()
        _check_status(response, extra=frozenset({412, 416}))
        _check_encoding(response, self._address.url)
        etag = _version(headers)
        with self._lock:
            if etag and not self._etag:
                self._etag = etag
            if etag and _strong(etag) != _strong(self._etag):
                raise self._changed()
        if status == 206:
            if found is None or found[1] is None or (int(found[1]), int(found[2])) != (start, end - 1):
                raise _TransientError("the server sent other bytes than were asked for")
            if int(found[3]) != self.answer.size:
                raise self._changed()
            return 0
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) != self.answer.size:
            raise self._changed()
        if self.answer.has_ranges and start:
            raise _TransientError("the server sent the whole file where a part was asked for")
        return start

    def _changed(self) -> ModelError:
        return ModelError(
            f"{shown_url(self._address.url)} was changed while it was being fetched",
            "Start again: the new file will be fetched. On the Hub, name a commit after the @.",
            reason="model-changed",
        )


def refusal(shown: str, status: int) -> ModelError:
    """A definite no, in words."""
    if status in (401, 403):
        return ModelError(
            f"{shown} may not be read: the server answers {status}",
            "Ask its owner for access; a token (HF_TOKEN) is sent to the Hub only.",
            reason="model-denied",
        )
    if status in (404, 410):
        return ModelError(f"there is no file at {shown}", "Check the address.", reason="model-missing")
    return ModelError(f"{shown} answers {status}", "Check the address.", reason="model-fetch")


# Asking --------------------------------------------------------------------------------------------------------------


def _ask(client: httpx.Client, address: Address) -> Answer:
    headers = {"Accept-Encoding": "identity"}
    if not address.is_hub:
        headers["Range"] = "bytes=0-0"
    try:
        method = "HEAD" if address.is_hub else "GET"
        with _following(client, address, method, headers, stop_at_link=address.is_hub) as (response, location):
            if response.status_code in _REDIRECTS:
                return _linked(response.headers, location)
            found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
            empty = response.status_code == 416 and found is not None and int(found[3]) == 0
            if not empty:
                _check_status(response)
                _check_encoding(response, address.url)
            partial = response.status_code == 206
            length = response.headers.get("content-length", "")
            if found is not None:
                size = int(found[3])
            elif length.isdigit() and not partial:
                size = int(length)
            else:
                raise ModelError(
                    f"{shown_url(address.url)} does not say how large it is",
                    "Fetch the file by another way and name its path.",
                    reason="model-fetch",
                )
            return Answer(
                etag=_version(response.headers),
                size=size,
                commit=response.headers.get("x-repo-commit", ""),
                has_ranges=partial or empty or address.is_hub,
            )
    except _http_errors() as error:
        raise _failed(error) from None


def _linked(headers: Mapping[str, str], location: str) -> Answer:
    """The Hub's redirect tells of what it leads to."""
    etag = headers["x-linked-etag"]
    bare = _strong(etag).strip('"')
    return Answer(
        etag=etag,
        size=int(headers["x-linked-size"]),
        sha256=bare if _SHA256.fullmatch(bare) else "",
        commit=headers.get("x-repo-commit", ""),
        location=location,
    )


@contextlib.contextmanager
def _following(
    client: httpx.Client,
    address: Address,
    method: str,
    headers: Mapping[str, str],
    location: str = "",
    *,
    stop_at_link: bool = False,
) -> Iterator[tuple[httpx.Response, str]]:
    """A streamed request through redirects, each hop with the token only if it goes to the token's own origin.

    Yields:
        The answer and where it came from; with ``stop_at_link``, the first redirect that tells of its target, and that
        target.
    """
    url = location or address.url
    for _ in range(MOST_REDIRECTS + 1):
        hop = dict(headers)
        if address.token is not None and address.token_origin and origin(url) == address.token_origin:
            hop["Authorization"] = f"Bearer {address.token.get_secret_value()}"
        with client.stream(method, url, headers=hop) as response:
            if response.status_code not in _REDIRECTS or "location" not in response.headers:
                yield response, url
                return
            onward = urljoin(url, response.headers["location"])
            if not _may_follow(url, onward):
                raise ModelError(
                    f"{shown_url(address.url)} redirects to {shown_url(onward)}, which is not safe",
                    "Use the address that it leads to, if you trust it.",
                    reason="model-fetch",
                )
            linked = response.headers.get("x-linked-size", "").isdigit() and "x-linked-etag" in response.headers
            if stop_at_link and linked:
                yield response, onward
                return
        url = onward
    raise ModelError(
        f"{shown_url(address.url)} redirects more than {MOST_REDIRECTS} times",
        "Check the address.",
        reason="model-fetch",
    )


def _may_follow(url: str, onward: str) -> bool:
    """A redirect may lead to any host, but not from ``https`` to something weaker."""
    try:
        parts = urlsplit(onward)
        return parts.scheme in ("https", urlsplit(url).scheme) and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_status(response: httpx.Response, extra: frozenset[int] = frozenset()) -> None:
    status = response.status_code
    if status in _TRANSIENT_STATUSES or status in extra:
        raise _TransientError(f"the server answers {status}", wait_s=_retry_after(response))
    if status not in (200, 206):
        raise RefusedError(status, response.headers.get("x-error-code", ""))


def _check_encoding(response: httpx.Response, url: str) -> None:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        raise ModelError(
            f"{shown_url(url)} comes compressed ({encoding[:40]}) although that was not asked for",
            "The server, or a proxy on the way, changes files: fetch it by another way and name its path.",
            reason="model-fetch",
        )


def _version(headers: Mapping[str, str]) -> str:
    """What tells versions of the file apart: its ETag or, where there is none, the time of its last change."""
    modified = headers.get("last-modified", "")
    return headers.get("etag", "") or (f"modified {modified}" if modified else "")


def _strong(etag: str) -> str:
    return etag.removeprefix("W/")


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks us to wait; a date counts as not given."""
    try:
        return max(float(response.headers.get("retry-after", "0")), 0.0)
    except ValueError:
        return 0.0


# Patience ------------------------------------------------------------------------------------------------------------


def _http_errors() -> tuple[type[Exception], ...]:
    import httpx

    return (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)


def _failed(error: Exception) -> Exception:
    import httpx

    if isinstance(error, httpx.InvalidURL):
        return ModelError("the address is not a whole one", "Check it.", reason="model-fetch")
    return _TransientError((str(error) or type(error).__name__).splitlines()[0][:200])


def _patiently(action: Callable[[], T], most: int) -> T:
    """``action()``, again while it fails for the moment. Raises :class:`UnreachableError` at last."""
    from tenacity import Retrying, retry_if_exception_type

    failures = 0

    def enough(state: RetryCallState) -> bool:
        nonlocal failures
        error = state.outcome.exception() if state.outcome is not None else None
        failures = 1 if isinstance(error, _TransientError) and error.progressed else failures + 1
        return failures >= most

    def pause(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.wait_s if isinstance(error, _TransientError) else 0.0
        own = FIRST_WAIT_S * 2.0 ** (failures - 1) * random.uniform(0.75, 1.25)
        wait = min(max(asked, own), LONGEST_WAIT_S)
        trace.get_current_span().add_event("fetch again", {"myelin.fetch.why": str(error), "myelin.fetch.wait_s": wait})
        return wait

    try:
        return Retrying(stop=enough, wait=pause, retry=retry_if_exception_type(_TransientError), reraise=True)(action)
    except _TransientError as error:
        raise UnreachableError(str(error)) from None
