"""Addresses as people write them: ``host:port``, with an IPv6 host in brackets."""

from __future__ import annotations

import errno
import socket

from myelin.errors import TransportError


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``.

    Raises:
        TransportError: It is no such thing (reason ``bind``).
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not port.isdecimal() or not port.isascii() or int(port) > 65_535:
        raise TransportError(f"{address!r} is not host:port", "write it like 127.0.0.1:19777", reason="bind")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The inverse of :func:`parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_in_use(address: str) -> TransportError:
    """The error for an address on which something listens already."""
    return TransportError(
        f"{address} is in use",
        "stop what listens there, or choose another port (0 takes a free one)",
        reason="address-in-use",
    )


def explain_bind_failure(address: str) -> TransportError:
    """Why ``address`` can't be bound, found by trying to; call it after a bind that failed. May resolve a name."""
    host, port = parse_address(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return address_in_use(address)
        why = error.strerror or str(error)
        return TransportError(
            f"{address} can't be listened on: {why}", "use an address of this machine, such as 127.0.0.1", reason="bind"
        )
    return address_in_use(address)  # it was taken a moment ago, and is free again
