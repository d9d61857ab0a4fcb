"""The SDK's errors in words for people. The SDK is imported by whoever has met one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from myelin.plugin import ProviderError

_SHOWN_CHARACTERS = 300


@contextmanager
def explained(doing: str, host: str) -> Iterator[None]:
    """Turn what the SDK raises within the block into a :class:`ProviderError`.

    Args:
        doing: What failed then, to begin a sentence: ``stage-0 could not be started``.
        host: The daemon, as a person would name it.
    """
    import docker.errors
    import requests

    try:
        yield
    except docker.errors.APIError as error:
        raise _refused(doing, " ".join(str(error.explanation or error.response.reason or "").split())) from error
    except requests.exceptions.Timeout as error:
        raise ProviderError(
            f"{doing}: the Docker daemon at {host} did not answer in time",
            "look at the daemon, or raise docker.timeout_s",
            reason="daemon-timeout",
        ) from error
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise unreachable(error, host) from error


def unreachable(error: BaseException, host: str) -> ProviderError:
    """The error for a daemon that can't be talked to."""
    told = " ".join(str(error).split())
    if "Permission denied" in told:
        return ProviderError(
            f"the Docker daemon at {host} may not be used by this user",
            "add the user to the group docker, or set DOCKER_HOST to a daemon of your own",
            reason="daemon-permission",
        )
    if "Install paramiko" in told:
        return ProviderError(
            f"the Docker daemon at {host} is reached through SSH, which needs the package paramiko",
            "python -m pip install 'myelin-provider-docker[ssh]'",
            reason="daemon-unreachable",
        )
    why = f" ({_root(error)})" if _root(error) else ""
    return ProviderError(
        f"the Docker daemon at {host} can't be reached{why}",
        "start Docker, or set DOCKER_HOST (docker.host) to where it listens",
        reason="daemon-unreachable",
    )


def _root(error: BaseException) -> str:
    """The system's own words for what lies under the SDK's errors."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.strerror:
            return error.strerror.lower()
        inner = [argument for argument in error.args if isinstance(argument, BaseException)]
        below = error.__cause__ or error.__context__ or getattr(error, "reason", None) or (inner[0] if inner else None)
        if not isinstance(below, BaseException):
            return ""
        error = below
    return ""


def _refused(doing: str, told: str) -> ProviderError:
    """The error for an answer of the daemon that is no success."""
    lower = told.lower()
    if "no such image" in lower:
        return ProviderError(
            f"{doing}: its image is not there ({told[:_SHOWN_CHARACTERS]})",
            "make it with `myelin docker build`, or pull it; docker.image names another",
            reason="image-missing",
        )
    if "could not select device driver" in lower or "nvidia-container" in lower:
        return ProviderError(
            f"{doing}: Docker can't give it GPUs ({told[:_SHOWN_CHARACTERS]})",
            "install the NVIDIA Container Toolkit on the daemon's machine, or leave docker.gpus empty",
            reason="no-gpu",
        )
    if "bind source path does not exist" in lower:
        return ProviderError(
            f"{doing}: a file to mount is not on the daemon's machine ({told[:_SHOWN_CHARACTERS]})",
            "with a remote daemon, name a model that nodes can fetch (hf: or https:)",
            reason="mount-missing",
        )
    if "port is already allocated" in lower or "address already in use" in lower:
        return ProviderError(f"{doing}: {told[:_SHOWN_CHARACTERS]}", "try again", reason="port-taken")
    return ProviderError(f"{doing}: {told[:_SHOWN_CHARACTERS]}", "see the Docker daemon's log", reason="refused")
