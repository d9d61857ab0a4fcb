"""A real Ray cluster on this machine: three raylets, which share its address and its two or so cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray_cluster_support import ThreeNodes, end_shared, lent


@pytest.fixture
def cluster() -> Iterator[ThreeNodes]:
    """Three nodes, for all tests that leave them as they were."""
    yield from lent()


@pytest.fixture(autouse=True, scope="session")
def _ended() -> Iterator[None]:
    yield
    end_shared()
