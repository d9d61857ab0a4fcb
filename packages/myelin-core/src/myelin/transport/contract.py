"""The transport contract: message streams named by protocol, like ALPN, authenticated before the first message.

Every stream begins with the handshake of :mod:`myelin.transport.handshake`: both sides prove that they know the run's
secret and learn who the other one is. What an application sends afterwards are whole messages of bytes, in order,
without loss, until one side closes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pydantic import SecretStr

from myelin.values import Attempt, NodeId, RunId

CONTROL_PROTOCOL = "myelin/control/1"
EDGE_PROTOCOL = "myelin/edge/1"
TELEMETRY_PROTOCOL = "myelin/telemetry/1"

ORCHESTRATOR = NodeId("orchestrator")
"""The node id under which the orchestrator takes part."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who is at an end of a stream."""

    run: RunId
    node: NodeId
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a node listens: candidate addresses (``host:port``), tried in order."""

    candidates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """What a transport is made with.

    Attributes:
        identity: Ours.
        secret: The run's; both sides prove it, it never crosses the wire.
        max_message_bytes: Larger messages are refused on both sides.
        connect_timeout_s: For one candidate, handshake included.
        keepalive_s: A peer that says nothing for two to three times this long is gone, even if it is only stopped.
    """

    identity: PeerIdentity
    secret: SecretStr
    max_message_bytes: int = 64 * 1024 * 1024
    connect_timeout_s: float = 10.0
    keepalive_s: float = 2.0


class MessageStream(Protocol):
    """An open, authenticated stream. One task may send while another receives."""

    @property
    def peer(self) -> PeerIdentity:
        """Who is at the other end, as proved in the handshake."""

    async def send(self, message: Buffer) -> None:
        """Hand over one message; returns once the transport has taken it (back-pressure).

        The buffer may be changed afterwards. A send that is cancelled while it waits may break the stream.

        Raises:
            TransportError: The stream is closed or broken, or the message is too large.
        """

    async def receive(self) -> bytes:
        """The next message. A receive that is cancelled has lost nothing.

        Raises:
            StreamClosed: The peer closed in good order; every message before was delivered.
            TransportError: The stream broke.
        """

    async def close(self) -> None:
        """Close in good order, both ways: what was sent is still delivered, what comes is dropped. Twice is fine."""


@runtime_checkable
class DirectStream(Protocol):
    """What a :class:`MessageStream` may offer besides, for messages that must not lose time: fewer steps each way.

    Optional; who uses it does without where a transport has none. Messages of :meth:`post` and ``send`` arrive in the
    order of the calls.
    """

    def post(self, message: bytes) -> None:
        """Send from any thread, at once, without waiting. Nothing bounds what waits to be sent: its user must.

        On a stream that has ended the message is dropped; receiving tells why.

        Raises:
            TransportError: The message is too large.
        """

    async def deliver_to(self, on_message: Callable[[bytes], None]) -> None:
        """Call ``on_message`` with every message, on the event loop, as soon as it is read; in place of ``receive``.

        Never returns by itself; cancelled, it has lost nothing.

        Raises:
            StreamClosed, TransportError: As ``receive``.
            Exception: What ``on_message`` raised; it is not called again.
        """


StreamHandler = Callable[[MessageStream], Awaitable[None]]
"""Serves one accepted stream; the stream is closed when it returns, and broken off when it raises.

Raising :class:`~myelin.errors.StreamClosed` is a return: a handler may let the peer's good end pass through.
"""


class Listener(Protocol):
    """A bound address that accepts streams."""

    @property
    def address(self) -> str:
        """The bound ``host:port``, with the real port where 0 was asked for."""

    async def close(self, grace_s: float = 1.0) -> None:
        """Stop accepting, close open streams, free the port. Twice is fine."""


class Transport(Protocol):
    """Opens and accepts message streams."""

    async def listen(self, bind: str, accept: Mapping[str, StreamHandler]) -> Listener:
        """Accept streams on ``bind`` (``host:port``), each handed to its protocol's handler.

        A stream whose handshake fails, or whose protocol isn't in ``accept``, never reaches a handler.

        Raises:
            TransportError: The address is in use or not ours (reason ``address-in-use`` / ``bind``).
        """

    async def connect(self, endpoint: Endpoint, protocol: str, *, expect: NodeId | None = None) -> MessageStream:
        """Open a stream to the first candidate that answers.

        Args:
            expect: The node that must be there; another one is refused.

        Raises:
            TransportError: No candidate answered in time, the secret was wrong, or another node was there.
        """

    async def close(self) -> None:
        """Close all connections and listeners. Twice is fine."""
