"""The plugin ``grpc``: streams between processes and machines."""

from __future__ import annotations

from myelin.plugin import Transport, TransportOptions, hookimpl


@hookimpl
def myelin_transport(name: str, options: TransportOptions) -> Transport | None:
    """The gRPC transport, where ``name`` is ``grpc``; only then is gRPC imported."""
    if name != "grpc":
        return None
    from myelin.transport.grpc import GrpcTransport

    return GrpcTransport(options)
