"""The place of mutual TLS, which isn't here yet.

As things are, a stream is *authenticated* (:mod:`myelin.transport.handshake`: both sides prove that they know the run's
secret, which never crosses the wire) but *not encrypted*, and what follows the handshake isn't protected against
somebody who can change packets on their way. Between processes of one machine that is enough. Between machines, run
Myelin over a network or a tunnel that you trust: an SSH forward, WireGuard, a private network.

What will live here: a small certificate authority for each run, made in the orchestrator's memory; a certificate for
each node and attempt, named by :class:`~myelin.transport.contract.PeerIdentity`, whose key reaches the node in its boot
line; and the credentials that the transports then listen and dial with. The handshake stays, tied to the TLS
session.
"""
