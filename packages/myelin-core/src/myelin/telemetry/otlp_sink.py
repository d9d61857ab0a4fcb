"""OTLP to a collector, over HTTP or gRPC: requests as they are, with retries that never outlast their time.

The exporters of OpenTelemetry's SDK take the SDK's own objects, which what comes from nodes is not, and their retries
hold a process's end for seconds.
"""

from __future__ import annotations

import gzip
import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from myelin.telemetry.otlp_target import GRPC, OtlpTarget
from myelin.telemetry.signals import Signal, request_type
from myelin.telemetry.sink import SinkCheck, TelemetrySink

if TYPE_CHECKING:
    from myelin.telemetry.signals import OtlpRequest

_log = logging.getLogger(__name__)
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
_RETRIED_STATUS = frozenset({429, 502, 503, 504})


class Refused(Exception):
    """A request did not arrive.

    Attributes:
        again_in_s: When to try again; None where there is no use.
        answered: Whether somebody was there to say so.
    """

    def __init__(self, why: str, again_in_s: float | None, *, answered: bool = False) -> None:
        super().__init__(why)
        self.again_in_s = again_in_s
        self.answered = answered


class Channel(Protocol):
    """A way to one collector for one signal."""

    def send(self, request: OtlpRequest, timeout_s: float) -> None:
        """Send a request and wait for the answer.

        Raises:
            Refused: It did not arrive.
        """

    def close(self) -> None:
        """Let go of the connection."""


class OtlpSink(TelemetrySink):
    """Sends each signal to its target.

    Args:
        targets: Where each signal goes; others aren't taken.
    """

    name = "otlp"

    def __init__(self, targets: Mapping[Signal, OtlpTarget]) -> None:
        self.signals = frozenset(targets)
        self._targets = dict(targets)
        self._channels: dict[Signal, Channel] = {}
        self._lock = threading.Lock()
        self._hurried = threading.Event()
        self._closed = False
        self._complained = False

    def export(self, signal: Signal, request: OtlpRequest) -> bool:
        """Send a request, again and again until it has arrived, or its time is up."""
        if self._closed or signal not in self._targets:
            return False
        deadline = time.monotonic() + self._targets[signal].timeout_s
        pause = FIRST_PAUSE_S
        while True:
            why = self._try(signal, request, max(0.01, deadline - time.monotonic()))
            if why is None:
                self._complained = False
                return True
            wait = None if why.again_in_s is None else max(why.again_in_s, pause)
            if wait is None or self._hurried.is_set() or time.monotonic() + wait >= deadline:
                self._complain(signal, why)
                return False
            self._hurried.wait(wait)
            pause = min(pause * 2, LONGEST_PAUSE_S)

    def _try(self, signal: Signal, request: OtlpRequest, timeout_s: float) -> Refused | None:
        try:
            self._channel(signal).send(request, timeout_s)
        except Refused as why:
            return why
        return None

    def _channel(self, signal: Signal) -> Channel:
        with self._lock:
            if self._closed:
                raise Refused("the sink is closed", None)
            if signal not in self._channels:
                target = self._targets[signal]
                make = GrpcChannel if target.protocol == GRPC else HttpChannel
                self._channels[signal] = make(target, signal)
            return self._channels[signal]

    def _complain(self, signal: Signal, why: Refused) -> None:
        """Once, until something arrives again: a collector that is away would be complained of with every batch."""
        if not self._complained:
            self._complained = True
            _log.warning("%s could not be sent to %s: %s", signal, self._targets[signal].shown, why)

    def hurry(self) -> None:
        """Don't wait for another try any more."""
        self._hurried.set()

    def check(self, signal: Signal, request: OtlpRequest, timeout_s: float) -> SinkCheck:
        """One try: a collector that answers has it."""
        target = self._targets[signal]
        why = self._try(signal, request, timeout_s)
        if why is None:
            return SinkCheck(self.name, True, True, True, target.shown)
        return SinkCheck(self.name, why.answered, why.answered, False, f"{target.shown}: {why}")

    def close(self) -> None:
        """Close all connections."""
        self._hurried.set()
        with self._lock:
            self._closed = True
            channels, self._channels = tuple(self._channels.values()), {}
        for channel in channels:
            channel.close()


