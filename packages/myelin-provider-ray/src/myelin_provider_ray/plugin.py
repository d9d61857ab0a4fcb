"""The hooks of this package: the section ``ray`` and the provider of that name. Ray itself isn't imported for them."""

from __future__ import annotations

from myelin.plugin import ConfigSection, Provider, ProviderContext, hookimpl
from myelin_provider_ray.section import RaySection


@hookimpl
def myelin_config_section() -> ConfigSection:
    """The section ``ray``."""
    return ConfigSection("ray", RaySection)


@hookimpl
def myelin_provider(name: str, context: ProviderContext) -> Provider | None:
    """The provider, where ``name`` is ``ray``."""
    if name != "ray":
        return None
    from myelin_provider_ray.provider import RayProvider

    return RayProvider(context)
