"""The Docker daemon, as far as nodes need it. Every method blocks: the provider calls them in threads."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from myelin.plugin import Endpoint, LogLine, ProviderError, parse_announcement
from myelin_provider_docker.containers import ContainerPlan, creation
from myelin_provider_docker.frames import frames, log_line
from myelin_provider_docker.labels import key_of
from myelin_provider_docker.section import DockerSection
from myelin_provider_docker.troubles import explained

LOCAL = "unix:///var/run/docker.sock"
CREATE_TRIES = 5
HALF_MADE_S = 5.0
"""How long a container that somebody has created may wait for its start before it counts as abandoned."""
GONE_S = 15.0
"""How long a removed container may take to be gone."""
_TAIL_LINES = 20


class Daemon:
    """A daemon, connected to at the first use.

    Args:
        section: Where it listens, and how long it may take.
        environment: Where ``DOCKER_HOST`` and its companions for TLS are looked up.
    """

    def __init__(self, section: DockerSection, environment: Mapping[str, str] = os.environ) -> None:
        self._section = section
        self._environment = environment
        self.host = section.host or environment.get("DOCKER_HOST", "") or LOCAL
        self._api: Any = None
        self._connecting = threading.Lock()

    @property
    def local(self) -> bool:
        """Whether its containers run on this machine (or in a virtual machine of it)."""
        return self.host.startswith(("unix:", "npipe:"))

    @property
    def reached_at(self) -> str:
        """The host at which its published ports are reached from here."""
        return "127.0.0.1" if self.local else urlsplit(self.host).hostname or "127.0.0.1"

    def information(self) -> dict[str, Any]:
        """``GET /info``: processors, memory, runtimes."""
        with explained("the Docker daemon could not be asked what it has", self.host):
            answer: dict[str, Any] = self.api().info()
            return answer

    def listed(self, filters: Mapping[str, list[str]]) -> list[dict[str, Any]]:
        """Containers in any state, as ``GET /containers/json`` has them."""
        with explained("the containers could not be listed", self.host):
            found: list[dict[str, Any]] = self.api().containers(all=True, filters=dict(filters))
            return found

    def inspected(self, container: str) -> dict[str, Any] | None:
        """All that the daemon knows of a container; None where there is none."""
        import docker.errors

        with explained("a container could not be inspected", self.host):
            try:
                answer: dict[str, Any] = self.api().inspect_container(container)
            except docker.errors.NotFound:
                return None
            return answer

    def start(self, plan: ContainerPlan, boot_line: bytes) -> tuple[str, bool]:
        """Create and start a container that has ``boot_line`` on its standard input.

        Where its name is taken, the container that has it is the answer, whatever became of it; one that was created
        and never started is removed, and made anew: nobody knows what its input holds.

        Returns:
            Its id, and whether this call has made it.

        Raises:
            ProviderError: It could not be started; nothing is left of it.
        """
        import docker.errors
        import requests

        key = key_of(plan.labels)
        with explained(f"{key.node if key else plan.name} could not be started", self.host):
            for _ in range(CREATE_TRIES):
                try:
                    container = str(self.api().create_container(**creation(self.api(), plan))["Id"])
                except docker.errors.APIError as error:
                    if error.status_code != 409:
                        raise
                    if existing := self._settled(plan.name):
                        return existing, False
                    continue
                except requests.exceptions.RequestException:
                    with suppress(Exception):  # it may have been made all the same
                        self.remove_unstarted(plan.name)
                    raise
                try:
                    with self.handed_over(container, boot_line):
                        self.api().start(container)
                except BaseException:
                    with suppress(Exception):
                        self.remove(container)
                    raise
                return container, True
        raise ProviderError(
            f"the name {plan.name} is taken by a container that comes and goes",
            "see `docker ps --all`",
            reason="name-taken",
        )

    def remove(self, container: str, *, grace_s: float = 0.0) -> None:
        """Stop a container, kill it after ``grace_s`` seconds, remove it, and return once it is gone. Unknown: done.

        Raises:
            ProviderError: It could not be removed, or not be shown to be gone.
        """
        import docker.errors

        with explained(f"the container {container} could not be removed", self.host):
            deadline = time.monotonic() + GONE_S + grace_s
            if grace_s:
                with suppress(docker.errors.APIError):  # it may have ended meanwhile; its removal kills it anyway
                    self.api().stop(container, timeout=max(1, round(grace_s)))
            while True:
                try:
                    self.api().remove_container(container, v=True, force=True)
                except docker.errors.NotFound:
                    pass
                except docker.errors.APIError as error:
                    if error.status_code != 409 or time.monotonic() > deadline:  # 409: somebody else is removing it
                        raise
                if self.inspected(container) is None:
                    return
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        raise ProviderError(
            f"the container {container} could not be shown to be gone", "see `docker ps --all`", reason="release-failed"
        )

    def remove_unstarted(self, name: str) -> bool:
        """Remove the container ``name`` where there is one that was never started; whether there was."""
        found = self.inspected(name)
        if found is None or found["State"]["Status"] != "created":
            return False
        self.remove(str(found["Id"]))
        return True

    def announced(self, container: str) -> Endpoint | None:
        """What the worker in a container has announced, if it has."""
        for stream, payload in self._output(container, follow=False, stdout=1, stderr=0):
            endpoint = parse_announcement(payload.decode(errors="replace").rstrip()) if stream == "stdout" else None
            if endpoint is not None:
                return endpoint
        return None

    def last_errors(self, container: str) -> list[str]:
        """The last lines of a container's standard error."""
        found = self._output(container, follow=False, stdout=0, stderr=1, tail=_TAIL_LINES)
        return [payload.decode(errors="replace").rstrip() for _, payload in found]

    def follow(self, container: str, take: Callable[[LogLine], None], stop: Stop) -> None:
        """Hand over each line of a container from its first, until it has ended, or ``stop`` is told."""
        for stream, payload in self._output(container, follow=True, stop=stop, stdout=1, stderr=1, timestamps=1):
            if (line := log_line(stream, payload)) is not None:
                take(line)

    def close(self) -> None:
        """Close connections. Twice is fine; it connects anew where it is used again."""
        with self._connecting:
            api, self._api = self._api, None
        if api is not None:
            api.close()

    def api(self) -> Any:
        """The SDK's client. Connecting asks the daemon for its version.

        Raises:
            ProviderError: The daemon can't be reached.
        """
        with self._connecting:
            if self._api is None:
                self._api = self._connected()
            return self._api

    def _connected(self) -> Any:
        import docker
        from docker.utils import kwargs_from_env

        with explained("the Docker daemon could not be reached", self.host):
            settings = kwargs_from_env(environment={"DOCKER_HOST": self.host, **self._tls()})
            return docker.APIClient(
                **settings,
                version="auto",
                timeout=self._section.timeout_s,
                max_pool_size=32,
                user_agent="myelin",
            )

    def _tls(self) -> dict[str, str]:
        names = ("DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
        return {name: self._environment[name] for name in names if name in self._environment and not self.local}

    def _settled(self, name: str) -> str:
        """The id of the container that has ``name``, once it is more than half made; empty where there is none now."""
        deadline = time.monotonic() + HALF_MADE_S
        while True:
            found = self.inspected(name)
            if found is None:
                return ""
            status = found["State"]["Status"]
            if status not in ("created", "removing"):
                return str(found["Id"])
            if time.monotonic() > deadline:
                if status == "created":
                    self.remove(str(found["Id"]))
                return ""
            time.sleep(0.05)

    @contextmanager
    def handed_over(self, container: str, line: bytes) -> Iterator[None]:
        """Write to a container's standard input before it starts: the daemon keeps it for the first read.

        It is then in the daemon's hands, so that there is no moment in which a started node waits for a word that
        never comes. The bytes are in no list, log or description of the container.
        """
        attached = self.api().attach_socket(container, params={"stdin": 1, "stream": 1})
        channel = getattr(attached, "_sock", attached)
        try:
            channel.sendall(line)
            yield
        finally:
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)  # what has been sent still arrives
            with suppress(OSError, ValueError):
                getattr(attached, "_response", attached).close()

    def _output(
        self, container: str, *, follow: bool, stop: Stop | None = None, **what: int
    ) -> Iterator[tuple[str, bytes]]:
        """Frames of a container's log; none where there is no such container."""
        import docker.errors
        import requests
        import urllib3
        from docker.types import CancellableStream

        api = self.api()
        # The SDK's own method joins the two streams into one.
        address = f"{api.base_url}/v{api.api_version}/containers/{container}/logs"
        timeout = (self._section.timeout_s, None if follow else self._section.timeout_s)
        with explained("the output of a container could not be read", self.host):
            response = api.get(address, params={**what, "follow": int(follow)}, stream=True, timeout=timeout)
            with response:
                if response.status_code in (404, 409):  # gone, or on its way
                    return
                try:
                    response.raise_for_status()
                except requests.exceptions.HTTPError as error:
                    raise docker.errors.APIError(error, response=response, explanation=response.text) from error
                if stop is not None:
                    stop.arm(CancellableStream(iter(()), response).close)
                try:
                    yield from frames(response.raw.read)
                except urllib3.exceptions.ReadTimeoutError as error:  # the rest of it is unknown, and not empty
                    raise requests.exceptions.ReadTimeout(str(error)) from error
                except (urllib3.exceptions.HTTPError, OSError):
                    return  # cut off: by us, or by its removal


class Stop:
    """Ends a read that blocks in another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = False
        self._cut: Callable[[], None] | None = None

    def arm(self, cut: Callable[[], None]) -> None:
        """There is something to cut now; at once, where it was told before."""
        with self._lock:
            self._cut = cut
            told = self._told
        if told:
            self._do(cut)

    def tell(self) -> None:
        """Cut."""
        with self._lock:
            self._told, cut = True, self._cut
        if cut is not None:
            self._do(cut)

    @staticmethod
    def _do(cut: Callable[[], None]) -> None:
        with suppress(Exception):  # the stream may have ended by itself
            cut()


def reaches_containers(daemon: Daemon, information: Mapping[str, Any]) -> bool:
    """Whether this process can talk to containers by their own addresses: those of a daemon on this very Linux."""
    desktop = "docker desktop" in str(information.get("OperatingSystem", "")).lower()
    return daemon.local and sys.platform.startswith("linux") and not desktop
