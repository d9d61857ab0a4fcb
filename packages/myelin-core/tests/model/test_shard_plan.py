"""Shard plans and the summary of a header that goes with them."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import ModelError
from myelin.model.architecture import describe, stage_tensors
from myelin.model.facts import ModelFacts
from myelin.model.gguf import read_facts
from myelin.model.local import open_files
from myelin.model.shard import SMALL_GAP, StageSlice, plan_shard
from myelin.model.summary import MOST_BYTES, pack_facts, unpack_facts
from myelin_testkit.models import smollm2_path
from myelin_testkit.synthetic import Recipe, write_model


def facts_of(path: Path) -> ModelFacts:
    files = open_files(path)
    try:
        return read_facts(files)
    finally:
        for file in files:
            file.close()


@pytest.mark.parametrize("recipe", [Recipe(n_layers=4), Recipe("gemma3", n_layers=6), Recipe("qwen3", n_layers=3)])
def test_the_ranges_hold_the_stages_tensors_and_little_else(recipe: Recipe, tmp_path: Path) -> None:
    facts = facts_of(write_model(recipe, tmp_path / "m.gguf")[0])
    parameters = describe(facts)
    for cut in range(1, parameters.n_layers):
        for first, end in ((0, cut), (cut, parameters.n_layers)):
            plan = plan_shard(facts, parameters, StageSlice(first, end, parameters.n_layers))
            names = stage_tensors(facts, parameters, first, end)
            assert plan.tensors == len(names)
            assert plan.tensor_bytes == sum(facts.tensors[name].nbytes for name in names)
            for name in names:
                tensor = facts.tensors[name]
                assert any(
                    piece.part == tensor.part
                    and piece.start <= tensor.offset
                    and tensor.offset + tensor.nbytes <= piece.end
                    for piece in plan.ranges
                )
            assert plan.tensor_bytes <= plan.range_bytes <= plan.tensor_bytes + SMALL_GAP * len(names)
            assert plan.fraction == plan.range_bytes / facts.total_bytes
            assert all(
                before.part != after.part or before.end + SMALL_GAP < after.start
                for before, after in zip(plan.ranges, plan.ranges[1:], strict=False)
            )


def test_a_real_models_stages_need_few_ranges() -> None:
    facts = facts_of(smollm2_path())
    parameters = describe(facts)
    for first, end in ((0, 10), (10, 20), (20, 30), (0, 30)):
        plan = plan_shard(facts, parameters, StageSlice(first, end, 30))
        assert len(plan.ranges) <= 4
        assert plan.range_bytes <= 1.001 * plan.tensor_bytes


def test_a_summary_describes_the_same_model(tmp_path: Path) -> None:
    paths = [write_model(Recipe("gemma3", n_layers=6), tmp_path / "m.gguf")[0], smollm2_path()]
    for path in paths:
        facts = facts_of(path)
        summary = pack_facts(facts)
        assert len(summary) < 16_000 < MOST_BYTES
        again = unpack_facts(summary)
        assert describe(again) == describe(facts)
        assert dict(again.tensors) == dict(facts.tensors)
        assert again.parts == facts.parts


@given(noise=st.binary(max_size=200))
def test_what_is_no_summary_is_one_error(noise: bytes) -> None:
    for text in (noise, zlib.compress(noise)):
        with pytest.raises(ModelError) as caught:
            unpack_facts(text)
        assert caught.value.reason == "model-header"


@pytest.mark.parametrize(
    "tensor",
    [
        ["t", 0, [4], 1, 0, 16],
        ["t", 0, [4], -1, 0, 16],
        ["t", 0, [4], 0, 90, 16],
        ["t", 0, [4], 0, -1, 16],
        ["t", 0, [4], 0, 0, 17],
        ["t", 0, [0], 0, 0, 0],
        ["t", 0, [], 0, 0, 4],
        ["t", 99999, [4], 0, 0, 16],
        ["t", 0, [4]],
    ],
)
def test_a_summary_of_what_cannot_be_is_refused(tensor: list[object]) -> None:
    import json

    document = {"architecture": "llama", "metadata": {}, "parts": [["m", 100, 10]], "tensors": [tensor]}
    with pytest.raises(ModelError):
        unpack_facts(zlib.compress(json.dumps(document).encode()))


def test_a_summary_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(ModelError):
        unpack_facts(zlib.compress(b" " * (64 << 20)))
