"""Model source ``https:``: a GGUF at a URL (the parts of a split one too), read by ranges into the cache."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from myelin.errors import ModelError, UsageError
from myelin.model.opening import close_all
from myelin.model.remote.cache import ModelCache
from myelin.model.remote.file import RemoteFile
from myelin.model.remote.http import (
    Address,
    Answer,
    HttpClient,
    RefusedError,
    UnreachableError,
    ask,
    origin,
    refusal,
    shown_url,
)
from myelin.model.shard import ByteSource
from myelin.model.source import FetchProgress, ModelSource, SourceOptions
from myelin.model.split import part_names
from myelin.plugin import hookimpl

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


class HttpsSource:
    """A file behind a URL."""

    def __init__(self, url: str, options: SourceOptions) -> None:
        self._url = url
        self._options = options
        self._cache = ModelCache(options.cache_dir)

    @property
    def uri(self) -> str:
        """The URL as it was given."""
        return self._url

    def open(self, progress: FetchProgress | None = None) -> tuple[ByteSource, ...]:
        """Ask what the file is (each part of it); its bytes come as they are read.

        Raises:
            ModelError: It isn't there, may not be read, or can't be reached and was never here.
        """
        location, mark, query = self._url.partition("?")
        client = HttpClient()
        if progress is not None:
            progress(0, 0)  # before a connection is tried, which may take a while
        files: list[RemoteFile] = []
        try:
            for name in part_names(location):
                files.append(self._open(client, name + mark + query, progress))  # noqa: PERF401  # closed where one fails
        except BaseException:
            close_all(tuple(files))
            client.close()
            raise
        return tuple(files)

    def _open(self, client: HttpClient, url: str, progress: FetchProgress | None) -> RemoteFile:
        options = self._options
        address = Address(url, options.token, origin(options.hub_endpoint))
        answer = self._cache.recall(url)
        if not options.offline:
            answer = self._ask(client, address, answer)
        elif answer is None:
            raise ModelError(
                f"{shown_url(url)} is not in the cache, and fetching is switched off",
                "Fetch it once with a connection (without offline mode).",
                reason="model-offline",
            )
        name = _UNFIT.sub("_", unquote(urlsplit(url).path).rsplit("/", 1)[-1])[-120:].lstrip(".") or "model.gguf"
        return self._cache.open(None if options.offline else client, address, shown_url(url), name, answer, progress)

    def _ask(self, client: HttpClient, address: Address, known: Answer | None) -> Answer:
        """What the server says now; what it said last where it can't be reached."""
        try:
            answer = ask(client, address, known=known is not None)
        except RefusedError as error:
            raise refusal(shown_url(address.url), error.status) from None
        except UnreachableError as error:
            if known is not None:
                return known
            raise ModelError(
                f"{shown_url(address.url)} can't be fetched: {error}",
                "Check the connection and try again.",
                reason="model-fetch",
            ) from None
        self._cache.remember(address.url, answer)
        return answer


@hookimpl
def myelin_model_source(uri: str, options: SourceOptions) -> ModelSource | None:
    """``https://…``, and ``http://…`` on this machine."""
    scheme = uri.partition(":")[0].lower()
    if scheme not in ("https", "http"):
        return None
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if not host or parts.fragment:
        raise UsageError(f"'{scheme}:' is not followed by a whole address", "Write https://host/path/file.gguf")
    if parts.username or parts.password:
        raise UsageError(
            "the address holds a user name or a password, which would show in plans and logs",
            "Use an address without them, or fetch the file and name its path.",
        )
    if scheme == "http" and host not in _LOOPBACK:
        raise UsageError(
            f"http://{host} could be changed on its way here", "Use https:// (http:// is for this machine only)."
        )
    return HttpsSource(uri, options)
