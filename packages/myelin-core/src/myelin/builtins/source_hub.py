"""Model source ``hf:owner/repository/file.gguf[@revision]``: a file on the Hugging Face Hub, read by ranges.

Once opened, :attr:`HubSource.uri` names the commit, so that every node opens the same bytes whatever happens to the
branch. A file that the Hub's own tools have fetched to this machine is used where it lies.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from myelin.errors import ModelError, UsageError
from myelin.model.local import open_all
from myelin.model.opening import close_all
from myelin.model.remote import hub_cache
from myelin.model.remote.cache import ModelCache
from myelin.model.remote.file import RemoteFile
from myelin.model.remote.http import Address, Answer, HttpClient, RefusedError, UnreachableError, ask, origin
from myelin.model.shard import ByteSource
from myelin.model.source import PUBLIC_HUB, FetchProgress, ModelSource, SourceOptions
from myelin.model.split import part_names
from myelin.plugin import hookimpl

_SPELLING = re.compile(
    r"hf:(?://)?(?P<owner>[A-Za-z0-9][A-Za-z0-9._-]*)/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)/"
    r"(?P<file>[^@?#]+\.gguf)(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?"
)


class HubSource:
    """A file of a repository on the Hub."""

    def __init__(self, repository: str, file: str, revision: str, options: SourceOptions) -> None:
        self._repository = repository
        self._file = file
        self._revision = revision
        self._options = options
        self._cache = ModelCache(options.cache_dir)

    @property
    def uri(self) -> str:
        """``hf:owner/repository/file@revision``; the revision is a commit once the source has been opened."""
        return f"hf:{self._repository}/{self._file}@{self._revision}"

    def open(self, progress: FetchProgress | None = None) -> tuple[ByteSource, ...]:
        """Pin the revision to its commit, and ask what the file is (each part of it); its bytes come as they are read.

        Raises:
            ModelError: The repository, revision or file doesn't exist, access is denied, or the Hub can't be reached
                and the file was never here.
        """
        names = part_names(self._file)
        client = HttpClient()
        if progress is not None:
            progress(0, 0)  # before a connection is tried, which may take a while
        files: list[RemoteFile] = []
        try:
            first, trouble = self._pinned(client, names[0])
            found = hub_cache.find(self._options.hub_cache_dir, self._repository, names, self._revision)
            if found is not None:
                self._revision = found[0]
                client.close()
                return open_all(found[1])
            if trouble is not None:
                raise trouble
            for name in names:
                answer = first if first is not None else self._ask(client, name)
                first = None
                files.append(self._open(client, name, answer, progress))
        except BaseException:
            close_all(tuple(files))
            client.close()
            raise
        return tuple(files)

    def _pinned(self, client: HttpClient, name: str) -> tuple[Answer | None, ModelError | None]:
        """Pin a branch or tag by asking about the first file; a Hub that can't be reached is not yet the end."""
        if self._options.offline or hub_cache.is_commit(self._revision):
            return None, None
        try:
            return self._ask(client, name), None
        except ModelError as error:
            if error.reason != "model-fetch":
                raise
            return None, error

    def _open(self, client: HttpClient, name: str, answer: Answer, progress: FetchProgress | None) -> RemoteFile:
        # Without the commit: a file that two commits share is kept once.
        source = f"hf:{self._repository}/{name}"
        if self._options.hub_endpoint != PUBLIC_HUB:
            source += f" at {self._options.hub_endpoint}"
        offline = self._options.offline
        shown = name.rsplit("/", 1)[-1]
        return self._cache.open(None if offline else client, self._address(name), source, shown, answer, progress)

    def _address(self, name: str) -> Address:
        options = self._options
        endpoint = options.hub_endpoint.rstrip("/")
        url = f"{endpoint}/{self._repository}/resolve/{quote(self._revision, safe='')}/{quote(name)}"
        return Address(url, options.token, origin(endpoint), is_hub=True)

    def _ask(self, client: HttpClient, name: str) -> Answer:
        """What the Hub says of a file; a commit is asked about once in the cache's life."""
        address = self._address(name)
        known = self._cache.recall(address.url)
        shown = f"{self._repository}/{name}"
        if known is None or not (self._options.offline or hub_cache.is_commit(self._revision)):
            if self._options.offline:
                raise ModelError(
                    f"{shown} is not in the cache, and fetching is switched off",
                    "Fetch it once with a connection (without offline mode).",
                    reason="model-offline",
                )
            try:
                known = ask(client, address, known=known is not None)
            except RefusedError as error:
                raise self._refusal(error, shown) from None
            except UnreachableError as error:
                if known is None:
                    raise ModelError(
                        f"the Hub can't be reached for {shown}: {error}",
                        f"Check the connection and the Hub's address ({self._options.hub_endpoint}).",
                        reason="model-fetch",
                    ) from None
            self._cache.remember(address.url, known)
        if hub_cache.is_commit(known.commit) and known.commit != self._revision:
            self._revision = known.commit
            self._cache.remember(self._address(name).url, known)
        return known

    def _refusal(self, error: RefusedError, shown: str) -> ModelError:
        """The Hub's no, in words."""
        repository, have_token = self._repository, self._options.token is not None
        if error.code == "GatedRepo":
            return ModelError(
                f"the repository {repository} is gated",
                "The account of HF_TOKEN has not been granted access: accept the terms on the repository's page."
                if have_token
                else "Accept its terms on its page, and set HF_TOKEN to a token of that account.",
                reason="model-denied",
            )
        if error.code == "RevisionNotFound":
            return ModelError(
                f"{repository} has no revision '{self._revision}'",
                "Name a branch, a tag or a commit of it after the @.",
                reason="model-missing",
            )
        if error.code == "EntryNotFound":
            return ModelError(
                f"{repository} has no file {shown.removeprefix(repository + '/')} at {self._revision[:12]}",
                "Look up the file's exact name on the repository's page.",
                reason="model-missing",
            )
        # The Hub answers 401 for what doesn't exist, too: strangers aren't told which repositories there are.
        if error.code == "RepoNotFound" or error.status in (401, 404):
            return ModelError(
                f"there is no repository {repository} on the Hub that we may see",
                "Check its name, and that the account of HF_TOKEN may see it."
                if have_token
                else "Check its name; if it is private, set HF_TOKEN.",
                reason="model-missing",
            )
        if error.status == 403:
            return ModelError(
                f"the Hub does not let us read {shown}: it answers 403",
                "Check the token in HF_TOKEN." if have_token else "Set HF_TOKEN to a token that may read it.",
                reason="model-denied",
            )
        return ModelError(
            f"{shown} can't be fetched: the Hub answers {error.status}", "Check the name.", reason="model-fetch"
        )


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
