"""A pipeline in one process: the stages of a model, each in an engine of its own, stepped one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from myelin.engine.contract import Engine, EngineOptions, LoadReport, Progress, Sample, Segment, StageBatch, StageOutput
from myelin.model.architecture import Hyperparameters, describe
from myelin.model.facts import ModelFacts
from myelin.model.gguf import read_facts
from myelin.model.local import LocalFile
from myelin.model.shard import ShardReader, StageSlice
from myelin.values import GREEDY, SamplingParams, SequenceId

EngineFactory = Callable[[EngineOptions], Engine]
"""Makes an engine that has nothing loaded yet: usually the class itself."""


class Chain:
    """Loaded stages that are driven as one model. Use it as a context manager, or close it.

    Attributes:
        facts, parameters: The model.
        engines, shards, reports: One of each for every stage, in order.
    """

    def __init__(
        self,
        facts: ModelFacts,
        parameters: Hyperparameters,
        sources: Sequence[LocalFile],
        engines: Sequence[Engine],
        shards: Sequence[ShardReader],
        reports: Sequence[LoadReport],
    ) -> None:
        self.facts = facts
        self.parameters = parameters
        self.engines = tuple(engines)
        self.shards = tuple(shards)
        self.reports = tuple(reports)
        self._sources = tuple(sources)
        self._next_sequence = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the engines and the model's files. Twice is fine."""
        for engine in self.engines:
            engine.close()
        for source in self._sources:
            source.close()

    def new_sequence(self) -> SequenceId:
        """A number that no sequence of this chain has had."""
        self._next_sequence += 1
        return SequenceId(self._next_sequence)

    def step(self, batch: StageBatch) -> StageOutput:
        """Push a batch of tokens through every stage; what the tail gives."""
        output = StageOutput()
        for engine in self.engines:
            output = engine.step(batch)
            if output.hidden is not None:
                # A copy, as the wire would make: an engine may reuse its buffer, and may overwrite what it is given.
                batch = replace(batch, tokens=None, hidden=output.hidden.copy())
        return output

    def release(self, sequence: SequenceId) -> None:
        """Forget a sequence in every stage."""
        for engine in self.engines:
            engine.release(sequence)

    def feed(
        self,
        sequence: SequenceId,
        start: int,
        tokens: Sequence[int],
        *,
        sampling: SamplingParams = GREEDY,
        want_logits: bool = False,
        want_all_logits: bool = False,
    ) -> StageOutput:
        """One step of one sequence: ``tokens`` at positions from ``start`` on, with a token chosen after the last."""
        segment = Segment(sequence, start, len(tokens), output=True, sampling=sampling)
        ids = np.asarray(tokens, np.int32)
        return self.step(StageBatch((segment,), ids, want_logits=want_logits, want_all_logits=want_all_logits))

    def generate(
        self, prompt: Sequence[int], count: int, *, sampling: SamplingParams = GREEDY, chunk: int = 256
    ) -> list[Sample]:
        """Continue a prompt by ``count`` tokens, whatever they are (an end token doesn't end it).

        Args:
            prompt: Token ids.
            count: How many tokens to add.
            sampling: How they are chosen.
            chunk: Prompt tokens in one step at most.
        """
        sequence = self.new_sequence()
        samples: list[Sample] = []
        try:
            output = StageOutput()
            for start in range(0, len(prompt), chunk):
                output = self.feed(sequence, start, prompt[start : start + chunk], sampling=sampling)
            samples += output.samples
            while len(samples) < count:
                output = self.feed(sequence, samples[-1].position, [samples[-1].token], sampling=sampling)
                samples += output.samples
        finally:
            self.release(sequence)
        return samples

    def logits(self, tokens: Sequence[int], *, first: int = 0, chunk: int = 256) -> Iterator[NDArray[np.float32]]:
        """The logits after every token from ``first`` on, ``float32[rows, vocab_size]`` for one chunk after the other,
        each a copy."""
        sequence = self.new_sequence()
        try:
            for start in range(0, first, chunk):
                self.feed(sequence, start, tokens[start : min(start + chunk, first)])
            for start in range(first, len(tokens), chunk):
                output = self.feed(sequence, start, tokens[start : start + chunk], want_all_logits=True)
                if output.logits is None:
                    raise AssertionError("the tail gave no logits though they were asked for")
                yield output.logits.copy()
        finally:
            self.release(sequence)

    def logprobs(self, tokens: Sequence[int], *, chunk: int = 256) -> NDArray[np.float64]:
        """The natural log-probability of each token but the first, given those before: ``float64[len(tokens) - 1]``."""
        found: list[float] = []
        for logits in self.logits(tokens, chunk=chunk):
            for row in logits:
                following = len(found) + 1
                if following < len(tokens):
                    found.append(logprob(row, tokens[following]))
        return np.array(found)


def load_stages(
    factory: EngineFactory,
    model: Path | Sequence[Path],
    cuts: Sequence[int] = (),
    options: EngineOptions | None = None,
    progress: Progress | None = None,
) -> Chain:
    """Load a model as a chain.

    Args:
        factory: Makes the engines.
        model: The GGUF file, or the parts of a split one in order.
        cuts: The layers before which a new stage begins, ascending; none is one stage.
        options: For every engine.
        progress: Hears of the loading.

    Raises:
        ModelError, EngineError: It can't be read, or not be computed.
    """
    paths = [model] if isinstance(model, Path) else list(model)
    sources = [LocalFile(path) for path in paths]
    engines: list[Engine] = []
    try:
        facts = read_facts(sources)
        parameters = describe(facts)
        bounds = [0, *cuts, parameters.n_layers]
        shards = [
            ShardReader(facts, parameters, StageSlice(first, end, parameters.n_layers), tuple(sources))
            for first, end in pairwise(bounds)
        ]
        reports = []
        for shard in shards:
            engines.append(factory(options or EngineOptions(threads=1, max_context=1024)))
            reports.append(engines[-1].load(shard, progress or _silent))
    except BaseException:
        for engine in engines:
            engine.close()
        for source in sources:
            source.close()
        raise
    return Chain(facts, parameters, sources, engines, shards, reports)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Natural log-probabilities of a row of logits, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    return wide


def logprob(logits: NDArray[np.float32], token: int) -> float:
    """:func:`log_softmax` of one token, without the float64 copy of a large vocabulary."""
    below = logits - logits.max()
    return float(below[token]) - float(np.log(np.exp(below).sum(dtype=np.float64)))


def _silent(phase: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
