"""What every engine must do, as a test class: subclass :class:`EngineCompliance` in a test module.

::

    class TestMyEngine(EngineCompliance):
        def make_engine(self, options: EngineOptions) -> Engine:
            return MyEngine(options)

All of it runs on small synthetic models. Equal means equal bit for bit: the contract demands that what a row gives
depend neither on the rows around it, nor on how a prompt was cut into chunks, nor on how layers were cut into stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from myelin.engine.contract import Engine, EngineOptions, Progress, Segment, StageBatch
from myelin.engine.reference import ReferenceEngine
from myelin.engine.sampling import choose
from myelin.errors import EngineError
from myelin.model.quant import GgmlType
from myelin.values import SamplingParams, SequenceId
from myelin_testkit.chain import Chain, EngineFactory, load_stages, log_softmax
from myelin_testkit.synthetic import Recipe, write_model

RECIPES = {
    "llama": Recipe(
        "llama",
        n_layers=4,
        types={"token_embd.weight": GgmlType.Q6_K, "*.ffn_down.weight": GgmlType.Q4_1, "*": GgmlType.Q4_0},
        tied=True,
        rope_freqs=True,
    ),
    "qwen2": Recipe(
        "qwen2",
        n_layers=3,
        vocab_size=333,
        types={"*.attn_v.weight": GgmlType.Q8_0, "*.ffn_*": GgmlType.Q5_0, "*": GgmlType.Q5_1},
    ),
    "qwen3": Recipe(
        "qwen3",
        n_layers=3,
        types={"*.attn_*": GgmlType.Q5_K, "*.ffn_down.weight": GgmlType.Q6_K, "*": GgmlType.Q4_K},
    ),
    "gemma3": Recipe(
        "gemma3",
        n_layers=4,
        n_kv_heads=1,
        vocab_size=307,
        sliding_window=9,
        window_pattern=2,
        rope_scaling=4.0,
        types={"token_embd.weight": GgmlType.Q8_0, "*.ffn_gate.weight": GgmlType.F16, "*": GgmlType.Q4_K},
        tied=True,
    ),
}
"""One small model of each family, together with most of what a file may bring."""

OPTIONS = EngineOptions(threads=2, max_context=96, max_sequences=3, max_batch_tokens=64)


class Loader:
    """Loads one model as often as it is asked to, and closes everything at the end.

    Attributes:
        path: The model.
    """

    def __init__(self, make_engine: EngineFactory, path: Path) -> None:
        self.path = path
        self._make_engine = make_engine
        self._chains: list[Chain] = []

    def __call__(
        self, cuts: Sequence[int] = (), options: EngineOptions = OPTIONS, progress: Progress | None = None
    ) -> Chain:
        """The model as a chain of stages."""
        self._chains.append(load_stages(self._make_engine, self.path, cuts, options, progress))
        return self._chains[-1]

    def close(self) -> None:
        """Close every chain."""
        for chain in self._chains:
            chain.close()


class EngineCompliance(ABC):
    """Subclass it as ``Test…`` and say how an engine is made.

    Attributes:
        recipes: Names of :data:`RECIPES` that the engine computes.
        agreement: How far the log-probabilities of the five best tokens may be from the reference engine's, on average;
            0.05 suits an engine that rounds activations to int8.
    """

    recipes: ClassVar[Sequence[str]] = tuple(RECIPES)
    agreement: ClassVar[float] = 0.05

    @abstractmethod
    def make_engine(self, options: EngineOptions) -> Engine:
        """A new engine with nothing loaded."""

    @pytest.fixture(params=tuple(RECIPES))
    def load(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
        """Loads the model of each recipe in turn: ``load(cuts=(), options=OPTIONS)``."""
        if request.param not in self.recipes:
            pytest.skip(f"the engine doesn't compute {request.param}")
        loader = Loader(self.make_engine, _model_file(request.param, tmp_path_factory))
        yield loader
        loader.close()

    @pytest.fixture
    def chain(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
        """One model, loaded as one stage."""
        path = _model_file(self.recipes[0], tmp_path_factory)
        with load_stages(self.make_engine, path, options=OPTIONS) as chain:
            yield chain

    # Loading.

    def test_step_before_load_is_an_error(self) -> None:
        engine = self.make_engine(OPTIONS)
        with pytest.raises(EngineError):
            engine.step(StageBatch((Segment(SequenceId(1), 0, 1),), np.zeros(1, np.int32)))
        engine.close()

    def test_load_reports_what_it_holds(self, load: Loader) -> None:
        seen: list[tuple[str, int, int]] = []
        chain = load(progress=lambda *report: seen.append(report))
        assert chain.reports[0].weight_bytes > 0
        assert chain.reports[0].kv_bytes > 0
        assert chain.reports[0].seconds > 0
        assert {phase for phase, _, _ in seen} <= {"compile", "load"}
        for phase in ("compile", "load"):
            done = [count for name, count, _ in seen if name == phase]
            assert done == sorted(done)
        last = [report for report in seen if report[0] == "load"][-1]
        assert last[1] == last[2] > 0

    def test_close_twice_is_fine(self, chain: Chain) -> None:
        chain.close()
        chain.close()

    def test_a_memory_bound_is_respected(self, load: Loader) -> None:
        with pytest.raises(EngineError):
            load(options=replace(OPTIONS, memory_bytes=4096))

    # What comes out.

    def test_agrees_with_the_reference(self, load: Loader) -> None:
        loaded = load()
        tokens = prompt(40, loaded.parameters.vocab_size)
        ours = np.concatenate(list(loaded.logits(tokens, chunk=64)))
        with load_stages(ReferenceEngine, load.path, options=OPTIONS) as reference:
            theirs = np.concatenate(list(reference.logits(tokens, chunk=64)))
        assert top_difference(theirs, ours) <= self.agreement

    def test_samples_come_from_the_logits(self, load: Loader) -> None:
        chain = load()
        tokens = prompt(7, chain.parameters.vocab_size)
        for sampling in (SamplingParams(), SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=5)):
            output = chain.feed(chain.new_sequence(), 0, tokens, sampling=sampling, want_logits=True)
            assert output.hidden is None
            assert output.logits is not None
            assert output.logits.shape == (1, chain.parameters.vocab_size)
            assert output.logits.dtype == np.float32
            (sample,) = output.samples
            assert sample.position == len(tokens)
            assert sample.token == choose(output.logits[0], sampling, len(tokens))[0]
            assert sample.logprob == pytest.approx(log_softmax(output.logits[0])[sample.token], abs=1e-4)

    def test_only_asked_for_outputs(self, chain: Chain) -> None:
        first, second, third = (chain.new_sequence() for _ in range(3))
        segments = (Segment(first, 0, 3, output=True), Segment(second, 0, 2), Segment(third, 0, 4, output=True))
        tokens = np.array(prompt(9, chain.parameters.vocab_size), np.int32)
        output = chain.step(StageBatch(segments, tokens, want_logits=True))
        assert [(sample.sequence, sample.position) for sample in output.samples] == [(first, 3), (third, 4)]
        assert output.logits is not None
        assert len(output.logits) == 2
        silent = chain.step(StageBatch((Segment(second, 2, 1),), tokens[:1]))
        assert silent.samples == ()
        assert silent.logits is None

    def test_a_head_gives_hidden_states(self, load: Loader) -> None:
        chain = load(cuts=(1,))
        tokens = np.array(prompt(5, chain.parameters.vocab_size), np.int32)
        given = tokens.copy()
        output = chain.engines[0].step(StageBatch((Segment(SequenceId(9), 0, 5, output=True),), tokens))
        assert output.samples == ()
        assert output.hidden is not None
        assert output.hidden.shape == (5, chain.parameters.width)
        assert output.hidden.dtype == np.float32
        assert output.hidden.flags.c_contiguous
        assert np.isfinite(output.hidden).all()
        np.testing.assert_array_equal(tokens, given)

    # Invariance.

    @pytest.mark.parametrize("seed", range(3))
    def test_chunks_do_not_matter(self, load: Loader, seed: int) -> None:
        chain = load()
        generator = np.random.default_rng(seed)
        tokens = prompt(45, chain.parameters.vocab_size, seed)
        whole = all_logits(chain, [tokens])
        chunks: list[list[int]] = []
        rest = tokens
        while rest:
            size = int(generator.integers(1, 17))
            chunks.append(rest[:size])
            rest = rest[size:]
        np.testing.assert_array_equal(whole, all_logits(chain, chunks))
        np.testing.assert_array_equal(whole, all_logits(chain, [[token] for token in tokens]))

    @pytest.mark.parametrize("seed", range(3))
    def test_neighbours_do_not_matter(self, load: Loader, seed: int) -> None:
        chain = load()
        generator = np.random.default_rng(seed)
        prompts = [prompt(int(size), chain.parameters.vocab_size, seed) for size in generator.integers(20, 40, 3)]
        alone = [all_logits(chain, [tokens]) for tokens in prompts]
        names = [chain.new_sequence() for _ in prompts]
        done = [0, 0, 0]
        while any(count < len(tokens) for count, tokens in zip(done, prompts, strict=True)):
            segments, rows, expected = [], [], []
            for index in generator.permutation(3):
                start = done[index]
                count = min(int(generator.integers(0, 8)), len(prompts[index]) - start)
                if count:
                    segments.append(Segment(names[index], start, count))
                    rows += prompts[index][start : start + count]
                    expected.append(alone[index][start : start + count])
                    done[index] += count
            if segments:
                output = chain.step(StageBatch(tuple(segments), np.array(rows, np.int32), want_all_logits=True))
                np.testing.assert_array_equal(output.logits, np.concatenate(expected))

    def test_cuts_do_not_matter(self, load: Loader) -> None:
        chain = load()
        n_layers = chain.parameters.n_layers
        tokens = prompt(30, chain.parameters.vocab_size)
        whole = all_logits(chain, [tokens[:20], tokens[20:]])
        for cuts in (*((cut,) for cut in range(1, n_layers)), tuple(range(1, n_layers))):
            staged = load(cuts=cuts)
            assert len(staged.engines) == len(cuts) + 1
            np.testing.assert_array_equal(whole, all_logits(staged, [tokens[:20], tokens[20:]]))

    def test_threads_do_not_matter(self, load: Loader) -> None:
        tokens = prompt(33, 256)
        results = []
        for threads in (1, 2):
            chain = load(options=replace(OPTIONS, threads=threads))
            results.append(all_logits(chain, [tokens[:30], tokens[30:]]))
        np.testing.assert_array_equal(results[0], results[1])

    # Sequences.

    def test_a_smaller_start_rewinds(self, load: Loader) -> None:
        chain = load()
        tokens = prompt(24, chain.parameters.vocab_size)
        changed = [*tokens[:8], *prompt(10, chain.parameters.vocab_size, 77)]
        expected = all_logits(chain, [changed])
        sequence = chain.new_sequence()
        chain.feed(sequence, 0, tokens)
        rewound = chain.feed(sequence, 8, changed[8:], want_all_logits=True).logits
        np.testing.assert_array_equal(rewound, expected[8:])
        assert len(expected) == 18
        with pytest.raises(EngineError):
            chain.feed(sequence, 19, [1])  # what came after the rewind is forgotten

    def test_release_frees_the_slot(self, chain: Chain) -> None:
        tokens = prompt(6, chain.parameters.vocab_size)
        expected = chain.feed(SequenceId(1000), 0, tokens).samples[0]
        chain.release(SequenceId(1000))
        for number in range(1001, 1001 + 2 * OPTIONS.max_sequences):
            assert chain.feed(SequenceId(number), 0, tokens).samples[0].token == expected.token
            chain.release(SequenceId(number))
            chain.release(SequenceId(number))
        with pytest.raises(EngineError):
            chain.feed(SequenceId(1001), len(tokens), [1])

    # Mistakes: an error, after which everything is as before.

    @pytest.mark.parametrize(
        ("start", "count"),
        [(7, 1), (8, 3), (6, OPTIONS.max_context - 5), (0, OPTIONS.max_batch_tokens + 1)],
        ids=["gap", "wide gap", "context", "rows"],
    )
    def test_a_segment_that_does_not_fit(self, chain: Chain, start: int, count: int) -> None:
        sequence = chain.new_sequence()
        tokens = prompt(8, chain.parameters.vocab_size)
        expected = all_logits(chain, [tokens])
        chain.feed(sequence, 0, tokens[:6])
        with pytest.raises(EngineError):
            chain.feed(sequence, start, [3] * count)
        after = chain.feed(sequence, 6, tokens[6:], want_all_logits=True).logits
        np.testing.assert_array_equal(after, expected[6:])

    def test_too_many_sequences(self, chain: Chain) -> None:
        tokens = prompt(5, chain.parameters.vocab_size)
        expected = all_logits(chain, [tokens])
        names = [chain.new_sequence() for _ in range(OPTIONS.max_sequences)]
        for name in names:
            chain.feed(name, 0, tokens[:4])
        with pytest.raises(EngineError):
            chain.feed(chain.new_sequence(), 0, tokens)
        np.testing.assert_array_equal(chain.feed(names[0], 4, tokens[4:], want_logits=True).logits, expected[4:])

    @pytest.mark.parametrize("token", [-1, RECIPES["llama"].vocab_size, 2**31 - 1])
    def test_a_token_outside_the_vocabulary(self, chain: Chain, token: int) -> None:
        with pytest.raises(EngineError):
            chain.feed(chain.new_sequence(), 0, [1, token])

    def test_a_sequence_twice_in_a_batch(self, chain: Chain) -> None:
        segments = (Segment(SequenceId(5), 0, 1), Segment(SequenceId(5), 1, 1))
        with pytest.raises(EngineError):
            chain.step(StageBatch(segments, np.zeros(2, np.int32)))

    def test_the_last_position_fits(self, chain: Chain) -> None:
        sequence = chain.new_sequence()
        tokens = prompt(OPTIONS.max_context, chain.parameters.vocab_size)
        for start in range(0, len(tokens), 32):
            output = chain.feed(sequence, start, tokens[start : start + 32])
        assert output.samples[0].position == OPTIONS.max_context

    # Sampling.

    def test_a_seed_gives_the_same_tokens(self, chain: Chain) -> None:
        tokens = prompt(4, chain.parameters.vocab_size)

        def run(seed: int) -> list[int]:
            sampling = SamplingParams(temperature=1.0, seed=seed)
            return [sample.token for sample in chain.generate(tokens, 16, sampling=sampling)]

        assert run(1) == run(1)
        assert len({tuple(run(seed)) for seed in range(4)}) == 4

    def test_a_replay_continues_alike(self, chain: Chain) -> None:
        """After a node was lost, the tokens sent so far are forced input; what follows must be what would have."""
        sampling = SamplingParams(temperature=1.0, seed=3)
        tokens = prompt(4, chain.parameters.vocab_size)
        whole = [sample.token for sample in chain.generate(tokens, 12, sampling=sampling)]
        replayed = chain.generate([*tokens, *whole[:5]], 7, sampling=sampling)
        assert [sample.token for sample in replayed] == whole[5:]


def _model_file(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a recipe, written once in a test session."""
    path = tmp_path_factory.getbasetemp() / "compliance" / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_model(RECIPES[name], path)
    return path


def prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, length)]


def all_logits(chain: Chain, chunks: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Feed a new sequence chunk by chunk; the logits of every row, ``float32[rows, vocab_size]``."""
    sequence = chain.new_sequence()
    rows: list[NDArray[np.float32]] = []
    start = 0
    for chunk in chunks:
        logits = chain.feed(sequence, start, chunk, want_all_logits=True).logits
        assert logits is not None
        rows.append(logits.copy())
        start += len(chunk)
    chain.release(sequence)
    return np.concatenate(rows)


def top_difference(reference: NDArray[np.float32], other: NDArray[np.float32], count: int = 5) -> float:
    """Mean absolute difference of the log-probabilities of ``reference``'s best tokens, over all rows of logits."""
    differences = []
    for expected, found in zip(reference, other, strict=True):
        best = np.argsort(-expected, kind="stable")[:count]
        differences.append(np.abs(log_softmax(expected)[best] - log_softmax(found)[best]))
    return float(np.mean(differences))
