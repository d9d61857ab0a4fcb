"""The other process of ``test_grpc_loss.py``: ``listen`` (says where, echoes) or ``dial ADDRESS`` (says so)."""

from __future__ import annotations

import asyncio
import sys

from myelin.transport.contract import EDGE_PROTOCOL, Endpoint, MessageStream, PeerIdentity, TransportOptions
from myelin.transport.grpc import GrpcTransport
from myelin.values import Attempt, NodeId, RunId
from pydantic import SecretStr


async def echo(stream: MessageStream) -> None:
    while True:
        await stream.send(await stream.receive())


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def main(keepalive_s: float, role: str, address: str = "") -> None:
    identity = PeerIdentity(RunId("run-1"), NodeId("other"), Attempt(1))
    transport = GrpcTransport(TransportOptions(identity, SecretStr("a secret"), keepalive_s=keepalive_s))
    if role == "listen":
        listener = await transport.listen("127.0.0.1:0", {EDGE_PROTOCOL: echo})
        say(listener.address)
        await asyncio.sleep(60)
    else:
        stream = await transport.connect(Endpoint((address,)), EDGE_PROTOCOL)
        say("in")
        await echo(stream)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), *sys.argv[2:]))