class HttpChannel:
    """OTLP/HTTP with binary protobuf, over one connection that is kept: requests of several threads take turns."""

    def __init__(self, target: OtlpTarget, signal: Signal) -> None:
        from http.client import HTTPConnection
        from urllib.parse import urlsplit

        self._target = target
        parts = urlsplit(target.endpoint)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._turn = threading.Lock()
        self._closed = False
        self._headers = {"content-type": "application/x-protobuf", "user-agent": "myelin", **dict(target.headers)}
        if target.gzip:
            self._headers["content-encoding"] = "gzip"
        if parts.username is not None:
            self._headers.setdefault("authorization", _basic(parts.username, parts.password or ""))
        host = parts.hostname or ""
        self._connection: HTTPConnection
        if parts.scheme == "https":
            import ssl
            from http.client import HTTPSConnection

            context = ssl.create_default_context(cafile=target.certificate or None)
            if target.client_certificate:
                context.load_cert_chain(target.client_certificate, target.client_key or None)
            self._connection = HTTPSConnection(host, parts.port, context=context)
        else:
            self._connection = HTTPConnection(host, parts.port)

    def send(self, request: OtlpRequest, timeout_s: float) -> None:
        """See :class:`Channel`."""
        body = request.SerializeToString()
        if self._target.gzip:
            body = gzip.compress(body, 5)
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=timeout_s):
            raise Refused("TimeoutError: the requests before it took all its time", 0.0)
        try:
            status, reason, again = self._post_again(body, max(0.01, deadline - time.monotonic()))
        except Exception as error:  # http.client raises what sockets, TLS and parsers do
            self._connection.close()
            raise Refused(f"{type(error).__name__}: {error}", 0.0) from None
        finally:
            if self._closed:  # meanwhile, and a request may have opened it anew
                self._connection.close()
            self._turn.release()
        if status in _RETRIED_STATUS:
            raise Refused(f"HTTP {status} {reason}", again, answered=True)
        if not 200 <= status < 300:
            raise Refused(f"HTTP {status} {reason}", None, answered=True)

    def _post_again(self, body: bytes, timeout_s: float) -> tuple[int, str, float]:
        """Twice, where the collector has closed a connection that was idle: that says nothing of the next one."""
        kept = self._connection.sock is not None
        try:
            return self._post(body, timeout_s)
        except ConnectionError:
            if not kept or self._closed:
                raise
            self._connection.close()
            return self._post(body, timeout_s)

    def _post(self, body: bytes, timeout_s: float) -> tuple[int, str, float]:
        connection = self._connection
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        connection.request("POST", self._path, body, self._headers)
        with connection.getresponse() as response:
            response.read(1 << 20)
            if not response.isclosed():  # a longer answer than there is: start anew
                connection.close()
            return response.status, response.reason, _seconds(response.headers.get("retry-after", ""))

    def close(self) -> None:
        """Close the connection, and with it a request that is under way."""
        self._closed = True
        self._connection.close()


class GrpcChannel:
    """OTLP/gRPC: one unary call for each request."""

    def __init__(self, target: OtlpTarget, signal: Signal) -> None:
        import grpc

        self._target = target
        self._headers = target.headers
        compression = grpc.Compression.Gzip if target.gzip else grpc.Compression.NoCompression
        if target.tls:
            credentials = grpc.ssl_channel_credentials(
                _read(target.certificate), _read(target.client_key), _read(target.client_certificate)
            )
            self._channel: Any = grpc.secure_channel(target.authority, credentials, compression=compression)
        else:
            self._channel = grpc.insecure_channel(target.authority, compression=compression)
        service = {Signal.TRACES: "trace.v1.Trace", Signal.METRICS: "metrics.v1.Metrics", Signal.LOGS: "logs.v1.Logs"}
        self._call = self._channel.unary_unary(
            f"/opentelemetry.proto.collector.{service[signal]}Service/Export",
            request_serializer=request_type(signal).SerializeToString,
            response_deserializer=bytes,
        )

    def send(self, request: OtlpRequest, timeout_s: float) -> None:
        """See :class:`Channel`."""
        import grpc

        try:
            self._call(request, timeout=timeout_s, metadata=self._headers)
        except grpc.RpcError as error:
            code = error.code()
            again = 0.0 if code in _retried_codes() else None
            raise Refused(f"gRPC {code.name}: {error.details()}", again, answered=again is None) from None
        except ValueError as error:  # the channel was closed meanwhile
            raise Refused(str(error), None) from None

    def close(self) -> None:
        """Close the channel, and with it a call that is under way."""
        self._channel.close()


def _retried_codes() -> frozenset[Any]:
    """Codes after which OTLP's specification has a client try again."""
    from grpc import StatusCode

    return frozenset(
        {
            StatusCode.CANCELLED,
            StatusCode.DEADLINE_EXCEEDED,
            StatusCode.ABORTED,
            StatusCode.OUT_OF_RANGE,
            StatusCode.UNAVAILABLE,
            StatusCode.DATA_LOSS,
        }
    )


def _read(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()


def _basic(user: str, password: str) -> str:
    import base64
    from urllib.parse import unquote

    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()


def _seconds(text: str) -> float:
    """A ``Retry-After`` in seconds; a date is taken for now."""
    return float(text) if text.isdigit() else 0.0
