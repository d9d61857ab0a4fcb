"""Mutual proof of the run's secret, before a stream carries anything else.

Challenge and response over both sides' nonces; the secret itself never crosses the wire::

    dialler  → acceptor   HELLO      nonce_d, identity_d
    acceptor → dialler    CHALLENGE  nonce_a, identity_a, HMAC(secret, "acceptor" ‖ transcript)
    dialler  → acceptor   PROOF      HMAC(secret, "dialler" ‖ transcript)

with HMAC-SHA256 (RFC 2104, FIPS 180-4) and a transcript of the protocol's name, both nonces and both identities, each
with its length before it. The nonces make a recorded proof worthless, the roles make a reflected one worthless, and the
protocol's name ties the proof to what the stream is for. Either side may answer REFUSAL with a reason instead. Since
both know the same secret or don't, the dialler sees from the acceptor's proof alone whether the secrets agree, and
needs no fourth message.

A handshake has no deadline of its own: callers set one around it.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from enum import IntEnum
from typing import Protocol

from myelin.errors import TransportError, WireError
from myelin.transport.contract import Buffer, PeerIdentity, TransportOptions
from myelin.values import Attempt, NodeId, RunId

MAX_HANDSHAKE_BYTES = 1024
NONCE_BYTES = 32
PROOF_BYTES = 32
_MAGIC = b"MYHS\x01"
_MAX_NAME_BYTES = 255

REFUSED_SECRET = "refused-secret"
WRONG_RUN = "wrong-run"
WRONG_NODE = "wrong-node"

_REFUSALS = {
    REFUSED_SECRET: (
        "the other side knows another secret",
        "it belongs to another run or to another start of this one: end what is left of it",
    ),
    WRONG_RUN: (
        "the other side belongs to another run",
        "something else listens on this address: end it, or check the endpoint",
    ),
    WRONG_NODE: (
        "another node than the expected one is there",
        "the address leads to another node: check the endpoint, or narrow the candidates with endpoint_addr_mask",
    ),
}


class RawStream(Protocol):
    """Whole messages, in order; not authenticated yet."""

    async def send(self, message: Buffer) -> None: ...

    async def receive(self) -> bytes: ...


class _Kind(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    REFUSAL = 4


async def prove_as_dialler(
    stream: RawStream, options: TransportOptions, protocol: str, expect: NodeId | None = None
) -> PeerIdentity:
    """Run the dialler's side and return who is at the other end.

    Args:
        expect: The node that must be there; any other is refused.

    Raises:
        TransportError: Reason ``refused-secret``, ``wrong-run`` or ``wrong-node``, or the stream broke.
        WireError: The peer doesn't speak the handshake.
    """
    key, ours, nonce = _key(options), options.identity, secrets.token_bytes(NONCE_BYTES)
    await stream.send(_message(_Kind.HELLO, nonce + _pack_identity(ours)))

    body = _expect(_Kind.CHALLENGE, await stream.receive())
    if len(body) < NONCE_BYTES + PROOF_BYTES:
        raise WireError("a handshake's challenge is too short")
    theirs = _unpack_identity(body[NONCE_BYTES:-PROOF_BYTES])
    transcript = _transcript(protocol, nonce, body[:NONCE_BYTES], ours, theirs)
    reason = ""
    if not hmac.compare_digest(body[-PROOF_BYTES:], _proof(key, b"acceptor", transcript)):
        reason = REFUSED_SECRET
    elif theirs.run != ours.run:
        reason = WRONG_RUN
    elif expect is not None and theirs.node != expect:
        reason = WRONG_NODE
    if reason:
        await stream.send(_message(_Kind.REFUSAL, reason.encode()))
        detail = f": {theirs.node} instead of {expect}" if reason == WRONG_NODE else ""
        raise refusal(reason, detail)

    await stream.send(_message(_Kind.PROOF, _proof(key, b"dialler", transcript)))
    return theirs


async def prove_as_acceptor(stream: RawStream, options: TransportOptions, protocol: str) -> PeerIdentity:
    """Run the acceptor's side and return who dialled.

    Raises:
        TransportError: Reason ``refused-secret`` or ``wrong-run``, or what the dialler refused, or the stream broke.
        WireError: The peer doesn't speak the handshake.
    """
    key = _key(options)
    body = _expect(_Kind.HELLO, await stream.receive())
    if len(body) < NONCE_BYTES:
        raise WireError("a handshake's greeting is too short")
    ours, theirs, nonce = options.identity, _unpack_identity(body[NONCE_BYTES:]), secrets.token_bytes(NONCE_BYTES)
    if theirs.run != ours.run:
        await stream.send(_message(_Kind.REFUSAL, WRONG_RUN.encode()))
        raise refusal(WRONG_RUN)

    transcript = _transcript(protocol, body[:NONCE_BYTES], nonce, theirs, ours)
    await stream.send(_message(_Kind.CHALLENGE, nonce + _pack_identity(ours) + _proof(key, b"acceptor", transcript)))
    proof = _expect(_Kind.PROOF, await stream.receive())
    if not hmac.compare_digest(proof, _proof(key, b"dialler", transcript)):
        raise refusal(REFUSED_SECRET)
    return theirs


def refusal(reason: str, detail: str = "") -> TransportError:
    """The error for a refusal, ours or the peer's; an unknown reason is a refusal without an explanation."""
    message, hint = _REFUSALS.get(
        reason, ("the other side refused the handshake", "check that both run the same version")
    )
    return TransportError(message + detail, hint, reason=reason if reason in _REFUSALS else "refused")


