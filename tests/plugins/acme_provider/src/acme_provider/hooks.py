"""A provider whose machines are all taken."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from pydantic import BaseModel, SecretStr

from myelin.plugin import (
    BootSpec,
    ConfigSection,
    LaunchKey,
    Lease,
    LeaseId,
    LogLine,
    Need,
    Offer,
    Provider,
    ProviderContext,
    ProviderError,
    hookimpl,
)


class AcmeSection(BaseModel):
    """The table ``[acme]``."""

    region: str = "north"
    key: SecretStr | None = None


class AcmeProvider:
    """Offers nothing, and says in which region."""

    def __init__(self, region: str) -> None:
        self._region = region

    async def offers(self, need: Need) -> Sequence[Offer]:
        """None."""
        raise ProviderError(f"all machines in the {self._region} are taken", "try another region with acme.region")

    async def launch(self, offer: Offer, boot: BootSpec, *, key: LaunchKey) -> Lease:
        """Nothing was offered."""
        raise ProviderError("nothing was offered")

    async def leases(self) -> Sequence[Lease]:
        """None."""
        return ()

    async def release(self, lease: LeaseId) -> None:
        """There is none."""

    async def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        """Nothing was written."""
        for line in ():
            yield line

    async def close(self) -> None:
        """Nothing is held."""


@hookimpl
def myelin_config_section() -> ConfigSection:
    """The section ``acme``."""
    return ConfigSection("acme", AcmeSection)


@hookimpl
def myelin_provider(name: str, context: ProviderContext) -> Provider | None:
    """The provider, with its section."""
    assert isinstance(context.section, AcmeSection)
    return AcmeProvider(context.section.region)
