"""A program for ``test_quiet_end.py``: opens streams, ends as its argument says, and closes in ``finally``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from pydantic import SecretStr

from myelin.transport.contract import EDGE_PROTOCOL, Endpoint, MessageStream, PeerIdentity, Transport, TransportOptions
from myelin.transport.grpc import GrpcTransport
from myelin.transport.tcp import TcpTransport
from myelin.values import Attempt, NodeId, RunId


def transport(node: str) -> Transport:
    options = TransportOptions(PeerIdentity(RunId("run-1"), NodeId(node), Attempt(1)), SecretStr("hush"))
    return TcpTransport(options) if sys.argv[3] == "tcp" else GrpcTransport(options)


async def echo(stream: MessageStream) -> None:
    while True:
        await stream.send(await stream.receive())


async def flood(stream: MessageStream) -> None:
    while True:
        await stream.send(bytes(100_000))


async def main(way: str) -> None:
    asyncio.get_running_loop().slow_callback_duration = 60.0  # a busy machine is nothing to write about
    acceptor, dialler = transport("stage-0"), transport("orchestrator")
    try:
        listener = await acceptor.listen("127.0.0.1:0", {EDGE_PROTOCOL: echo})
        streams = [await dialler.connect(Endpoint((listener.address,)), EDGE_PROTOCOL) for _ in range(3)]
        for stream in streams:
            await stream.send(b"there?")
            await stream.receive()
        if way == "acceptor":
            await acceptor.close()
        elif way == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        elif way == "flood":
            tasks = [asyncio.create_task(flood(stream)) for stream in streams]
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await dialler.close()
        await acceptor.close()


if __name__ == "__main__":
    try:
        if sys.argv[2] == "uvloop":
            import uvloop

            uvloop.run(main(sys.argv[1]))
        else:
            asyncio.run(main(sys.argv[1]))
    except KeyboardInterrupt:
        pass
