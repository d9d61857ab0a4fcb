"""A real Ray cluster on this machine: three raylets, which share its address and its two or so cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray_cluster_support import ThreeNodes, short_folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreeNodes]:
    """Three nodes for all tests of a module."""
    with short_folder():
        nodes = ThreeNodes()
        yield nodes
        nodes.close()
