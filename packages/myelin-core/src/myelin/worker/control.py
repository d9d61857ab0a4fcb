"""The control stream's node side: envelopes, the handshake's words, and when a node is on its own for too long."""

from __future__ import annotations

import os
from dataclasses import dataclass

from myelin import __version__
from myelin.errors import MyelinError
from myelin.transport.contract import ORCHESTRATOR, PeerIdentity
from myelin.values import Epoch
from myelin.wire.codec import encode
from myelin.wire.control_pb2 import Envelope, Failure, Hello, Welcome
from myelin.worker.link import MessageLink
from myelin.worker.resources import machine_memory


class ControlLink(MessageLink):
    """A link that carries envelopes."""

    def tell(self, envelope: Envelope) -> None:
        """Send it as soon as the stream takes it."""
        self.push(encode(envelope))


def refusal(hello: Hello, ours: PeerIdentity, peer: PeerIdentity) -> str:
    """Why a control stream that began with ``hello`` is not for us; empty where it is."""
    if peer.node != ORCHESTRATOR:
        return f"{peer.node} is not the orchestrator"
    meant = (hello.run, hello.node, hello.attempt)
    here = (str(ours.run), str(ours.node), int(ours.attempt))
    for name, there, own in zip(("run", "node", "attempt"), meant, here, strict=True):
        if there != own:
            return f"this is {name} {own}, not {there}"
    return ""


def welcome(ours: PeerIdentity, epoch: Epoch | None = None) -> Envelope:
    """The answer to a right Hello: who this is, on what machine, and the newest epoch that was opened here."""
    total, available = machine_memory()
    return Envelope(
        welcome=Welcome(
            run=ours.run,
            node=ours.node,
            attempt=ours.attempt,
            version=__version__,
            process_id=os.getpid(),
            cpu_count=os.cpu_count() or 1,
            memory_bytes=total,
            memory_available_bytes=available,
            epoch=epoch or 0,
        )
    )


def failure(error: BaseException, *, fatal: bool = False, epoch: int = 0) -> Envelope:
    """What the orchestrator is told of an error.

    Args:
        fatal: The node can't go on.
        epoch: The epoch that can't go on, or be opened; 0 where the error isn't one of an epoch.
    """
    if isinstance(error, MyelinError):
        return Envelope(
            failure=Failure(reason=error.reason, message=error.message, hint=error.hint, fatal=fatal, epoch=epoch),
        )
    return Envelope(
        failure=Failure(
            reason="internal",
            message=f"{type(error).__name__}: {error}",
            hint="--log-level debug shows what the node wrote",
            fatal=fatal,
            epoch=epoch,
        )
    )


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a node stays up with nobody to serve.

    Attributes:
        first_dial_s: Nobody has opened a control stream since it listened.
        dead_man_s: The control stream has been lost, and no other came.
    """

    first_dial_s: float = 60.0
    dead_man_s: float = 30.0

    def exhausted(self, *, now: float, listening_since: float, lost_since: float | None, attached: bool) -> str:
        """Why the node should stop itself; empty where it shouldn't. Times are of one monotonic clock, in seconds.

        Args:
            lost_since: When the last control stream ended; None if there never was one.
        """
        if attached:
            return ""
        if lost_since is None:
            if now - listening_since < self.first_dial_s:
                return ""
            return f"nobody opened a control stream within {self.first_dial_s:g} s"
        if now - lost_since < self.dead_man_s:
            return ""
        return f"the control stream has been lost for {self.dead_man_s:g} s"


DEFAULT_PATIENCE = Patience()
