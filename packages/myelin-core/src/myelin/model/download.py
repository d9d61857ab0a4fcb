"""Fetching a whole file over HTTP into a cache: resumed where it was cut, checked, and shared by processes.

Beside ``file`` lie, while needed: ``file.part`` (what has come so far), ``file.json`` (which URL, ETag and size it
is), ``file.part.json`` (the same of the part) and ``file.lock``, held by the one process that fetches; others wait and
report the part's growth. A finished file appears by an atomic rename and is asked about with its ETag the next time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit, urlunsplit

from pydantic import SecretStr

from myelin.errors import ModelError
from myelin.model.source import FetchProgress

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

MOST_FAILURES = 6
"""Attempts in a row that may bring not a single byte."""
MOST_REDIRECTS = 8
LONGEST_WAIT_S = 30.0
_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Download:
    """What to fetch, and who may know our token.

    Attributes:
        url: Where it is.
        target: Where it shall be.
        token: Sent as a bearer token to ``token_origin`` alone (``scheme://host:port``), never to another that it
            redirects to.
        connect_timeout_s, read_timeout_s: How long a connection, and silence in the middle of a body, may take.
        first_wait_s: The pause after the first failure; it doubles with each further one.
    """

    url: str
    target: Path
    token: SecretStr | None = None
    token_origin: str = ""
    connect_timeout_s: float = 15.0
    read_timeout_s: float = 30.0
    first_wait_s: float = 0.5

    @property
    def source(self) -> str:
        """A digest of the URL."""
        return hashlib.sha256(self.url.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Version:
    """Which content of a URL this is; ``size`` -1 is unknown. The URL is kept as a digest: it may hold a signature."""

    source: str
    etag: str
    size: int


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


def fetch(download: Download, *, offline: bool = False, progress: FetchProgress | None = None) -> Path:
    """Bring the file to ``download.target`` unless the same content is there. Blocking; safe between processes.

    A complete copy is used as it is where the server can't be reached.

    Raises:
        ModelError: It isn't there (404), may not be read (401, 403), can't be reached and there is no copy, is cut
            short again and again, or the disk is full.
    """
    target = download.target
    if offline:
        if _complete(download) is not None:
            return target
        raise ModelError(
            f"{shown_url(download.url)} is not in the cache, and fetching is switched off",
            "Fetch it once with a connection (without offline mode).",
            reason="model-offline",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target, progress):
            _fetch_locked(download, progress or _silent)
    except OSError as error:
        raise ModelError(
            f"{target.name} can't be kept in {target.parent}: {error.strerror or error}",
            "Free some space there or name another cache folder (MYELIN_MODEL_CACHE_DIR).",
            reason="model-cache",
        ) from None
    return target


def _silent(done: int, total: int) -> None:
    """Progress that nobody looks at."""


# Files beside the target ---------------------------------------------------------------------------------------------


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _complete(download: Download) -> _Version | None:
    """The version of the finished file, if there is one whose size is right."""
    return _version_of(download, download.target)


def _version_of(download: Download, path: Path) -> _Version | None:
    try:
        noted = json.loads(_beside(path, ".json").read_text("utf-8"))
        version = _Version(str(noted["source"]), str(noted["etag"]), int(noted["size"]))
        size = path.stat().st_size
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = path == download.target
    return version if version.source == download.source and (size == version.size if whole else True) else None


def _note(path: Path, version: _Version) -> None:
    """Write ``path``.json, whole or not at all."""
    temporary = _beside(path, f".json.{os.getpid()}")
    temporary.write_text(json.dumps(asdict(version)), "utf-8")
    os.replace(temporary, _beside(path, ".json"))


@contextlib.contextmanager
def _locked(target: Path, progress: FetchProgress | None) -> Iterator[None]:
    """Hold the target's lock; while another process holds it, report how its part grows."""
    from filelock import FileLock, Timeout

    lock = FileLock(_beside(target, ".lock"))
    while True:
        try:
            lock.acquire(timeout=0.5)
            break
        except Timeout:
            if progress is not None:
                with contextlib.suppress(OSError):
                    progress(_beside(target, ".part").stat().st_size, 0)
    try:
        yield
    finally:
        lock.release()


# The fetch itself ---------------------------------------------------------------------------------------------------


def _fetch_locked(download: Download, progress: FetchProgress) -> None:
    import httpx
    from tenacity import Retrying, retry_if_exception_type

    failures = 0

    def enough(state: RetryCallState) -> bool:
        nonlocal failures
        error = state.outcome.exception() if state.outcome is not None else None
        failures = 1 if isinstance(error, _TransientError) and error.progressed else failures + 1
        # With a whole copy at hand there is no point in waiting long for news of it.
        return failures >= (2 if _complete(download) is not None else MOST_FAILURES)

    def pause(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.wait_s if isinstance(error, _TransientError) else 0.0
        own = download.first_wait_s * 2.0 ** (failures - 1) * random.uniform(0.75, 1.25)
        return min(max(asked, own), LONGEST_WAIT_S)

    timeout = httpx.Timeout(download.read_timeout_s, connect=download.connect_timeout_s)
    with httpx.Client(timeout=timeout, follow_redirects=False) as client:
        try:
            for attempt in Retrying(
                stop=enough, wait=pause, retry=retry_if_exception_type(_TransientError), reraise=True
            ):
                with attempt:
                    _attempt(download, client, progress)
        except _TransientError as error:
            if _complete(download) is not None:
                return
            raise ModelError(
                f"{shown_url(download.url)} can't be fetched: {error}",
                "Check the connection and try again: what has come so far is kept.",
                reason="model-fetch",
            ) from None


def _attempt(download: Download, client: httpx.Client, progress: FetchProgress) -> None:
    """One request: nothing new, the rest of the part, or all of it.

    Raises:
        _TransientError: It may work in a moment.
        ModelError: It won't.
    """
    import httpx

    part = _beside(download.target, ".part")
    complete, begun = _complete(download), _version_of(download, part)
    have = part.stat().st_size if begun is not None and begun.etag else 0
    headers = {"Accept-Encoding": "identity"}
    if complete is not None and complete.etag:
        headers["If-None-Match"] = complete.etag
    if begun is not None and have:
        headers["Range"] = f"bytes={have}-"
        headers["If-Range"] = begun.etag
    progressed = False
    try:
        with _following(download, client, headers) as response:
            version = _judge(download, response, complete, begun, have)
            if version is None:
                return
            if response.status_code == 206:
                at = have
            else:
                at = 0
                _note(part, version)
            if version.size >= 0:
                _check_space(part.parent, version.size - at)
            with part.open("r+b" if at else "wb") as file:
                file.seek(at)
                file.truncate()
                progress(at, max(version.size, 0))
                # As they come: a chunk size would hold bytes back, and lose them where the body is cut.
                for chunk in response.iter_raw():
                    file.write(chunk)
                    at += len(chunk)
                    progressed = True
                    progress(at, max(version.size, 0))
                file.flush()
                os.fsync(file.fileno())
    except httpx.InvalidURL:
        raise ModelError(
            f"{shown_url(download.url)} is not a whole address", "Check it.", reason="model-fetch"
        ) from None
    except httpx.HTTPError as error:
        what = str(error) or type(error).__name__
        raise _TransientError(what[:200], progressed=progressed) from None
    if version.size >= 0 and at != version.size:
        raise _TransientError(f"only {at} of {version.size} bytes came", progressed=progressed)
    _note(download.target, _Version(version.source, version.etag, at))
    os.replace(part, download.target)
    with contextlib.suppress(OSError):
        _beside(part, ".json").unlink()


@contextlib.contextmanager
def _following(download: Download, client: httpx.Client, headers: dict[str, str]) -> Iterator[httpx.Response]:
    """A streamed GET through redirects, each hop with the token only if it goes to the token's own origin."""
    url = download.url
    for _ in range(MOST_REDIRECTS + 1):
        hop = dict(headers)
        if download.token is not None and download.token_origin and origin(url) == download.token_origin:
            hop["Authorization"] = f"Bearer {download.token.get_secret_value()}"
        with client.stream("GET", url, headers=hop) as response:
            if response.status_code not in (301, 302, 303, 307, 308) or "location" not in response.headers:
                yield response
                return
            onward = urljoin(url, response.headers["location"])
        if not _may_follow(url, onward):
            raise ModelError(
                f"{shown_url(download.url)} redirects to {shown_url(onward)}, which is not safe",
                "Use the address that it leads to, if you trust it.",
                reason="model-fetch",
            )
        url = onward
    raise ModelError(
        f"{shown_url(download.url)} redirects more than {MOST_REDIRECTS} times",
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


def _judge(
    download: Download,
    response: httpx.Response,
    complete: _Version | None,
    begun: _Version | None,
    have: int,
) -> _Version | None:
    """What the answer means: None where our whole copy is still right, otherwise the version whose bytes follow."""
    status, shown = response.status_code, shown_url(download.url)
    if status == 304 and complete is not None:
        return None
    if status in _TRANSIENT_STATUSES:
        raise _TransientError(f"the server answers {status}", wait_s=_retry_after(response))
    if status in (401, 403):
        raise ModelError(
            f"{shown} may not be read: the server answers {status}",
            "Ask its owner for access; a token (HF_TOKEN) is sent to the Hub only.",
            reason="model-denied",
        )
    if status in (404, 410):
        raise ModelError(f"there is no file at {shown}", "Check the address.", reason="model-missing")
    if status == 416:
        _forget_part(download)
        raise _TransientError("the server no longer has the bytes that were missing", progressed=True)
    if status not in (200, 206):
        raise ModelError(f"{shown} answers {status}", "Check the address.", reason="model-fetch")
    if response.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise ModelError(
            f"{shown} comes compressed ({response.headers['content-encoding'][:40]}) although that was not asked for",
            "The server, or a proxy on the way, changes files: fetch it by another way and name its path.",
            reason="model-fetch",
        )
    etag = response.headers.get("etag", "")
    if status == 206:
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        total = int(found[3]) if found is not None else -1
        right = found is not None and int(found[1]) == have and int(found[2]) == total - 1
        if begun is None or not right or begun.size not in (-1, total) or etag not in ("", begun.etag):
            _forget_part(download)
            raise _TransientError("the server sent other bytes than were asked for")
        return _Version(download.source, begun.etag, total)
    length = response.headers.get("content-length", "")
    size = int(length) if length.isdigit() else -1
    if complete is not None and not complete.etag and not etag and size == complete.size:
        return None  # no ETag at all: the size is the only sign
    return _Version(download.source, "" if etag.startswith("W/") else etag, size)


def _forget_part(download: Download) -> None:
    part = _beside(download.target, ".part")
    for path in (_beside(part, ".json"), part):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks us to wait; a date counts as not given."""
    try:
        return max(float(response.headers.get("retry-after", "0")), 0.0)
    except ValueError:
        return 0.0


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(
            f"{folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are still to come",
            "Free some space there or name another cache folder (MYELIN_MODEL_CACHE_DIR).",
            reason="model-cache",
        )
