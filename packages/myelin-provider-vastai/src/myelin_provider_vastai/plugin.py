"""The hooks of this package. It can't rent machines yet, and says so."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from myelin.plugin import ConfigSection, hookimpl


class VastaiSection(BaseModel):
    """The table ``[vastai]`` of the configuration: the account, and what a machine must have to be rented."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    api_key: SecretStr | None = Field(
        None,
        description="key of the Vast.ai account",
        json_schema_extra={"environment": ["VAST_API_KEY", "VASTAI_API_KEY"]},
    )
    gpu_name: str = Field("", description="name of the GPU, such as RTX 3090; any where it is empty")
    min_gpu_ram_gb: float = Field(0.0, ge=0, description="memory of the GPU in GB, at least")
    max_dollars_per_hour: float = Field(0.0, ge=0, description="price of a machine at most; 0 is no limit")
    min_reliability: float = Field(0.0, ge=0, le=1, description="the host's reliability, at least")


@hookimpl
def myelin_config_section() -> ConfigSection:
    """The section ``vastai``."""
    return ConfigSection("vastai", VastaiSection)


@hookimpl
def myelin_not_ready() -> str:
    """It doesn't rent machines in this version."""
    return "renting machines on Vast.ai comes in a later version"
