"""Loading a stage from a real file, through the real plugins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from myelin.cluster.boot import CORES_VARIABLE
from myelin.engine.contract import Segment, StageBatch
from myelin.errors import ModelError, PluginError, UsageError, WireError
from myelin.model.digest import header_digest
from myelin.model.gguf import read_facts
from myelin.model.source import SourceOptions
from myelin.plugins.registry import Registry
from myelin.values import SequenceId
from myelin.wire import control_pb2 as control
from myelin.worker.provision import StageRequest, load_stage, node_cores, source_options, stage_request
from myelin_testkit.synthetic import Recipe, write_model

RECIPE = Recipe(n_layers=4)
Loaded = Callable[..., tuple[Any, list[tuple[str, int, int]]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(RECIPE, tmp_path_factory.mktemp("model") / "tiny.gguf")[0]


def message(model: Path, **changes: Any) -> control.Provision:
    fields: dict[str, Any] = {
        "id": 1,
        "model_uri": str(model),
        "engine": "reference",
        "options": control.EngineOptions(threads=1, max_context=32, max_sequences=2, max_batch_tokens=8),
        "stage_index": 0,
        "stage_count": 2,
        "first_layer": 0,
        "end_layer": 2,
    }
    return control.Provision(**{**fields, **changes})


@pytest.fixture
def load(model: Path, tmp_path: Path) -> Iterator[Loaded]:
    registry = Registry.discover()
    closing: list[Any] = []

    def loaded(**changes: Any) -> tuple[Any, list[tuple[str, int, int]]]:
        told: list[tuple[str, int, int]] = []
        request = stage_request(
            message(model, **changes), default_engine="reference", default_cache_dir=tmp_path, default_threads=3
        )
        stage = load_stage(request, registry, {}, lambda *progress: told.append(progress))
        closing.append(stage)
        return stage, told

    yield loaded
    for stage in closing:
        stage.close()


def test_a_stage_is_loaded_and_computes(load: Loaded, model: Path) -> None:
    stage, told = load(end_tokens=[7, 9])
    assert (stage.index, stage.count, stage.width, stage.vocab_size) == (0, 2, RECIPE.width, RECIPE.vocab_size)
    assert (stage.slice.is_head, stage.slice.is_tail) == (True, False)
    assert stage.end_tokens == {7, 9}
    assert stage.threads == 1
    assert 0 < stage.fetched_bytes < model.stat().st_size
    assert stage.report.weight_bytes > 0
    assert told[0] == ("open", 0, 0)
    assert told[-1][0] == "load"
    assert told[-1][1] == told[-1][2] > 0
    output = stage.engine.step(StageBatch((Segment(SequenceId(1), 0, 3),), tokens=np.array([1, 2, 3], dtype=np.int32)))
    assert output.hidden.shape == (3, RECIPE.width)


def test_the_planned_model_is_recognised(load: Loaded, model: Path, tmp_path: Path) -> None:
    parts = Registry.discover().model_source(str(model), SourceOptions(tmp_path)).open()
    digest = header_digest(read_facts(parts), parts)
    sizes = [part.size for part in parts]
    for part in parts:
        part.close()
    load(part_sizes=sizes, header_digest=digest)
    for changes in (
        {"part_sizes": [sizes[0] + 1]},
        {"part_sizes": sizes * 2},
        {"header_digest": bytes(32)},
        {"stage_index": 1, "first_layer": 2, "end_layer": 5},
        {"stage_index": 1, "first_layer": 2, "end_layer": 3},
        {"end_layer": 4},
    ):
        with pytest.raises(ModelError) as caught:
            load(**changes)
        assert caught.value.reason == "different-model"


def test_what_is_missing_is_named(load: Loaded, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing"):
        load(model_uri=str(tmp_path / "nothing.gguf"))
    with pytest.raises(UsageError):
        load(model_uri="gopher:model")
    with pytest.raises(PluginError, match="no-such-engine"):
        load(engine="no-such-engine")


@pytest.mark.parametrize(
    "changes",
    [
        {"stage_index": 2},
        {"end_layer": 0},
        {"first_layer": 1},
        {"stage_index": 1},
        {"options": control.EngineOptions(max_context=0, max_sequences=1, max_batch_tokens=1)},
        {"options": control.EngineOptions(max_context=1, max_sequences=0, max_batch_tokens=1)},
        {"options": control.EngineOptions(max_context=1, max_sequences=1, max_batch_tokens=2**32 - 1)},
    ],
)
def test_a_request_that_makes_no_sense_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(WireError):
        stage_request(message(tmp_path, **changes), default_engine="cpu", default_cache_dir=tmp_path, default_threads=3)


def test_defaults_fill_what_is_left_out(tmp_path: Path) -> None:
    def filled(**changes: Any) -> StageRequest:
        return stage_request(
            message(tmp_path, **changes), default_engine="cpu", default_cache_dir=tmp_path, default_threads=3
        )

    request = filled(engine="")
    assert (request.engine, request.cache_dir, request.options.kv_dtype) == ("cpu", tmp_path, "f16")
    assert filled(model_cache_dir="/elsewhere").cache_dir == Path("/elsewhere")
    limits = {"max_context": 8, "max_sequences": 1, "max_batch_tokens": 8}
    assert filled(options=control.EngineOptions(**limits)).options.threads == 3
    assert filled(options=control.EngineOptions(threads=5, **limits)).options.threads == 5


def test_a_node_uses_the_cores_that_it_was_told_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_cores({CORES_VARIABLE: "3"}) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5}, raising=False)
    for odd in ({}, {CORES_VARIABLE: ""}, {CORES_VARIABLE: "0"}, {CORES_VARIABLE: "-1"}, {CORES_VARIABLE: "many"}):
        assert node_cores(odd) == 2


def test_the_hubs_variables_reach_the_source(tmp_path: Path) -> None:
    options = source_options(tmp_path, {"HF_HUB_CACHE": "/hub"})
    assert options == SourceOptions(tmp_path, hub_cache_dir=Path("/hub"))
    assert source_options(tmp_path, {"HF_HOME": "/home"}).hub_cache_dir == Path("/home/hub")
    options = source_options(
        tmp_path, {"HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:1/"}
    )
    assert options.token is not None
    assert options.token.get_secret_value() == "hf_secret"
    assert "hf_secret" not in repr(options)
    assert (options.offline, options.hub_endpoint) == (True, "http://127.0.0.1:1")
