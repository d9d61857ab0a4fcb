"""docs/ray/raycluster.yaml, as Ray's own reader takes it, which the autoscaler of KubeRay uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

MANIFEST = Path(__file__).parents[4] / "docs" / "ray" / "raycluster.yaml"


@pytest.fixture
def manifest() -> dict[str, Any]:
    document = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def test_ray_reads_the_cluster_that_was_meant(manifest: dict[str, Any]) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    config = _derive_autoscaling_config_from_ray_cr(manifest)  # it checks its result against the schema in Ray's wheel
    head, stages = config["available_node_types"]["headgroup"], config["available_node_types"]["stages"]
    assert head["resources"]["CPU"] == 0, "no stage on the head"
    assert stages["resources"]["CPU"] == 4
    assert stages["resources"]["memory"] == 16 << 30
    assert (stages["min_workers"], stages["max_workers"]) == (0, 4)
    assert config["idle_timeout_minutes"] == 5


def test_a_mistake_would_be_found(manifest: dict[str, Any]) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    del manifest["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    with pytest.raises(KeyError):
        _derive_autoscaling_config_from_ray_cr(manifest)


def test_the_version_is_the_one_that_is_tested(manifest: dict[str, Any]) -> None:
    import ray

    assert manifest["spec"]["rayVersion"] == ray.__version__
