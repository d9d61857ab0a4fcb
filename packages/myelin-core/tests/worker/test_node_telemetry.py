"""What a node itself loses of its telemetry is told to the orchestrator, which counts it."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import SecretStr

from myelin.cluster.provider import BootSpec
from myelin.errors import StreamClosed
from myelin.telemetry.hub import TelemetryHub
from myelin.telemetry.relay import RelayClient
from myelin.telemetry.signals import Signal
from myelin.values import Attempt, NodeId, RunId
from myelin.worker.telemetry import NodeTelemetry

BOOT = BootSpec(RunId("run"), NodeId("stage-0"), Attempt(1), SecretStr("s" * 32))


class End:
    """One end of a stream made of two queues."""

    def __init__(self, out: asyncio.Queue[bytes | None], come: asyncio.Queue[bytes | None]) -> None:
        self._out, self._come = out, come

    async def send(self, message: bytes) -> None:
        await self._out.put(bytes(message))

    async def receive(self) -> bytes:
        message = await self._come.get()
        if message is None:
            raise StreamClosed("closed")
        return message

    async def close(self) -> None:
        await self._out.put(None)
        await self._come.put(None)


async def test_spans_that_found_a_full_queue_are_counted_by_the_orchestrator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myelin.worker.telemetry.FINISH_SECONDS", 60.0)
    hub = TelemetryHub([])
    node = NodeTelemetry(BOOT, frozenset({Signal.TRACES}), {"OTEL_BSP_MAX_QUEUE_SIZE": "1"})
    for _ in range(2_000):  # faster than they can be encoded
        node.tracing.tracer.start_span("work").end()
    there: asyncio.Queue[bytes | None] = asyncio.Queue()
    back: asyncio.Queue[bytes | None] = asyncio.Queue()
    client = RelayClient(End(there, back), hub, "stage-0")
    serving = [asyncio.create_task(node.serve(End(back, there))), asyncio.create_task(client.serve())]
    await node.finish()
    await client.close()
    await asyncio.gather(*serving)
    lost = node.tracing.dropped
    assert lost > 0
    assert client.received[Signal.TRACES] + lost == 2_000
    assert [(each.where, each.signal, each.count) for each in hub.losses()] == [("stage-0", Signal.TRACES, lost)]
    await asyncio.to_thread(node.close)
    await asyncio.to_thread(hub.close)
