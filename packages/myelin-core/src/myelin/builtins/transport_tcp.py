"""The plugin ``tcp``: streams between processes and machines, with as little as can be between a token and the wire."""

from __future__ import annotations

from myelin.plugin import Transport, TransportOptions, hookimpl


@hookimpl
def myelin_transport(name: str, options: TransportOptions) -> Transport | None:
    """The TCP transport, where ``name`` is ``tcp``."""
    if name != "tcp":
        return None
    from myelin.transport.tcp import TcpTransport

    return TcpTransport(options)
