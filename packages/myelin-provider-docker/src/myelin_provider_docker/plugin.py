"""The hooks of this package. It can't start containers yet, and says so."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from myelin.plugin import ConfigSection, hookimpl


class DockerSection(BaseModel):
    """The table ``[docker]`` of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: str = Field("", description="GPUs that containers get, as `docker run --gpus` takes them: all, 2, device=0")


@hookimpl
def myelin_config_section() -> ConfigSection:
    """The section ``docker``."""
    return ConfigSection("docker", DockerSection)


@hookimpl
def myelin_not_ready() -> str:
    """It doesn't start containers in this version."""
    return "starting nodes as containers comes in a later version"
