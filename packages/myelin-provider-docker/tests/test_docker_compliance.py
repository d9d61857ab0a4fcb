"""The provider passes the suite that anyone's provider does, against a real Docker engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from myelin.plugin import Provider, ProviderContext, RunId
from myelin_provider_docker.provider import DockerProvider
from myelin_testkit.docker_engine import Engine
from myelin_testkit.provider_compliance import Feature, ProviderCompliance


class TestDockerProvider(ProviderCompliance):
    """Every feature: containers outlive the provider's object, and the daemon may not answer."""

    features = frozenset(Feature)
    launch_seconds: ClassVar[float] = 0.5
    pytestmark: ClassVar[list[pytest.MarkDecorator]] = [pytest.mark.asyncio, pytest.mark.docker]
    engine: Engine
    rig: Any

    @pytest.fixture(autouse=True)
    def service(self, engine: Engine, rig: Any) -> None:
        self.engine, self.rig = engine, rig

    def make_provider(self, run: RunId) -> Provider:
        return self.rig.provider(run=str(run))

    def failing_provider(self, run: RunId) -> Provider:
        context = ProviderContext(run, self.rig.section(image="no-such-image:1"))
        return DockerProvider(context, environment={})

    def outside(self) -> Collection[object]:
        return {container["Id"] for container in self.rig.client.containers(all=True)}

    @contextmanager
    def unreadable(self, provider: Provider) -> Iterator[None]:
        assert isinstance(provider, DockerProvider)
        client = provider._daemon.api()
        before, client.timeout = client.timeout, 1.0
        self.engine.freeze()
        try:
            yield
        finally:
            self.engine.thaw()
            client.timeout = before
