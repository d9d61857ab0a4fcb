"""The plugin: what Myelin finds by the entry point. Importing it costs nothing."""

from __future__ import annotations

from pydantic import BaseModel, Field

from myelin.plugin import ConfigSection, Provider, ProviderContext, hookimpl


class EchoSection(BaseModel, extra="forbid"):
    """The configuration section ``[echo]``."""

    command: tuple[str, ...] = ()
    """What to run as a node; empty is ``python -m myelin worker --boot-stdin`` with the Python that runs Myelin."""
    grace_s: float = Field(default=5.0, gt=0)
    """Seconds that a released node gets to end by itself before it is killed."""
    log_lines: int = Field(default=1000, ge=1)
    """Lines of each node's output that are kept."""


@hookimpl
def myelin_config_section() -> ConfigSection:
    """Settings by ``[echo]``, ``MYELIN_ECHO_GRACE_S`` and ``--set echo.grace_s=1``."""
    return ConfigSection("echo", EchoSection)


@hookimpl
def myelin_provider(name: str, context: ProviderContext) -> Provider | None:
    """The provider, for ``--provider echo``."""
    if name != "echo":
        return None
    from myelin_provider_echo.provider import EchoProvider  # here, so that whoever doesn't use it doesn't pay for it

    return EchoProvider(context.section if isinstance(context.section, EchoSection) else EchoSection())
