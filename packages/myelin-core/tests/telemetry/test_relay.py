"""The relay: a node's telemetry arrives, its times moved to our clock, and nothing of it ever waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from myelin.errors import StreamClosed, WireError
from myelin.telemetry.hub import TelemetryHub
from myelin.telemetry.relay import NodeRelay, Outbox, RelayClient
from myelin.telemetry.signals import Signal
from myelin_testkit.telemetry_compliance import otlp_request, record_names


class End:
    """One end of a stream made of two queues."""

    def __init__(self, out: asyncio.Queue[bytes | None], come: asyncio.Queue[bytes | None], delay_s: float) -> None:
        self._out, self._come, self._delay_s = out, come, delay_s

    async def send(self, message: bytes) -> None:
        await asyncio.sleep(self._delay_s)
        await self._out.put(bytes(message))

    async def receive(self) -> bytes:
        message = await self._come.get()
        if message is None:
            raise StreamClosed("closed")
        return message

    async def close(self) -> None:
        await self._out.put(None)
        await self._come.put(None)


@asynccontextmanager
async def relayed(
    relay: NodeRelay, hub: TelemetryHub, *, delay_s: float = 0.0, clock: Callable[[], int] = time.time_ns
) -> AsyncIterator[RelayClient]:
    """Both ends at work over a stream of their own."""
    there: asyncio.Queue[bytes | None] = asyncio.Queue()
    back: asyncio.Queue[bytes | None] = asyncio.Queue()
    client = RelayClient(End(there, back, delay_s), hub, "stage-0", clock)
    serving = [
        asyncio.create_task(relay.serve(End(back, there, delay_s))),
        asyncio.create_task(client.serve()),
    ]
    await asyncio.sleep(0.005)  # both have begun
    try:
        yield client
    finally:
        await client.close()
        async with asyncio.timeout(60):
            await asyncio.gather(*serving)


@pytest.fixture
def seen() -> list[tuple[Signal, Any]]:
    return []


@pytest.fixture
def hub(seen: list[tuple[Signal, Any]]) -> TelemetryHub:
    made = TelemetryHub([])
    made.subscribe(lambda signal, request: seen.append((signal, request)))
    return made


async def test_all_signals_arrive_and_the_end_is_told(hub: TelemetryHub, seen: list[tuple[Signal, Any]]) -> None:
    outbox = Outbox()
    relay = NodeRelay(outbox)
    for signal in Signal:  # before anybody listens
        assert outbox.put(signal, otlp_request(signal, f"early-{signal}").SerializeToString(), 1)
    async with relayed(relay, hub) as client:
        for signal in Signal:
            assert outbox.put(signal, otlp_request(signal, f"later-{signal}").SerializeToString(), 1)
        assert await relay.finish(60)
        await asyncio.wait_for(client.ended.wait(), 60)
        assert client.received == dict.fromkeys(Signal, 2)
    assert await asyncio.to_thread(hub.close)
    names = {name for _, request in seen for name in record_names(request)}
    assert names == {f"{when}-{signal}" for when in ("early", "later") for signal in Signal}


async def test_times_are_those_of_our_clock(hub: TelemetryHub, seen: list[tuple[Signal, Any]]) -> None:
    """The node's clock is five seconds ahead; what it says of now is now here."""
    ahead = 5_000_000_000
    outbox = Outbox()
    relay = NodeRelay(outbox, clock=lambda: time.time_ns() + ahead)
    request = otlp_request(Signal.LOGS, "now")
    record = request.resource_logs[0].scope_logs[0].log_records[0]
    began = time.time_ns()
    record.time_unix_nano = began + ahead
    outbox.put(Signal.LOGS, request.SerializeToString(), 1)
    async with relayed(relay, hub, delay_s=0.002) as client:
        assert await relay.finish(60)
        best = client.clock_estimate.best
        assert best is not None
        assert abs(best.offset_ns - ahead) <= best.round_trip_ns // 2 + 1  # all that can be said of a slow exchange
        offset = client.clock_estimate.offset_ns
        assert offset in (best.offset_ns, 0)
    assert await asyncio.to_thread(hub.close)
    ((_, told),) = seen
    assert told.resource_logs[0].scope_logs[0].log_records[0].time_unix_nano == began + ahead - offset


