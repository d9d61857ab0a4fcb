"""The plugin ``docker``: its configuration, its provider, and its commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from myelin.plugin import ConfigSection, Provider, ProviderContext, hookimpl
from myelin_provider_docker.section import DockerSection

if TYPE_CHECKING:
    import typer


@hookimpl
def myelin_config_section() -> ConfigSection:
    """The section ``docker``."""
    return ConfigSection("docker", DockerSection)


@hookimpl
def myelin_provider(name: str, context: ProviderContext) -> Provider | None:
    """The provider, where ``name`` is ``docker``."""
    if name != "docker":
        return None
    from myelin_provider_docker.provider import DockerProvider

    return DockerProvider(context)


@hookimpl
def myelin_commands() -> typer.Typer:
    """``myelin docker build``."""
    from myelin_provider_docker.commands import app

    return app
