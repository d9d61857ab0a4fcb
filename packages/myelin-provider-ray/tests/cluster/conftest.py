"""A real Ray cluster on this machine: three raylets, which share its address and its two or so cores."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

# Before Ray is imported by anybody: it reads some of these then. A socket's path has at most 107 characters.
_FOLDER = tempfile.mkdtemp(prefix="r", dir="/tmp")
os.environ |= {"RAY_TMPDIR": _FOLDER, "RAY_TEMP_DIR": _FOLDER, "RAY_USAGE_STATS_ENABLED": "0"}

from ray_cluster_support import ThreeNodes  # noqa: E402 - after the environment is set


@pytest.fixture(scope="session")
def cluster() -> Iterator[ThreeNodes]:
    """Three nodes for all tests that break none."""
    nodes = ThreeNodes()
    yield nodes
    nodes.close()
