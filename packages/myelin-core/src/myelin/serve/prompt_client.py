"""A client of the prompt RPC: asks a server that ``myelin serve`` runs on this machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from myelin.errors import RequestError, TransportError
from myelin.serve.prompt_protocol import MAX_LINE_BYTES
from myelin.serve.prompt_rpc import split_address
from myelin.serve.prompts import Message

CONNECT_TIMEOUT_S = 5.0


class ServerModel:
    """Answers by a server's pipeline.

    Each question has a connection of its own: closing that is how the RPC cancels an answer.

    Args:
        address: The server's ``host:port``.
        fields: What each request says beside its messages (``max_tokens``, ``temperature``, …); the server's own
            settings hold for everything else.
    """

    def __init__(self, address: str, fields: Mapping[str, object]) -> None:
        self._address = address
        self._fields = dict(fields)

    async def check(self) -> None:
        """Find out whether there is a server.

        Raises:
            TransportError: There is none.
        """
        _, writer = await self._connect()
        writer.close()

    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[str, None]:
        """See :class:`myelin.serve.chat.ChatModel`."""
        reader, writer = await self._connect()
        try:
            request = {"request_id": 0, "messages": [dict(message) for message in messages], **self._fields}
            writer.write(json.dumps({"SubmitPrompt": request}).encode() + b"\n")
            await writer.drain()
            while True:
                kind, body = await _receive(reader)
                if kind == "TextDelta":
                    yield str(body.get("text", ""))
                elif kind == "Done":
                    return
                else:
                    raise _error(body)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise TransportError(
                f"the server at {self._address} has gone away", "start it again with `myelin serve`"
            ) from None
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = split_address(self._address)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
        except OSError:
            raise TransportError(
                f"nobody answers at {self._address}", "start a server with `myelin serve`, or mend the address"
            ) from None


async def _receive(reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
    line = await reader.readuntil(b"\n")
    try:
        ((kind, body),) = json.loads(line).items()
    except (ValueError, AttributeError):
        kind, body = "", None
    if not isinstance(body, dict):
        raise TransportError("what answers there doesn't speak the prompt RPC", "check the address")
    return kind, body


def _error(body: Mapping[str, Any]) -> RequestError:
    """The server's fault. If its pipeline is lost, the server ends, and the next question finds nobody."""
    return RequestError(
        str(body.get("error", "the server failed")), str(body.get("hint", "")), reason=str(body.get("reason", ""))
    )
