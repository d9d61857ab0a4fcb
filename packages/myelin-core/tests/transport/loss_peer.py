"""The other process of ``test_peer_loss.py``: ``listen`` (says where, echoes) or ``dial ADDRESS`` (says so)."""

from __future__ import annotations

import asyncio
import ctypes
import sys

from pydantic import SecretStr

from myelin.transport.contract import EDGE_PROTOCOL, Endpoint, MessageStream, PeerIdentity, Transport, TransportOptions
from myelin.transport.grpc import GrpcTransport
from myelin.transport.tcp import TcpTransport
from myelin.values import Attempt, NodeId, RunId


async def echo(stream: MessageStream) -> None:
    """Send back what comes; on ``hold N`` first hold the interpreter's lock for N keepalives, as a compiler does."""
    while True:
        message = await stream.receive()
        if message.startswith(b"hold"):
            ctypes.PyDLL(None).usleep(int(float(message[4:]) * KEEPALIVE_S * 1_000_000))
        await stream.send(message)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


KEEPALIVE_S = float(sys.argv[1])


def make_transport(name: str, options: TransportOptions) -> Transport:
    return TcpTransport(options) if name == "tcp" else GrpcTransport(options)


async def main(name: str, role: str, address: str = "") -> None:
    identity = PeerIdentity(RunId("run-1"), NodeId("other"), Attempt(1))
    transport = make_transport(name, TransportOptions(identity, SecretStr("a secret"), keepalive_s=KEEPALIVE_S))
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
