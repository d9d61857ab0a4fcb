"""How gRPC's connections are set up, and what its errors mean in words."""

from __future__ import annotations

import grpc
import grpc.aio

from myelin.errors import TransportError
from myelin.transport.contract import PeerIdentity, TransportOptions
from myelin.transport.dialling import UNREACHABLE, unknown_protocol
from myelin.transport.handshake import MAX_HANDSHAKE_BYTES
from myelin.transport.stream import lost


def channel_arguments(options: TransportOptions) -> list[tuple[str, int]]:
    """gRPC's arguments for both ends of a connection.

    A peer that answers nothing is pinged after ``keepalive_s`` and gone after as long again. That takes *both*
    timeouts: with ``keepalive_timeout_ms`` alone the transport's own ping timeout decides, which is a minute.
    """
    keepalive_ms = max(1, round(options.keepalive_s * 1000))
    return [
        # One byte more than a message: see the escape in grpc_stream.py.
        ("grpc.max_receive_message_length", max(options.max_message_bytes, MAX_HANDSHAKE_BYTES) + 1),
        ("grpc.max_send_message_length", -1),  # checked before, with an error of our own
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),  # a connection for each stream
        ("grpc.enable_http_proxy", 0),  # HTTP_PROXY isn't meant for neighbours
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
    ]


def server_arguments(options: TransportOptions) -> list[tuple[str, int]]:
    """gRPC's arguments for a server."""
    return [
        *channel_arguments(options),
        ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a lottery
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),  # clients may ping as often as they like
    ]


def failure(error: Exception, peer: PeerIdentity | None, protocol: str) -> TransportError:
    """The error of a stream whose call failed with ``error``; ``peer`` is None while it is being opened."""
    if isinstance(error, TransportError):
        return error
    if not isinstance(error, grpc.aio.AioRpcError):
        return lost(peer, "its call had ended")  # gRPC's internal errors for using a call that is over
    code, details = error.code(), error.details() or ""
    if peer is None and code == grpc.StatusCode.UNIMPLEMENTED:
        return unknown_protocol(protocol)
    why = explain(code.name, details)
    if peer is None and code == grpc.StatusCode.UNAVAILABLE:
        return TransportError(why, reason=UNREACHABLE)
    return lost(peer, why)


_EXPLANATIONS = {
    "Connection refused": "nobody listens there",
    "DNS resolution failed": "its name can't be resolved",
    "Name or service not known": "its name can't be resolved",
    "No route to host": "there is no route to it",
    "Network is unreachable": "its network can't be reached",
    "keepalive": "it doesn't answer any more",
    "ping timeout": "it doesn't answer any more",
    "Socket closed": "its connection was closed",
    "Connection reset": "its connection was reset",
    "Broken pipe": "its connection was closed",
    "larger than max": "a message came that is above the limit",
    "broken off by the acceptor": "the other side broke it off",
}


def explain(code: str, details: str) -> str:
    """gRPC's details in a few words; unknown ones are shortened to one line."""
    for sign, words in _EXPLANATIONS.items():
        if sign in details:
            return words
    line = " ".join(details.split())
    return f"{code.lower().replace('_', ' ')}: {line[:200]}" if line else code.lower().replace("_", " ")
