"""What every transport's streams can do beyond the contract, for the code that all transports share."""

from __future__ import annotations

from typing import Protocol

from myelin.errors import StreamClosed, TransportError
from myelin.transport.contract import Buffer, MessageStream, PeerIdentity


class OpenStream(MessageStream, Protocol):
    """A stream as its transport sees it: not authenticated at first, and it can be broken off."""

    def identify(self, peer: PeerIdentity) -> None:
        """Note who is at the other end; called once, when the handshake has proved it."""

    async def abort(self, why: str) -> None:
        """Break off at once: what is under way may be lost, and both sides' calls raise. Twice is fine."""


def checked_size(message: Buffer, limit: int) -> int:
    """The bytes of a message that is to be sent.

    Raises:
        TransportError: It is above the limit (reason ``message-too-large``).
    """
    size = message.nbytes if isinstance(message, memoryview) else len(message)
    if size > limit:
        raise TransportError(
            f"a message of {size} bytes is above the limit of {limit}",
            "raise the transport's max_message_bytes, or send less at once",
            reason="message-too-large",
        )
    return size


def closed_here() -> TransportError:
    """The error of a stream that its own side has closed."""
    return TransportError("the stream was closed on this side", reason="closed")


def closed_by_peer(peer: PeerIdentity | None) -> StreamClosed:
    """The error of a stream that the other side has closed in good order."""
    return StreamClosed(f"{named(peer)} closed the stream")


def lost(peer: PeerIdentity | None, why: str) -> TransportError:
    """The error of a stream that broke."""
    return TransportError(
        f"the stream to {named(peer)} broke: {why}",
        "the other side ended or can't be reached any more: see its log",
        reason="stream-lost",
    )


def fresh(error: TransportError) -> TransportError:
    """An error that is kept and raised again and again, without the traces of earlier times, which would pile up."""
    return error.with_traceback(None)


def named(peer: PeerIdentity | None) -> str:
    """A peer's name for people."""
    return "the peer" if peer is None else str(peer.node)
