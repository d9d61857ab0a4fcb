"""Where HTTP is answered, and what its clients must show."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from pydantic import SecretStr

from myelin.errors import ConfigError, TransportError
from myelin.serve.prompt_rpc import split_address

BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket that listens already; clients that come before the server was started wait.

    Attributes:
        socket: It.
        host, port: Where; as the person wrote the host.
        loopback: Only this machine reaches it.
        token: What clients must show; None lets everybody in.
    """

    socket: socket.socket
    host: str
    port: int
    loopback: bool
    token: SecretStr | None

    @property
    def url(self) -> str:
        """For people on this machine, or for those who know the host by another name."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Stop listening; twice is fine."""
        self.socket.close()


def listen(address: str, token: SecretStr | None) -> Listening:
    """Listen on ``host:port``; port 0 takes a free one.

    Raises:
        ConfigError: It is no address, or other machines could reach it and nothing is asked of them.
        TransportError: It is in use, or not this machine's.
    """
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"serve.http names a host that can't be found: {host!r} ({error})", "use 127.0.0.1") from None
    family, _, _, _, place = found[0]
    loopback = ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback
    if not loopback and token is None:
        raise ConfigError(
            f"serve.http is {address}, which other machines could reach, and there is no token for them to show",
            "set MYELIN_SERVE_TOKEN to 16 or more characters of your own, or use 127.0.0.1",
            reason="token-missing",
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise TransportError(
            f"HTTP can't be answered on {address}: {error.strerror}",
            "end what uses that port, or choose another one with --http-bind",
            reason="address-in-use",
        ) from None
    return Listening(listener, host, listener.getsockname()[1], loopback, token)
