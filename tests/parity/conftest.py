"""Real models, and each of them inside llama.cpp and our engines, once for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
import pytest

from myelin.builtins import engine_reference
from myelin.engine.contract import Engine, EngineOptions
from myelin_testkit.chain import Chain, EngineFactory, load_stages
from myelin_testkit.llama import Candidate, LlamaOracle
from myelin_testkit.models import gemma3_path, smollm2_path
from myelin_testkit.prompts import PROMPTS
from myelin_worker_cpu import plugin as cpu_plugin

NEW_TOKENS = 32
OPTIONS = EngineOptions(threads=2, max_context=2048, max_sequences=1, max_batch_tokens=256)


def made(name: str) -> EngineFactory:
    """A factory of the engine ``name``, through its plugin's hook."""
    hook = {"cpu": cpu_plugin.myelin_engine, "reference": engine_reference.myelin_engine}[name]

    def make(options: EngineOptions) -> Engine:
        engine = hook(name=name, options=options)
        assert engine is not None
        return engine

    return make


@dataclass(frozen=True)
class Continued:
    """A prompt with llama.cpp's greedy continuation of it."""

    prompt: list[int]
    path: list[list[Candidate]]

    @property
    def tokens(self) -> list[int]:
        """The tokens that llama.cpp took."""
        return [candidates[0].token for candidates in self.path]


@dataclass
class RealModel:
    """A real model inside llama.cpp.

    Attributes:
        name: ``smollm2`` or ``gemma3``.
        path: Its file.
        oracle: llama.cpp with the model loaded.
    """

    name: str
    path: Path
    oracle: LlamaOracle
    _continued: dict[str, Continued] = field(default_factory=dict)

    def continued(self, prompt: str) -> Continued:
        """A prompt of :data:`~myelin_testkit.prompts.PROMPTS` and its continuation, computed once."""
        if prompt not in self._continued:
            tokens = self.oracle.tokenize(PROMPTS[prompt], parse_special=True)
            self._continued[prompt] = Continued(tokens, self.oracle.greedy(tokens, NEW_TOKENS, top=10))
        return self._continued[prompt]


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M; its package carries it in pieces, which are put together in the user's cache."""
    return gemma3_path(platformdirs.user_cache_path("myelin") / "test-models")


@pytest.fixture(scope="session", params=["smollm2", "gemma3"])
def real_model(request: pytest.FixtureRequest) -> Iterator[RealModel]:
    """Each real model in turn."""
    path = smollm2_path() if request.param == "smollm2" else request.getfixturevalue("gemma3")
    with LlamaOracle(path, context=2304) as oracle:
        yield RealModel(request.param, path, oracle)


@pytest.fixture(scope="session")
def other_kernel(real_model: RealModel) -> Iterator[LlamaOracle]:
    """The real model in llama.cpp with its other attention kernel."""
    with LlamaOracle(real_model.path, context=1024, flash_attention=False) as oracle:
        yield oracle


@pytest.fixture(scope="session")
def cpu(real_model: RealModel) -> Iterator[Chain]:
    """The real model in the ``cpu`` engine, as one stage."""
    with load_stages(made("cpu"), real_model.path, options=OPTIONS) as chain:
        yield chain


@pytest.fixture(scope="session")
def reference(real_model: RealModel) -> Iterator[Chain]:
    """The real model in the ``reference`` engine, as one stage."""
    with load_stages(made("reference"), real_model.path, options=OPTIONS) as chain:
        yield chain


@pytest.fixture(scope="session")
def factory() -> Callable[[str], EngineFactory]:
    """``factory(name)`` makes engines of that name."""
    return made


MEASURED = pytest.StashKey[list[str]]()


@pytest.fixture
def measured(request: pytest.FixtureRequest, real_model: RealModel) -> Callable[[str, float], None]:
    """``measured(what, value)`` shows a figure at the end of the run, whether its test passes or not."""

    def note(what: str, value: float) -> None:
        request.config.stash.setdefault(MEASURED, []).append(f"{real_model.name}: {what}: {value:.4f}")

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The figures of :func:`measured`."""
    figures = config.stash.get(MEASURED, [])
    if figures:
        terminalreporter.section("measured against llama.cpp")
        for line in figures:
            terminalreporter.line(line)
