"""What is compared, each in a process and a session of its own: the engine, a pipeline of nodes, llama.cpp.

A system that groups processes by session gives each group its share of the cores, so sides that are to be compared
must not differ in that. A side's process reads one JSON request a line and answers each with one line; it computes only
when it is asked, and ends when its input does. :class:`Side` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np

ANSWER_TIMEOUT_S = 600.0
PROMPT_STEP = 512
"""Tokens of a prompt in one step of the engine: what a pipeline's scheduler does by default."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a side is started.

    Attributes:
        kind: ``engine`` (one stage, driven directly), ``pipeline`` (nodes as processes), ``llamacpp``, or ``memory``.
        model: The GGUF file.
        threads: Compute threads (of each node).
        context: Positions of one sequence.
        sequences: Sequences at once.
        stages: Nodes of a pipeline.
        kv_dtype: How keys and values are kept.
    """

    kind: str
    model: str
    threads: int
    context: int
    sequences: int = 1
    stages: int = 1
    kv_dtype: str = "f16"


class Side:
    """A running side. ``load_seconds`` is from «load» to «ready», with the process's own start left out."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(asdict(setup))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        answer = self._read()
        self.load_seconds = float(answer["load_seconds"])
        self.vocabulary = int(answer["vocabulary"])

    def ask(self, what: str, **arguments: object) -> Any:
        """One measurement; see the methods of the classes below."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()["value"]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Engine:
    """The CPU engine in this process, as one stage."""

    def __init__(self, setup: Setup) -> None:
        from myelin.engine.contract import EngineOptions
        from myelin_testkit.chain import load_stages
        from myelin_worker_cpu.engine import CpuEngine

        options = EngineOptions(
            threads=setup.threads, max_context=setup.context, max_sequences=setup.sequences, kv_dtype=setup.kv_dtype
        )
        chain = load_stages(CpuEngine, Path(setup.model), options=options)
        self._engine = chain.engines[0]
        self.vocabulary = chain.parameters.vocab_size

    def prompt(self, tokens: list[int]) -> float:
        """Tokens of the prompt a second."""
        began = time.perf_counter()
        self._read(1, tokens)
        rate = len(tokens) / (time.perf_counter() - began)
        self._release(1)
        return rate

    def generate(self, tokens: list[int], count: int) -> float:
        """New tokens a second, from the first after a prompt over the next ``count``."""
        return self.streams([tokens], count)

    def streams(self, prompts: list[list[int]], count: int) -> float:
        """New tokens a second, of all prompts' continuations together."""
        from myelin.engine.contract import Segment, StageBatch
        from myelin.values import SequenceId

        newest = [self._read(number, tokens) for number, tokens in enumerate(prompts)]
        ends = [len(tokens) for tokens in prompts]
        began = time.perf_counter()
        for step in range(count):
            segments = tuple(Segment(SequenceId(number), end + step, 1, output=True) for number, end in enumerate(ends))
            output = self._engine.step(StageBatch(segments, np.array(newest, dtype=np.int32)))
            newest = [sample.token for sample in output.samples]
        rate = count * len(prompts) / (time.perf_counter() - began)
        for number in range(len(prompts)):
            self._release(number)
        return rate

    def peak(self) -> int:
        """Bytes of memory that the process had at most."""
        return peak_bytes(os.getpid())

    def _read(self, number: int, tokens: list[int]) -> int:
        from myelin.engine.contract import Segment, StageBatch
        from myelin.values import SequenceId

        for first in range(0, len(tokens), PROMPT_STEP):
            part = np.array(tokens[first : first + PROMPT_STEP], dtype=np.int32)
            last = first + len(part) == len(tokens)
            output = self._engine.step(StageBatch((Segment(SequenceId(number), first, len(part), output=last),), part))
        return output.samples[0].token

    def _release(self, number: int) -> None:
        from myelin.values import SequenceId

        self._engine.release(SequenceId(number))


class Pipeline:
    """A whole run, as ``myelin bench`` makes one: nodes that are processes, and this process orders of them."""

    def __init__(self, setup: Setup) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._stop = asyncio.Event()
        self._ready: Any = self._loop.create_future()
        self._run = asyncio.run_coroutine_threadsafe(self._live(setup), self._loop)
        self._pipeline = asyncio.run_coroutine_threadsafe(self._wait(), self._loop).result()
        self.vocabulary = min(self._pipeline.parameters.vocab_size, self._pipeline.tokenizer.vocab_size)

    async def _live(self, setup: Setup) -> None:
        from myelin.cli import composition
        from myelin.cli.options import Invocation
        from myelin.orchestrator.events import Silent

        settings = {
            "model.source": setup.model,
            "runtime.pipeline_stages": str(setup.stages),
            "runtime.threads": str(setup.threads),
            "runtime.max_context": str(setup.context),
            "runtime.max_sequences": str(setup.sequences),
            "runtime.engine": "cpu",
            "runtime.kv_dtype": setup.kv_dtype,
        }
        root = composition.assemble(Invocation({}, tuple(f"{key}={value}" for key, value in settings.items())))
        try:
            request = composition.run_request(root)
            async with composition.open_pipeline(request, root.registry, Silent()) as pipeline:
                self._ready.set_result(pipeline)
                await self._stop.wait()
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _wait(self) -> Any:
        return await self._ready

    def close(self) -> None:
        """End the nodes."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._run.result(20)

    def prompt(self, tokens: list[int]) -> float:
        """Tokens of the prompt a second."""
        return len(tokens) / self._times([tokens], 1)[0][0]

    def generate(self, tokens: list[int], count: int) -> float:
        """New tokens a second, from the first after a prompt over the next ``count``."""
        return self.streams([tokens], count)

    def streams(self, prompts: list[list[int]], count: int) -> float:
        """New tokens a second of all prompts' continuations together, from when each has its first token."""
        times = self._times(prompts, count + 1)
        begin, end = max(one[0] for one in times), min(one[-1] for one in times)
        return sum(sum(begin < moment <= end for moment in one) for one in times) / (end - begin)

    def peak(self) -> int:
        """Bytes of memory that all nodes had at most."""
        status = asyncio.run_coroutine_threadsafe(self._pipeline.status(), self._loop).result()
        return sum(stage.peak_resident_bytes for stage in status)

    def _times(self, prompts: list[list[int]], count: int) -> list[list[float]]:
        from contextlib import aclosing

        from myelin.wire.requests import NewToken

        began = time.perf_counter()

        async def one(prompt: list[int]) -> list[float]:
            async with aclosing(self._pipeline.generate(prompt, max_tokens=count, ignore_end=True)) as events:
                return [time.perf_counter() - began async for event in events if isinstance(event, NewToken)]

        async def together() -> list[list[float]]:
            return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

        return asyncio.run_coroutine_threadsafe(together(), self._loop).result()


