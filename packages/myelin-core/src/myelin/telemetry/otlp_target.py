"""Where OTLP is sent, by OpenTelemetry's standard variables. Pure.

Source: the specification of the OTLP exporter's configuration
(``opentelemetry.io/docs/specs/otel/protocol/exporter``). A signal's own variable counts before the general one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from myelin.errors import ConfigError
from myelin.telemetry.signals import Signal

HTTP = "http/protobuf"
GRPC = "grpc"
DEFAULT_TIMEOUT_S = 10.0
_PREFIX = "OTEL_EXPORTER_OTLP_"


@dataclass(frozen=True, slots=True)
class OtlpTarget:
    """Where one signal goes.

    Attributes:
        protocol: ``http/protobuf`` or ``grpc``.
        endpoint: A URL; for gRPC also ``host:port``.
        headers: Sent along; they may be secret.
        timeout_s: For one request, its retries included.
        gzip: Whether requests are compressed.
        certificate, client_key, client_certificate: Files for TLS; empty for the system's roots, and no own key.
        insecure: gRPC without TLS, where the endpoint has no scheme.
    """

    protocol: str
    endpoint: str
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = DEFAULT_TIMEOUT_S
    gzip: bool = False
    certificate: str = ""
    client_key: str = ""
    client_certificate: str = ""
    insecure: bool = False

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        scheme = urlsplit(self.endpoint).scheme if "://" in self.endpoint else ""
        return scheme == "https" or (not scheme and not self.insecure)

    @property
    def authority(self) -> str:
        """``host:port``, or whatever else gRPC resolves."""
        return urlsplit(self.endpoint).netloc if "://" in self.endpoint else self.endpoint

    @property
    def shown(self) -> str:
        """For people: without a user's name or password."""
        return self.endpoint.rpartition("@")[2] if "@" in self.endpoint else self.endpoint


def otlp_target(environment: Mapping[str, str], signal: Signal) -> OtlpTarget:
    """Where ``signal`` goes.

    Raises:
        ConfigError: A variable names a protocol or an endpoint that there is not.
    """

    def value(name: str) -> str:
        own = environment.get(f"{_PREFIX}{signal.upper()}_{name}", "").strip()
        return own or environment.get(f"{_PREFIX}{name}", "").strip()

    protocol = value("PROTOCOL") or HTTP
    if protocol not in (HTTP, GRPC):
        raise ConfigError(
            f"the OTLP protocol {protocol!r} is not supported",
            f"set OTEL_EXPORTER_OTLP_PROTOCOL to {HTTP} or {GRPC}",
            reason="telemetry",
        )
    return OtlpTarget(
        protocol=protocol,
        endpoint=_endpoint(environment, signal, protocol),
        headers=_headers(value("HEADERS")),
        timeout_s=_timeout(value("TIMEOUT")),
        gzip=value("COMPRESSION").lower() == "gzip",
        certificate=value("CERTIFICATE"),
        client_key=value("CLIENT_KEY"),
        client_certificate=value("CLIENT_CERTIFICATE"),
        insecure=value("INSECURE").lower() == "true",
    )


def _endpoint(environment: Mapping[str, str], signal: Signal, protocol: str) -> str:
    own = environment.get(f"{_PREFIX}{signal.upper()}_ENDPOINT", "").strip()
    shared = environment.get(f"{_PREFIX}ENDPOINT", "").strip()
    if protocol == GRPC:
        return own or shared or "http://localhost:4317"
    endpoint = own or f"{(shared or 'http://localhost:4318').rstrip('/')}/v1/{signal}"
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"the OTLP endpoint {endpoint!r} is not a URL",
            "set OTEL_EXPORTER_OTLP_ENDPOINT to something like http://localhost:4318",
            reason="telemetry",
        )
    return endpoint


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    """``key=value,key=value``, values percent-encoded."""
    pairs = (part.partition("=") for part in text.split(","))
    return tuple((key.strip().lower(), unquote(value.strip())) for key, sign, value in pairs if sign and key.strip())


def _timeout(text: str) -> float:
    """Seconds. The specification counts milliseconds, older exporters for Python counted seconds: nobody means a
    tenth of a second, so a value below 100 is in seconds."""
    try:
        value = float(text)
    except ValueError:
        return DEFAULT_TIMEOUT_S
    if not 0 < value < float("inf"):
        return DEFAULT_TIMEOUT_S
    return value / 1000 if value >= 100 else value
