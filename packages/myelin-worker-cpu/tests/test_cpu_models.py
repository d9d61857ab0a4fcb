"""Whole stages of synthetic models against the reference engine, over what the compliance suite's models don't vary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from myelin.engine.contract import EngineOptions, Segment, StageBatch
from myelin.engine.reference import ReferenceEngine
from myelin.errors import EngineError
from myelin.model.quant import GgmlType
from myelin.values import SequenceId
from myelin_testkit.chain import Chain, load_stages
from myelin_testkit.engine_compliance import all_logits, prompt
from myelin_testkit.synthetic import Recipe, write_model
from myelin_worker_cpu.engine import CpuEngine
from myelin_worker_cpu.formats import FORMATS

OPTIONS = EngineOptions(threads=1, max_context=320, max_sequences=2, max_batch_tokens=320, kv_dtype="f32")
EXACT = {"*": GgmlType.F32}

FLOAT_MODELS = {
    "llama": Recipe("llama", types=EXACT, rope_freqs=True),
    "llama, odd sizes": Recipe(
        "llama", types=EXACT, width=120, n_heads=5, n_kv_heads=1, head_dim=24, ffn_width=200, vocab_size=321
    ),
    "llama, every head its own": Recipe("llama", types=EXACT, n_heads=3, n_kv_heads=3, head_dim=32),
    "llama, many queries": Recipe("llama", types=EXACT, n_heads=18, n_kv_heads=1, head_dim=16),
    "llama, biases": Recipe("llama", types=EXACT, qkv_bias=True, tied=True),
    "qwen2": Recipe("qwen2", types=EXACT),
    "qwen3": Recipe("qwen3", types=EXACT, head_dim=80),
    "gemma3": Recipe(
        "gemma3", types=EXACT, n_layers=3, sliding_window=70, window_pattern=3, rope_scaling=8.0, tied=True
    ),
    "gemma3, soft cap": Recipe("gemma3", types=EXACT, sliding_window=3, window_pattern=2, final_softcap=30.0),
    "f16": Recipe("llama", types={"*": GgmlType.F16}),
    "bf16": Recipe("llama", types={"*": GgmlType.BF16}),
}


@pytest.fixture
def model(tmp_path: Path) -> Iterator[object]:
    """``model(recipe)``: the CPU engine and the reference engine with it, closed at the end."""
    with ExitStack() as stack:

        def load(
            recipe: Recipe, options: EngineOptions = OPTIONS, references: EngineOptions | None = None
        ) -> tuple[Chain, Chain]:
            path = tmp_path / "model.gguf"
            write_model(recipe, path)
            ours = stack.enter_context(load_stages(CpuEngine, path, options=options))
            return ours, stack.enter_context(load_stages(ReferenceEngine, path, options=references or options))

        yield load


@pytest.mark.parametrize("name", FLOAT_MODELS)
def test_float_models_are_the_references(model, name: str) -> None:
    """Nothing is rounded here but by float32, so every part of the architecture must be exactly right."""
    ours, reference = model(FLOAT_MODELS[name])
    tokens = prompt(210, ours.parameters.vocab_size)
    expected = all_logits(reference, [tokens])
    found = all_logits(ours, [tokens[:150], tokens[150:209], tokens[209:]])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    # positions beyond the first softmax step weigh in: not an accident of short prompts
    assert np.abs(expected[-1] - expected[0]).max() > 1e-2


@pytest.mark.parametrize("ggml_type", sorted(set(FORMATS) - {GgmlType.F32}), ids=lambda kind: kind.name)
def test_a_model_of_one_type_throughout(model, ggml_type: GgmlType) -> None:
    """Embedding, every matrix, and the tied head: within what rounding activations to int8 costs."""
    ours, reference = model(Recipe("llama", types={"*": ggml_type}, tied=True, vocab_size=305))
    tokens = prompt(24, ours.parameters.vocab_size)
    expected, found = all_logits(reference, [tokens]), all_logits(ours, [tokens])
    assert np.linalg.norm(found - expected) < 0.04 * np.linalg.norm(expected)


def test_f16_keys_and_values_cost_little(model) -> None:
    ours, reference = model(FLOAT_MODELS["llama"], replace(OPTIONS, kv_dtype="f16"))
    tokens = prompt(40, ours.parameters.vocab_size)
    expected, found = all_logits(reference, [tokens]), all_logits(ours, [tokens])
    assert 0 < np.linalg.norm(found - expected) < 5e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["llama", "llama, odd sizes", "qwen3", "gemma3"])
def test_q8_0_keys_and_values_cost_little(model, name: str) -> None:
    """Rounded to 8 bits, 32 at a time, in every layer: more than f16 costs, and far less than an error would."""
    ours, reference = model(FLOAT_MODELS[name], replace(OPTIONS, kv_dtype="q8_0"), replace(OPTIONS, kv_dtype="f32"))
    tokens = prompt(150, ours.parameters.vocab_size)
    expected = all_logits(reference, [tokens])
    found = all_logits(ours, [tokens[:70], tokens[70:149], tokens[149:]])
    assert 0 < np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)
    np.testing.assert_array_equal(all_logits(ours, [tokens]), found)


def test_q8_0_takes_little_more_than_half_the_memory(model) -> None:
    halves, _ = model(FLOAT_MODELS["llama"], replace(OPTIONS, kv_dtype="f16"))
    bytes_, _ = model(FLOAT_MODELS["llama"], replace(OPTIONS, kv_dtype="q8_0"), OPTIONS)
    assert bytes_.reports[0].kv_bytes == halves.reports[0].kv_bytes * 17 // 32


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Chain, np.ndarray, list[int]]]:
    """A quantized model, a prompt that spans several compiled calls and softmax steps, and its logits in one go."""
    path = tmp_path_factory.mktemp("mixed") / "model.gguf"
    types = {"*.attn_v.weight": GgmlType.Q6_K, "*.ffn_down.weight": GgmlType.F16, "*": GgmlType.Q4_K}
    write_model(Recipe("qwen3", n_layers=2, types=types, vocab_size=300), path)
    with load_stages(CpuEngine, path, options=OPTIONS) as chain:
        tokens = prompt(300, chain.parameters.vocab_size)
        yield path, chain, all_logits(chain, [tokens]), tokens


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, 299), max_size=6))
def test_no_chunking_changes_a_bit(mixed, cuts: set[int]) -> None:
    _, chain, whole, tokens = mixed
    bounds = [0, *sorted(cuts), len(tokens)]
    chunks = [tokens[first:end] for first, end in pairwise(bounds)]
    np.testing.assert_array_equal(all_logits(chain, chunks), whole)


def test_a_batch_of_many_sequences_changes_no_bit(mixed) -> None:
    """Prompts of other sequences that end, go on, or decode in the same step: each gets what it gets alone."""
    path, _, whole, tokens = mixed
    for threads in (1, 2):
        options = replace(OPTIONS, threads=threads, max_sequences=9)
        with load_stages(CpuEngine, path, options=options) as chain:
            ends = [5, 17, 64, 65, 90, 130, 131, 200]
            for number, end in enumerate(ends):
                chain.feed(SequenceId(number), 0, tokens[: end - 1])
            for count in (2, 4, 5, 8):  # a block of each width, then a prompt that doesn't end among them
                chosen = list(enumerate(ends[:count]))
                segments = [Segment(SequenceId(number), end - 1, 1, output=True) for number, end in chosen]
                ids = [tokens[end - 1] for _, end in chosen]
                beside = [*segments, Segment(SequenceId(8), 0, 40)]
                beside.insert(1, beside.pop())
                for batch, given in (
                    (segments, ids),
                    (beside, [*ids[:1], *tokens[200:240], *ids[1:]]),
                ):
                    output = chain.step(StageBatch(tuple(batch), np.array(given, dtype=np.int32), want_logits=True))
                    assert output.logits is not None
                    np.testing.assert_array_equal(output.logits, whole[[end - 1 for _, end in chosen]])
                    best = [int(whole[end - 1].argmax()) for _, end in chosen]
                    assert [sample.token for sample in output.samples] == best


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_no_number_of_threads_changes_a_bit(mixed, threads: int) -> None:
    path, _, whole, tokens = mixed
    with load_stages(CpuEngine, path, options=replace(OPTIONS, threads=threads)) as chain:
        found = all_logits(chain, [tokens[:290], *[[token] for token in tokens[290:]]])
    np.testing.assert_array_equal(found, whole)


def test_many_steps_with_helpers_that_slept(mixed) -> None:
    """Helpers spin for a while and then sleep in the system: neither may lose a wake-up."""
    import time

    path, _, whole, tokens = mixed
    with load_stages(CpuEngine, path, options=replace(OPTIONS, threads=3)) as chain:
        sequence = chain.new_sequence()
        chain.feed(sequence, 0, tokens[:200])
        for position in range(200, 260):
            if position % 20 == 0:
                time.sleep(0.02)
            logits = chain.feed(sequence, position, [tokens[position]], want_logits=True).logits
            assert logits is not None
            np.testing.assert_array_equal(logits[0], whole[position])


def test_a_slot_is_as_good_as_new(mixed) -> None:
    """What a longer sequence left behind in a slot must not show through."""
    path, _, whole, tokens = mixed
    with load_stages(CpuEngine, path, options=replace(OPTIONS, max_sequences=1)) as chain:
        chain.feed(SequenceId(1), 0, tokens[::-1])
        chain.release(SequenceId(1))
        found = chain.feed(SequenceId(2), 0, tokens[:65], want_logits=True).logits
        assert found is not None
        np.testing.assert_array_equal(found[0], whole[64])


def test_the_memory_held_is_near_the_files(mixed) -> None:
    path, chain, _, _ = mixed
    assert chain.reports[0].weight_bytes < 1.1 * path.stat().st_size
    with pytest.raises(EngineError, match="of weights"):
        load_stages(CpuEngine, path, options=replace(OPTIONS, memory_bytes=chain.reports[0].weight_bytes))


def test_keys_and_values_of_an_unknown_type() -> None:
    with pytest.raises(EngineError, match="q4_0"):
        CpuEngine(EngineOptions(kv_dtype="q4_0"))
