"""The other process of ``test_grpc_loss.py``: ``listen`` (says where, echoes) or ``dial ADDRESS`` (says so)."""

from __future__ import annotations

import asyncio
import ctypes
import sys

from pydantic import SecretStr

from myelin.transport.contract import EDGE_PROTOCOL, Endpoint, MessageStream, PeerIdentity, TransportOptions
from myelin.transport.grpc import GrpcTransport
from myelin.values import Attempt, NodeId, RunId


async def echo(stream: MessageStream) -> None:
    """Send back what comes; on ``hold`` first sleep while holding the interpreter's lock, as a compiler does."""
    while True:
        message = await stream.receive()
        if message == b"hold":
            ctypes.PyDLL(None).usleep(int(4 * KEEPALIVE_S * 1_000_000))
        await stream.send(message)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


KEEPALIVE_S = float(sys.argv[1])


async def main(role: str, address: str = "") -> None:
    identity = PeerIdentity(RunId("run-1"), NodeId("other"), Attempt(1))
    transport = GrpcTransport(TransportOptions(identity, SecretStr("a secret"), keepalive_s=KEEPALIVE_S))
    if role == "listen":
        listener = await transport.listen("127.0.0.1:0", {EDGE_PROTOCOL: echo})
        say(listener.address)
        await asyncio.sleep(60)
    else:
        stream = await transport.connect(Endpoint((address,)), EDGE_PROTOCOL)
        say("in")
        await echo(stream)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[2:]))
