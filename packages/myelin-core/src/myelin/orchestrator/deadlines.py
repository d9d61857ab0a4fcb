"""Bounded waiting: with an error of its own where the time is up, or without a word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from myelin.errors import NodeError


@asynccontextmanager
async def deadline(seconds: float, what: str, reason: str) -> AsyncIterator[None]:
    """The block ends within ``seconds``.

    Raises:
        NodeError: It did not; ``what`` is the message.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise NodeError(what, "see what the nodes write with --log-level debug", reason=reason) from None


async def within(seconds: float, work: Awaitable[object]) -> None:
    """Wait for ``work``, but no longer than that; then it is cancelled, and nobody is told."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        pass
