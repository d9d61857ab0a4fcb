"""The provider contract, sentence by sentence, on a real cluster of three nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest
from ray_cluster_support import InProcess, ThreeNodes

from myelin.plugin import Provider, ProviderContext, RunId
from myelin_provider_ray.provider import RayProvider
from myelin_provider_ray.section import RaySection
from myelin_testkit import tiny_worker
from myelin_testkit.freezing import freeze, thaw
from myelin_testkit.provider_compliance import PLANTED, Feature, ProviderCompliance

TINY_WORKER = (sys.executable, str(tiny_worker.__file__))


class TestRayProvider(ProviderCompliance):
    """The contract, all of it."""

    features = frozenset(Feature)
    launch_seconds = 0.1
    cluster: ThreeNodes

    @pytest.fixture(autouse=True)
    def _in(self, cluster: ThreeNodes) -> Iterator[None]:
        type(self).cluster = cluster
        yield
        for _ in range(600):
            if not cluster.workers("tiny_worker") and not cluster.actors():
                break
            time.sleep(0.05)
        assert not cluster.workers("tiny_worker"), "a worker is left"
        assert not cluster.actors(), "an actor is left"
        assert PLANTED not in cluster.all_that_is_kept(), "a secret is in Ray's tables or logs"

    def make_provider(self, run: RunId) -> Provider:
        section = RaySection(address=self.cluster.address, overhead_mb=50, call_timeout_s=5, grace_s=2)
        return RayProvider(
            ProviderContext(run, section, 3), command=TINY_WORKER, driver=InProcess(section.call_timeout_s)
        )

    def failing_provider(self, run: RunId) -> Provider:
        """Ray refuses to reserve a place whose labels are none."""
        section = RaySection(address=self.cluster.address, autoscaling=True, labels={"zone": "no label, this"})
        return RayProvider(ProviderContext(run, section, 3), command=TINY_WORKER, driver=InProcess(5))

    def outside(self) -> Collection[object]:
        return self.cluster.groups()  # one for each launch; its actor and its worker come a moment later, see above

    @contextmanager
    def unreadable(self, provider: Provider) -> Iterator[None]:
        head = self.cluster.head()
        freeze(head.pid)
        try:
            yield
        finally:
            thaw(head.pid)
