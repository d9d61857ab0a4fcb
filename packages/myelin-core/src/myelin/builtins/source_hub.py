"""Model source ``hf:owner/repository/file.gguf[@revision]``: a file on the Hugging Face Hub, fetched whole.

The Hub's own client fetches it, into a cache of its own layout under ``<cache_dir>/hub``. Once opened,
:attr:`HubSource.uri` names the commit, so that every node opens the same bytes whatever happens to the branch.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from myelin.errors import ModelError, UsageError
from myelin.model.local import open_all
from myelin.model.shard import ByteSource
from myelin.model.source import FetchProgress, ModelSource, SourceOptions
from myelin.model.split import part_names
from myelin.plugin import hookimpl

_SPELLING = re.compile(
    r"hf:(?://)?(?P<owner>[A-Za-z0-9][A-Za-z0-9._-]*)/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)/"
    r"(?P<file>[^@?#]+\.gguf)(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ATTEMPTS = 5
_LONGEST_S = 60.0  # after which no new attempt begins; the client makes attempts of its own too
_CACHE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS})
_HTTP_LIBRARIES = frozenset({"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"})


class HubSource:
    """A file of a repository on the Hub."""

    def __init__(self, repository: str, file: str, revision: str, options: SourceOptions) -> None:
        self._repository = repository
        self._file = file
        self._revision = revision
        self._options = options

    @property
    def uri(self) -> str:
        """``hf:owner/repository/file@revision``; the revision is a commit once the source has been opened."""
        return f"hf:{self._repository}/{self._file}@{self._revision}"

    def open(self, progress: FetchProgress | None = None) -> tuple[ByteSource, ...]:
        """Fetch what isn't in the cache, and open it; pins the revision to its commit.

        Raises:
            ModelError: The repository, revision or file doesn't exist, access is denied, or the Hub can't be reached
                and the file isn't in the cache.
        """
        paths: list[Path] = []
        names = part_names(self._file)
        counter = _Counter(progress, len(names))
        counter.report(0, 0)  # before a connection is tried, which may take a while
        for name in names:
            path = self._fetch(name, counter)
            paths.append(path)
            counter.finished(path.stat().st_size)
            self._pin(path, name)
        return open_all(paths)

    def _pin(self, path: Path, name: str) -> None:
        """The cache's layout is ``…/snapshots/<commit>/<file>``."""
        commit = path.parents[name.count("/")].name
        if _COMMIT.fullmatch(commit):
            self._revision = commit

    def _fetch(self, name: str, counter: _Counter) -> Path:
        from tenacity import (
            Retrying,
            retry_if_exception,
            stop_after_attempt,
            stop_after_delay,
            wait_exponential,
            wait_random,
        )

        for attempt in Retrying(
            stop=stop_after_attempt(_ATTEMPTS) | stop_after_delay(_LONGEST_S),
            wait=wait_exponential(multiplier=0.5, max=20.0) + wait_random(0.0, 0.5),
            retry=retry_if_exception(lambda error: isinstance(error, _TransientError)),
            retry_error_callback=_give_up,
        ):
            with attempt:
                return self._fetch_once(name, counter)
        raise AssertionError("a retried call neither returned nor raised")

    def _fetch_once(self, name: str, counter: _Counter) -> Path:
        import huggingface_hub as hub

        _quieten()
        token = self._options.token
        more: dict[str, Any] = {}
        if counter.wanted and _takes_progress(hub.hf_hub_download):
            more["tqdm_class"] = counter.bar_class()
        try:
            return Path(
                hub.hf_hub_download(
                    self._repository,
                    name,
                    revision=self._revision,
                    cache_dir=self._options.cache_dir / "hub",
                    # False, not None: a token that the client finds by itself is not ours to send.
                    token=token.get_secret_value() if token is not None else False,
                    local_files_only=self._options.offline,
                    endpoint=self._options.hub_endpoint,
                    library_name="myelin",
                    **more,
                )
            )
        except Exception as error:
            translated = self._translate(error, name)
            if translated is None:
                raise
            raise translated from None

    def _translate(self, error: Exception, name: str) -> Exception | None:
        """What the Hub client's error means to a person; None for what isn't the Hub's or the network's doing."""
        from huggingface_hub import errors

        repository, shown, have_token = self._repository, f"{self._repository}/{name}", self._options.token is not None

        def cannot(message: str, hint: str, reason: str) -> ModelError:
            return ModelError(message, hint, reason=reason)

        # Ordered from the particular to the general: a gated repository is also «not found» to the client.
        if isinstance(error, errors.GatedRepoError):
            return cannot(
                f"the repository {repository} is gated",
                "The account of HF_TOKEN has not been granted access: accept the terms on the repository's page."
                if have_token
                else "Accept its terms on its page, and set HF_TOKEN to a token of that account.",
                "model-denied",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return cannot(
                f"{repository} has no revision '{self._revision}'",
                "Name a branch, a tag or a commit of it after the @.",
                "model-missing",
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return cannot(
                f"there is no repository {repository} on the Hub that we may see",
                "Check its name, and that the account of HF_TOKEN may see it."
                if have_token
                else "Check its name; if it is private, set HF_TOKEN.",
                "model-missing",
            )
        if isinstance(error, errors.LocalEntryNotFoundError):
            if self._options.offline:
                return cannot(
                    f"{shown} is not in the cache, and fetching is switched off",
                    "Fetch it once with a connection (without offline mode).",
                    "model-offline",
                )
            cause = error.__cause__ or error
            if isinstance(cause, errors.HfHubHTTPError):
                return _TransientError(f"{shown} can't be fetched: {_first_line(cause)}")
            return cannot(
                f"the Hub can't be reached for {shown}: {_first_line(cause)}",
                f"Check the connection and the Hub's address ({self._options.hub_endpoint}).",
                "model-fetch",
            )
        if isinstance(error, errors.EntryNotFoundError):
            return cannot(
                f"{repository} has no file {name} at {self._revision[:12]}",
                "Look up the file's exact name on the repository's page.",
                "model-missing",
            )
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code if error.response is not None else 0
            if status in (401, 403):
                return cannot(
                    f"the Hub does not let us read {shown}: it answers {status}",
                    "Check the token in HF_TOKEN." if have_token else "Set HF_TOKEN to a token that may read it.",
                    "model-denied",
                )
            if status in (0, 408, 429) or status >= 500:
                return _TransientError(f"{shown} can't be fetched: the Hub answers {status}")
            return cannot(f"{shown} can't be fetched: the Hub answers {status}", "Check the name.", "model-fetch")
        if isinstance(error, OSError) and error.errno in _CACHE_ERRORS:
            return cannot(
                f"{shown} can't be kept in {self._options.cache_dir}: {error.strerror}",
                "Free some space there or name another cache folder (MYELIN_MODEL_CACHE_DIR).",
                "model-cache",
            )
        if isinstance(error, ValueError):
            return cannot(f"{shown} can't be fetched: {_first_line(error)}", "Check the name.", "model-fetch")
        # Cut bodies and lost connections come as several kinds, by the client's version and its HTTP library.
        library = type(error).__module__.partition(".")[0]
        if isinstance(error, OSError | RuntimeError) or library in _HTTP_LIBRARIES:
            return _TransientError(f"{shown} can't be fetched: {_first_line(error)}")
        return None


def _quieten() -> None:
    """The Hub's client tells of each of its attempts in lines of its own, twice; what comes of them is in our error."""
    import logging

    import huggingface_hub.utils.logging  # noqa: F401  # it sets its level when it is imported

    if not logging.getLogger("myelin").isEnabledFor(logging.INFO):
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


class _TransientError(Exception):
    """The fetch may work in a moment."""


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def _give_up(state: Any) -> None:
    """What tenacity calls after the last attempt."""
    raise ModelError(
        str(state.outcome.exception()),
        "Check the connection and try again: finished files are kept.",
        reason="model-fetch",
    ) from None


def _takes_progress(function: Callable[..., object]) -> bool:
    import inspect

    return "tqdm_class" in inspect.signature(function).parameters


class _Counter:
    """Adds up the bytes of all parts for whoever shows them."""

    def __init__(self, progress: FetchProgress | None, files: int) -> None:
        self._progress = progress
        self._files_left = files
        self._before = 0

    @property
    def wanted(self) -> bool:
        """Somebody listens."""
        return self._progress is not None

    def report(self, done: int, total: int) -> None:
        """Of the file that is being fetched; the whole is known only with the last one."""
        if self._progress is not None:
            self._progress(self._before + done, self._before + total if total and self._files_left == 1 else 0)

    def finished(self, size: int) -> None:
        """A file is there (an old client has said nothing meanwhile)."""
        self.report(size, size)
        self._before += size
        self._files_left -= 1

    def bar_class(self) -> type[Any]:
        """What the Hub's client takes for a progress bar (the few methods of ``tqdm`` that it calls)."""
        counter = self

        class Bar:
            def __init__(
                self, *arguments: object, total: float | None = None, initial: float = 0, **more: object
            ) -> None:
                self.total = total
                self.n = initial
                self.disable = True
                counter.report(int(self.n), int(self.total or 0))

            def update(self, count: float | None = 1) -> None:
                self.n += count or 0
                counter.report(int(self.n), int(self.total or 0))

            def refresh(self, *arguments: object, **more: object) -> None:
                counter.report(int(self.n), int(self.total or 0))

            def set_description(self, *arguments: object, **more: object) -> None: ...

            def set_postfix_str(self, *arguments: object, **more: object) -> None: ...

            def close(self) -> None: ...

            def __enter__(self) -> Bar:
                return self

            def __exit__(
                self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
            ) -> None:
                self.close()

        return Bar


@hookimpl
def myelin_model_source(uri: str, options: SourceOptions) -> ModelSource | None:
    """``hf:owner/repository/file.gguf``, with ``@revision`` or on the branch ``main``."""
    if not uri.lower().startswith("hf:"):
        return None
    match = _SPELLING.fullmatch(uri)
    if match is None or ".." in match["file"].split("/"):
        raise UsageError(
            f"'{uri}' does not name a file on the Hub", "Write it as hf:owner/repository/file.gguf[@revision]"
        )
    return HubSource(f"{match['owner']}/{match['name']}", match["file"], match["revision"] or "main", options)