class LlamaCpp:
    """llama.cpp in this process, through its server; rates are by its own clock."""

    def __init__(self, setup: Setup) -> None:
        import xllamacpp

        parameters: Any = xllamacpp.CommonParams()
        parameters.model.path = setup.model
        parameters.n_ctx = setup.context * setup.sequences
        parameters.n_parallel = setup.sequences
        parameters.n_gpu_layers = 0
        parameters.cpuparams.n_threads = setup.threads
        parameters.cpuparams_batch.n_threads = setup.threads
        parameters.warmup = False
        parameters.verbosity = -1
        if setup.kv_dtype != "f16":
            parameters.cache_type_k = parameters.cache_type_v = getattr(
                xllamacpp.ggml_type, f"GGML_TYPE_{setup.kv_dtype.upper()}"
            )
        with _silence():
            self._server: Any = xllamacpp.Server(parameters)
        self._address = str(self._server.listening_address)
        self._open = build_opener(ProxyHandler({})).open  # loopback: never through a proxy
        self.vocabulary = _vocabulary(Path(setup.model))

    def prompt(self, tokens: list[int]) -> float:
        """Tokens of the prompt a second."""
        return len(tokens) / (self._timings(tokens, 1)["prompt_ms"] / 1000)

    def generate(self, tokens: list[int], count: int) -> float:
        """New tokens a second, from the first after a prompt over the next ``count``."""
        # its clock begins once the prompt is through and the first token is there, so one more is asked for
        return count / (self._timings(tokens, count + 1)["predicted_ms"] / 1000)

    def streams(self, prompts: list[list[int]], count: int) -> float:
        """New tokens a second of all prompts' continuations together."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda tokens: self._timings(tokens, count + 1), prompts))
        return sum(count / (answer["predicted_ms"] / 1000) for answer in answers)

    def peak(self) -> int:
        """Bytes of memory that the process had at most."""
        return peak_bytes(os.getpid())

    def _timings(self, prompt: list[int], count: int) -> dict[str, float]:
        body = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "top_k": 1,
            "cache_prompt": False,
            "ignore_eos": True,
        }
        request = Request(
            f"{self._address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with _silence(), self._open(request, timeout=ANSWER_TIMEOUT_S) as answer:
            timings: dict[str, float] = json.load(answer)["timings"]
        return timings


def peak_bytes(process: int) -> int:
    """The most memory that the process ever had resident, mapped files included (Linux); 0 elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _vocabulary(model: Path) -> int:
    from myelin.model.architecture import describe
    from myelin.model.gguf import read_facts
    from myelin.model.local import LocalFile

    file = LocalFile(model)
    try:
        return describe(read_facts([file])).vocab_size
    finally:
        file.close()


_SILENCE = threading.Lock()


@contextlib.contextmanager
def _silence() -> Any:
    """llama.cpp logs to the process's own stderr; several requests at once share the first one's silence."""
    if not _SILENCE.acquire(blocking=False):
        yield
        return
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
        _SILENCE.release()


class Memory:
    """This machine's memory, streamed: what decoding can't be faster than."""

    vocabulary = 0

    def __init__(self, setup: Setup) -> None:
        from bandwidth import Stream

        self._stream = Stream(setup.threads, 512)

    def rate(self) -> float:
        """GB/s, the best of five passes."""
        return max(self._stream.rate() for _ in range(5))


KINDS: dict[str, Callable[[Setup], Any]] = {
    "engine": Engine,
    "pipeline": Pipeline,
    "llamacpp": LlamaCpp,
    "memory": Memory,
}


def main() -> None:
    """Be a side: load, then answer requests until the input ends."""
    setup = Setup(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not come between the answers
    began = time.perf_counter()
    side = KINDS[setup.kind](setup)
    loaded = time.perf_counter() - began
    print(json.dumps({"load_seconds": loaded, "vocabulary": side.vocabulary}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        value = getattr(side, request.pop("what"))(**request)
        print(json.dumps({"value": value}), file=answers, flush=True)
    if isinstance(side, Pipeline):
        side.close()
    os._exit(0)  # llama.cpp's server threads would be waited for


if __name__ == "__main__":
    main()
