"""The configuration section ``docker``: which daemon, which image, and what a container may use."""

from __future__ import annotations

import re
from importlib.metadata import version

from pydantic import BaseModel, ConfigDict, Field, field_validator

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_GPUS = re.compile(r"all|[1-9]\d*|device=[^\s,]+(,[^\s,]+)*")


class DockerSection(BaseModel):
    """The table ``[docker]`` of the configuration: which daemon, which image, and what a container may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(
        "",
        description="the Docker daemon, such as unix:///var/run/docker.sock, tcp://host:2376 or ssh://user@host",
        json_schema_extra={"environment": ["DOCKER_HOST"]},
    )
    image: str = Field(
        "",
        description="image of the nodes; the one that `myelin docker build` makes for this version where it is empty",
        json_schema_extra={"environment": ["MYELIN_NODE_IMAGE"]},
    )
    gpus: str = Field("", description="GPUs that containers get, as `docker run --gpus` takes them: all, 2, device=0")
    memory: str = Field("", description="memory that a container may use, such as 4g; no limit where it is empty")
    cpus: float = Field(0.0, ge=0, description="processors that a container may use, such as 1.5; 0 is no limit")
    pids: int = Field(1024, ge=16, description="processes and threads that a container may have at most")
    network: str = Field("bridge", description="Docker network of the nodes; host uses the machine's own")
    publish_address: str = Field(
        "127.0.0.1", description="address of the daemon's machine on which the nodes' ports are published"
    )
    cache: str = Field(
        "myelin-cache",
        description="volume for fetched parts of models and compiled kernels; empty keeps nothing",
    )
    user: str = Field("", description="user that nodes run as, such as 1000:1000; the image's own where it is empty")
    read_only: bool = Field(True, description="nodes can write to their cache and to /tmp alone")
    grace_s: float = Field(5.0, ge=0, le=600, description="seconds that a container gets to stop before it is killed")
    timeout_s: float = Field(30.0, gt=0, le=600, description="seconds within which the daemon must answer")

    @field_validator("memory")
    @classmethod
    def _an_amount(cls, text: str) -> str:
        if text and memory_bytes(text) < 6 << 20:
            raise ValueError("write an amount of at least 6 MiB, such as 512m or 4g")
        return text

    @field_validator("network")
    @classmethod
    def _reachable(cls, text: str) -> str:
        if text in ("", "none"):
            raise ValueError("nodes must be reached: name a network, such as bridge")
        return text

    @field_validator("gpus")
    @classmethod
    def _gpus(cls, text: str) -> str:
        if text and not _GPUS.fullmatch(text):
            raise ValueError("write all, a number, or device=0,1")
        return text

    @property
    def memory_limit(self) -> int:
        """Bytes; 0 is no limit."""
        return memory_bytes(self.memory) if self.memory else 0

    @property
    def image_name(self) -> str:
        """The image to run."""
        return self.image or default_image(cuda=bool(self.gpus))


def default_image(*, cuda: bool = False) -> str:
    """The name under which ``myelin docker build`` leaves this version's image."""
    return f"myelin-node:{version('myelin-core')}{'-cuda' if cuda else ''}"


def memory_bytes(text: str) -> int:
    """Bytes of an amount as ``docker run --memory`` takes it (``512m``, ``4g``; powers of 1024); 0 where it is none."""
    match = _AMOUNT.fullmatch(text.strip())
    return int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
