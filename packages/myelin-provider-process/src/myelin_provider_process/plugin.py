"""The plugin ``process``: its configuration and its provider."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from myelin.plugin import ConfigSection, Provider, ProviderContext, hookimpl


class ProcessSection(BaseModel):
    """The configuration section ``process``."""

    model_config = ConfigDict(extra="forbid")

    grace_s: float = Field(default=5.0, gt=0, le=600)
    """How long a node gets to end by itself before it is killed, in seconds."""
    python: str = ""
    """The interpreter that runs nodes; empty is the one that runs Myelin."""
    log_lines: int = Field(default=2000, ge=1, le=1_000_000)
    """Lines of each node's output that are kept; older ones are dropped."""


@hookimpl
def myelin_config_section() -> ConfigSection:
    """``[process]`` in the configuration."""
    return ConfigSection("process", ProcessSection)


@hookimpl
def myelin_provider(name: str, context: ProviderContext) -> Provider | None:
    """The provider, where ``name`` is ``process``."""
    if name != "process":
        return None
    from myelin_provider_process.provider import ProcessProvider

    return ProcessProvider(context)