def _key(options: TransportOptions) -> bytes:
    key = options.secret.get_secret_value().encode()
    if not key:
        raise TransportError("the run has no secret", "give the transport the run's secret", reason="no-secret")
    return key


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, _sized(role) + transcript, "sha256")


def _transcript(
    protocol: str, dialler_nonce: bytes, acceptor_nonce: bytes, dialler: PeerIdentity, acceptor: PeerIdentity
) -> bytes:
    parts = (protocol.encode(), dialler_nonce, acceptor_nonce, _pack_identity(dialler), _pack_identity(acceptor))
    return b"".join(_sized(part) for part in parts)


def _sized(part: bytes) -> bytes:
    return struct.pack("<I", len(part)) + part


def _pack_identity(identity: PeerIdentity) -> bytes:
    run, node = identity.run.encode(), identity.node.encode()
    if max(len(run), len(node)) > _MAX_NAME_BYTES or not 0 <= identity.attempt < 1 << 32:
        raise WireError("this node's own identity is out of range")
    return struct.pack("<BBI", len(run), len(node), identity.attempt) + run + node


def _unpack_identity(body: bytes) -> PeerIdentity:
    if len(body) < 6:
        raise WireError("an identity in a handshake is too short")
    run_bytes, node_bytes, attempt = struct.unpack_from("<BBI", body)
    if len(body) != 6 + run_bytes + node_bytes:
        raise WireError("an identity in a handshake has a wrong length")
    try:
        run, node = body[6 : 6 + run_bytes].decode(), body[6 + run_bytes :].decode()
    except UnicodeDecodeError:
        raise WireError("an identity in a handshake is not text") from None
    return PeerIdentity(RunId(run), NodeId(node), Attempt(attempt))


def _message(kind: _Kind, body: bytes) -> bytes:
    return _MAGIC + bytes((kind,)) + body


def _expect(kind: _Kind, message: bytes) -> bytes:
    if len(message) > MAX_HANDSHAKE_BYTES or not message.startswith(_MAGIC) or len(message) <= len(_MAGIC):
        raise WireError(
            "the peer doesn't speak Myelin's handshake", "check the endpoint, and that both run the same version"
        )
    got, body = message[len(_MAGIC)], message[len(_MAGIC) + 1 :]
    if got == _Kind.REFUSAL:
        raise refusal(body.decode(errors="replace"))
    if got != kind:
        raise WireError(f"the peer sent handshake message {got}, not {int(kind)}")
    return body
