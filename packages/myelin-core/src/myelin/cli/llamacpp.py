"""llama.cpp in this process, through the wheel ``xllamacpp``, to be measured in turns with a pipeline."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from myelin.errors import UsageError
from myelin.model.opening import close_all
from myelin.model.source import ModelSource

ANSWER_TIMEOUT_S = 600.0


class LlamaCpp:
    """A model loaded by llama.cpp, on the CPU alone.

    Args:
        source: The model; its file must be on this machine's disk.
        threads: Compute threads.
        context: Positions.

    Raises:
        UsageError: xllamacpp isn't installed, or the model is no file on disk.
    """

    def __init__(self, source: ModelSource, *, threads: int, context: int) -> None:
        try:
            import xllamacpp
        except ImportError:
            raise UsageError("llama.cpp is not installed", "pip install xllamacpp") from None
        self.threads = threads
        self.version = importlib.metadata.version("xllamacpp")
        parameters: Any = xllamacpp.CommonParams()
        parameters.model.path = str(_file_of(source))
        parameters.n_ctx = context + 16
        parameters.n_parallel = 1
        parameters.n_gpu_layers = 0
        parameters.cpuparams.n_threads = threads
        parameters.cpuparams_batch.n_threads = threads
        parameters.warmup = False
        parameters.verbosity = -1
        self._server: Any = xllamacpp.Server(parameters)
        self._address = str(self._server.listening_address)
        self._open = build_opener(ProxyHandler({})).open  # loopback: never through a proxy

    def close(self) -> None:
        """End it. Twice is fine."""
        self._server = None

    def prompt_rate(self, prompt: Sequence[int]) -> float:
        """Tokens of the prompt a second, by llama.cpp's own clock."""
        timings = self._timings(prompt, 1)
        return len(prompt) / (timings["prompt_ms"] / 1000)

    def generation_rate(self, start: Sequence[int], count: int) -> float:
        """New tokens a second, from the first over the next ``count``, by llama.cpp's own clock.

        Its clock begins once the prompt is through and the first token is there, so ``count`` more are asked for.
        """
        timings = self._timings(start, count + 1)
        return count / (timings["predicted_ms"] / 1000)

    def _timings(self, prompt: Sequence[int], count: int) -> dict[str, float]:
        body = {
            "prompt": list(prompt),
            "n_predict": count,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": True,
        }
        request = Request(
            f"{self._address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with self._open(request, timeout=ANSWER_TIMEOUT_S) as answer:
            timings: dict[str, float] = json.load(answer)["timings"]
        return timings


def _file_of(source: ModelSource) -> Path:
    """The model's (first) file."""
    files = source.open()
    try:
        path = getattr(files[0], "path", None)
    finally:
        close_all(files)
    if not isinstance(path, Path):
        raise UsageError(
            "llama.cpp needs the model as a file, and this one is put together from pieces",
            "write it to a file, and name that with --model",
        )
    return path
