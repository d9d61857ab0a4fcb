"""llama.cpp as an oracle, through the wheel ``xllamacpp``: a test-only dependency, imported when an oracle is made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from myelin_testkit.models import MissingPackageError

FORCED = 10000.0
"""A logit bias that no other token can outweigh."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that llama.cpp thought of, with its natural log-probability before any sampling."""

    token: int
    logprob: float


class LlamaOracle:
    """A model inside llama.cpp, on the CPU. Use it as a context manager, or close it.

    Its server's native interface takes and gives token ids. One trap shapes this class: the server leaves out the
    log-probabilities of a token whose text ends inside a UTF-8 character. They are those of a *position*, though, and
    don't depend on the token that is sampled there: so :meth:`candidates` makes it sample a letter.

    Args:
        model: The GGUF file (the first part of a split one).
        context: Positions.
        threads: Compute threads. They spin: with a busy neighbour, two are far slower than one.
        flash_attention: Which of its two attention kernels it uses: the same sums in another order and precision.
    """

    def __init__(self, model: Path, *, context: int = 4096, threads: int = 1, flash_attention: bool = True) -> None:
        try:
            import xllamacpp
        except ImportError as error:
            raise MissingPackageError("llama.cpp is missing: pip install xllamacpp") from error
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(model)
        parameters.n_ctx = context
        parameters.n_parallel = 1
        parameters.n_gpu_layers = 0
        parameters.cpuparams.n_threads = threads
        parameters.cpuparams_batch.n_threads = threads
        flash = xllamacpp.llama_flash_attn_type
        parameters.flash_attn_type = (
            flash.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attention else flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        parameters.swa_full = True  # else a sliding window forgets what cache_prompt could have reused
        parameters.fit_params = False
        parameters.warmup = False
        parameters.verbosity = -1
        self._server: Any = xllamacpp.Server(parameters)
        self._address = str(self._server.listening_address)
        self._open = build_opener(ProxyHandler({})).open  # loopback: never through a proxy
        self._letter = self.tokenize("a", add_special=False)[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server. Twice is fine."""
        self._server = None

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of ``text``; ``add_special`` adds BOS and the like by the model's own rule."""
        answer = self._post("/tokenize", {"content": text, "add_special": add_special, "parse_special": parse_special})
        return [int(token) for token in answer["tokens"]]

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``."""
        return str(self._post("/detokenize", {"tokens": list(tokens)})["content"])

    def apply_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that the model's chat template (llama.cpp's own, where it has none) makes of a conversation."""
        return str(self._post("/apply-template", {"messages": list(messages)})["prompt"])

    def candidates(self, tokens: Sequence[int], count: int = 5) -> list[Candidate]:
        """The most likely tokens after ``tokens``, best first; what is known of the last call is reused."""
        answer = self._complete(tokens, 1, n_probs=count, logit_bias=[[self._letter, FORCED]])
        (entry,) = answer["completion_probabilities"]
        return [Candidate(int(top["id"]), float(top["logprob"])) for top in entry["top_logprobs"]]

    def greedy(self, prompt: Sequence[int], count: int, *, top: int = 5) -> list[list[Candidate]]:
        """A greedy continuation by ``count`` tokens (end tokens don't end it).

        Returns:
            The candidates at each position; the first of them is the token that was taken.
        """
        path: list[list[Candidate]] = []
        tokens = list(prompt)
        for _ in range(count):
            path.append(self.candidates(tokens, top))
            tokens.append(path[-1][0].token)
        return path

    def follow(self, prompt: Sequence[int], continuation: Sequence[int], *, top: int = 5) -> list[list[Candidate]]:
        """The candidates at each position of a given continuation."""
        return [self.candidates([*prompt, *continuation[:index]], top) for index in range(len(continuation))]

    def logprob(self, prompt: Sequence[int], token: int) -> float:
        """The log-probability of one token after ``prompt``, whose text must not end inside a character."""
        return self.logprobs(prompt, [token])[0]

    def logprobs(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[float]:
        """The log-probability of each token of a given continuation.

        Raises:
            ValueError: A token's text ends inside a UTF-8 character, where the server gives no entry.
        """
        found: list[float] = []
        for index, token in enumerate(continuation):
            # The reported log-probability is that before the bias, which only makes the token the one that is sampled.
            bias = [[token, FORCED]]
            answer = self._complete([*prompt, *continuation[:index]], 1, n_probs=1, logit_bias=bias)
            entries = answer["completion_probabilities"]
            if [int(entry["id"]) for entry in entries] != [token]:
                raise ValueError(f"llama.cpp gives no log-probability of token {token}, which ends inside a character")
            found.append(float(entries[0]["logprob"]))
        return found

    def perplexity(self, tokens: Sequence[int]) -> float:
        """``exp`` of the mean negative log-probability of each token but the first."""
        found = self.logprobs(tokens[:1], tokens[1:])
        return math.exp(-sum(found) / len(found))

    def _complete(self, prompt: Sequence[int], count: int, **more: Any) -> Any:
        body = {"prompt": list(prompt), "n_predict": count, "temperature": 0, "cache_prompt": True, **more}
        return self._post("/completion", body)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = Request(self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with self._open(request, timeout=300) as response:
                return json.load(response)
        except HTTPError as error:
            said = error.read()[:500].decode(errors="replace")
            raise RuntimeError(f"llama.cpp answered {error.code} to {path}: {said}") from error