async def test_what_finds_the_outbox_full_is_counted_where_it_is_seen(hub: TelemetryHub) -> None:
    outbox = Outbox(most_bytes=2_000)
    request = otlp_request(Signal.LOGS, "x" * 900).SerializeToString()
    assert [outbox.put(Signal.LOGS, request, 7) for _ in range(5)] == [True, True, False, False, False]
    outbox.count_dropped(Signal.TRACES, 3)
    relay = NodeRelay(outbox)
    async with relayed(relay, hub) as client:
        assert await relay.finish(60)
        assert client.received == {Signal.LOGS: 14}
    assert {(each.where, each.signal): each.count for each in hub.losses()} == {
        ("stage-0", Signal.TRACES): 3,
        ("stage-0", Signal.LOGS): 21,
    }
    await asyncio.to_thread(hub.close)


async def test_sequences_are_announced(hub: TelemetryHub) -> None:
    told: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    relay = NodeRelay(Outbox(), lambda sequence, parent: told.put_nowait((sequence, parent)))
    async with relayed(relay, hub) as client:
        client.announce(2**63, "00-abc-def-01")
        client.announce(7, "")
        assert [await told.get(), await told.get()] == [(2**63, "00-abc-def-01"), (7, "")]
    await asyncio.to_thread(hub.close)


async def test_without_anybody_there_the_end_does_not_wait() -> None:
    began = time.monotonic()
    assert not await NodeRelay(Outbox()).finish(100)
    assert time.monotonic() - began < 50, "it would have waited 100 s"


async def test_an_orchestrator_that_takes_nothing_is_not_waited_for(hub: TelemetryHub) -> None:
    """It has opened the stream, and that was all."""
    come: asyncio.Queue[bytes | None] = asyncio.Queue()
    relay = NodeRelay(Outbox())
    serving = asyncio.create_task(relay.serve(End(asyncio.Queue(), come, 0.0)))
    await asyncio.sleep(0.01)
    began = time.monotonic()
    assert not await relay.finish(0.2)
    assert time.monotonic() - began < 50
    await come.put(None)
    await serving
    await asyncio.to_thread(hub.close)


@pytest.mark.parametrize("message", [b"", b"c", b"cshort", b"x", b"gg", b"r" + b"1" * 200, b"T"])
async def test_what_is_not_due_ends_the_nodes_stream(message: bytes) -> None:
    come: asyncio.Queue[bytes | None] = asyncio.Queue()
    await come.put(message)
    with pytest.raises(WireError):
        await NodeRelay(Outbox()).serve(End(asyncio.Queue(), come, 0.0))


@pytest.mark.parametrize("message", [b"", b"T", b"T12", b"C1", b"D", b"E1", b"?"])
async def test_what_is_not_due_from_a_node_ends_its_stream_and_nothing_else(hub: TelemetryHub, message: bytes) -> None:
    come: asyncio.Queue[bytes | None] = asyncio.Queue()
    await come.put(message)
    client = RelayClient(End(asyncio.Queue(), come, 0.0), hub, "stage-0")
    async with asyncio.timeout(60):
        await client.serve()
    assert client.ended.is_set()
    await asyncio.to_thread(hub.close)


async def test_a_new_stream_takes_over(hub: TelemetryHub) -> None:
    outbox = Outbox()
    relay = NodeRelay(outbox)
    async with relayed(relay, hub), relayed(relay, hub) as second:
        outbox.put(Signal.LOGS, otlp_request(Signal.LOGS, "one").SerializeToString(), 1)
        assert await relay.finish(60)
        await asyncio.wait_for(second.ended.wait(), 60)
        assert second.received == {Signal.LOGS: 1}
    await asyncio.to_thread(hub.close)
