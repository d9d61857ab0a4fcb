"""Model source ``https:``: a GGUF at a URL, fetched whole into the cache (the parts of a split one too)."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from myelin.errors import UsageError
from myelin.model.download import Download, fetch, origin
from myelin.model.local import open_all
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

    @property
    def uri(self) -> str:
        """The URL as it was given."""
        return self._url

    def open(self, progress: FetchProgress | None = None) -> tuple[ByteSource, ...]:
        """Fetch what isn't in the cache, and open it. Errors as :func:`myelin.model.download.fetch`."""
        location, mark, query = self._url.partition("?")
        urls = [name + mark + query for name in part_names(location)]
        paths: list[Path] = []
        before = 0

        def report(done: int, total: int) -> None:
            if progress is not None:
                # The size of later parts isn't known yet.
                whole = before + total if total and len(paths) == len(urls) - 1 else 0
                progress(before + done, whole)

        for url in urls:
            download = Download(
                url,
                self._place(url),
                token=self._options.token,
                token_origin=origin(self._options.hub_endpoint),
            )
            path = fetch(download, offline=self._options.offline, progress=report)
            before += path.stat().st_size
            paths.append(path)
        return open_all(paths)

    def _place(self, url: str) -> Path:
        """A folder for each URL, so that files of one name from two places stay apart."""
        name = _UNFIT.sub("_", unquote(urlsplit(url).path).rsplit("/", 1)[-1])[-120:].lstrip(".") or "model.gguf"
        return self._options.cache_dir / "https" / hashlib.sha256(url.encode()).hexdigest()[:20] / name


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
