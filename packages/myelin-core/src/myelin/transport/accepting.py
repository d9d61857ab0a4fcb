"""An end to accepting that leaves no half of a connection.

An event loop takes a connection in several turns: asyncio's accepts the socket in one, makes the transport in the next
and tells the protocol in the one after. A server that is closed between the first two leaves a transport that belongs
to nobody (``Server._attach`` of ``asyncio/base_events.py`` fails then, at least up to Python 3.13.0): whoever connected
is never told, and the socket is open until it is collected. So listening ends first, and the server is closed once
those who had just come are all there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

TURNS = 4
"""Of the loop: from an accepted socket to the first step of the task that a stream's server makes of it."""


class HasFile(Protocol):
    """A socket, or what asyncio shows of one."""

    def fileno(self) -> int:
        """Its descriptor; -1 once it is closed."""


async def stop_accepting(listeners: Iterable[HasFile]) -> None:
    """Accept nobody else on sockets that servers of this loop listen on, and wait for those who were accepted.

    (uvloop, which takes a connection in one step, accepts until the server is closed.)
    """
    loop = asyncio.get_running_loop()
    for listener in listeners:
        if (descriptor := listener.fileno()) >= 0:
            loop.remove_reader(descriptor)
    await _settle()


async def close_server(server: asyncio.Server) -> None:
    """Close a server; on return, whoever was accepted by it has been handed to its protocol. Twice is fine."""
    try:
        await stop_accepting(server.sockets)
    finally:
        server.close()
    await _settle()


async def _settle() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)
