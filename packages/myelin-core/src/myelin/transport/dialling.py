"""Dialling: candidates in order, each with a deadline that includes the handshake, and one error that tells of all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from myelin.errors import TransportError
from myelin.transport.contract import Endpoint, TransportOptions
from myelin.transport.handshake import REFUSED_SECRET, WRONG_NODE, WRONG_RUN, prove_as_dialler
from myelin.transport.stream import OpenStream
from myelin.values import NodeId

UNREACHABLE = "unreachable"

_Stream = TypeVar("_Stream", bound=OpenStream)


async def dial(
    endpoint: Endpoint,
    protocol: str,
    options: TransportOptions,
    expect: NodeId | None,
    open_stream: Callable[[str], Awaitable[_Stream]],
) -> _Stream:
    """Open and authenticate a stream to the first candidate that lets us.

    Args:
        open_stream: Opens an unauthenticated stream to one address, or raises TransportError. When it is cancelled it
            leaves nothing open.

    Raises:
        TransportError: No candidate did. The reason is the most telling one: a refusal before ``unreachable``.
    """
    failures: list[tuple[str, TransportError]] = []
    for candidate in endpoint.candidates:
        try:
            async with asyncio.timeout(options.connect_timeout_s):
                stream = await open_stream(candidate)
                await _authenticate(stream, protocol, options, expect)
        except TimeoutError:
            why = f"no answer within {options.connect_timeout_s:g} s"
            failures.append((candidate, TransportError(why, reason=UNREACHABLE)))
        except TransportError as error:
            failures.append((candidate, error))
        else:
            return stream
    raise summary(failures, expect)


def summary(failures: Sequence[tuple[str, TransportError]], expect: NodeId | None) -> TransportError:
    """One error for all candidates that failed, in the order in which they were tried."""
    who = str(expect) if expect is not None else "the node"
    if not failures:
        return TransportError(f"{who} has no address", "--log-level debug shows what it wrote", reason=UNREACHABLE)
    details = "; ".join(f"{address}: {error.message}" for address, error in failures)
    telling = [error for _, error in failures if error.reason != UNREACHABLE]
    if telling:
        return TransportError(f"no stream to {who} ({details})", telling[-1].hint, reason=telling[-1].reason)
    return TransportError(
        f"{who} can't be reached ({details})",
        "check that it runs, and that a firewall or a wrong address isn't in the way",
        reason=UNREACHABLE,
    )


def unknown_protocol(protocol: str) -> TransportError:
    """The error for a listener that doesn't serve ``protocol``."""
    return TransportError(
        f"{protocol} isn't served there", "check that both sides run the same version", reason="unknown-protocol"
    )


async def _authenticate(stream: OpenStream, protocol: str, options: TransportOptions, expect: NodeId | None) -> None:
    try:
        stream.identify(await prove_as_dialler(stream, options, protocol, expect))
    except TransportError as error:
        if error.reason in (REFUSED_SECRET, WRONG_NODE, WRONG_RUN):
            await stream.close()  # in good order: the acceptor is to see our refusal
        else:
            await stream.abort("the handshake failed")
        raise
    except BaseException:
        await stream.abort("the handshake was interrupted")
        raise
