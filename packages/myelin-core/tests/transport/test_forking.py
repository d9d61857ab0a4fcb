"""A process with open gRPC streams starts other processes: none of them crashes on its way."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, collections, contextlib, subprocess
import myelin.transport.grpc
import grpc.aio
import uvloop

async def main():
    async def echo(messages, context):
        async for message in messages:
            yield message

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.b", {"c": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def chat():
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            call = channel.stream_stream("/a.b/c")()
            while True:
                await call.write(b"x" * 1000)
                await call.read()

    chats = [asyncio.create_task(chat()) for _ in range(4)]
    await asyncio.sleep(0.2)
    codes = collections.Counter()
    for _ in range(150):
        child = await asyncio.create_subprocess_exec("true", stdin=subprocess.PIPE)
        codes[await child.wait()] += 1
    print(dict(codes), flush=True)
    for each in chats:
        each.cancel()
    await asyncio.gather(*chats, return_exceptions=True)
    await server.stop(0)

uvloop.run(main())
"""


def test_children_of_a_process_with_streams_start_well() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=150, check=False)
    assert found.stdout == "{0: 150}\n", found.stdout + found.stderr[-2000:]
