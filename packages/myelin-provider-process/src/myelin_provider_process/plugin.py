"""The plugin ``process``: its configuration and its provider."""

from __future__ import annotations

from myelin.plugin import ConfigSection, Provider, ProviderContext, hookimpl
from myelin_provider_process.section import ProcessSection


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
