"""The hooks of this package: the section ``vastai`` and the provider of that name."""

from __future__ import annotations

from myelin.plugin import ConfigSection, Provider, ProviderContext, hookimpl
from myelin_provider_vastai.section import VastaiSection


@hookimpl
def myelin_config_section() -> ConfigSection:
    """The section ``vastai``."""
    return ConfigSection("vastai", VastaiSection)


@hookimpl
def myelin_provider(name: str, context: ProviderContext) -> Provider | None:
    """The provider, where ``name`` is ``vastai``."""
    if name != "vastai":
        return None
    from myelin_provider_vastai.provider import VastaiProvider

    return VastaiProvider(context)
