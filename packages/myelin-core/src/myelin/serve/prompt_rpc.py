"""The prompt RPC's server: JSON lines over TCP, answered by a live pipeline.

Requests of one connection are answered one after another, those of several connections in the order in which they
came, as many at once as the pipeline has places for sequences. A client that closes its connection cancels what it
asked for.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from myelin.errors import ConfigError, MyelinError, TransportError
from myelin.serve.generation import Completion, TextRequest, TokenPipeline, generate_text
from myelin.serve.prompt_protocol import (
    MAX_LINE_BYTES,
    LineSplitter,
    MalformedLineError,
    SubmitPrompt,
    TooLong,
    done,
    fault,
    parse_request,
    text_delta,
)
from myelin.serve.prompts import Prompter
from myelin.serve.request_book import RequestBook, RequestState, RequestTale
from myelin.telemetry.requests import CHAT, UNLABELLED
from myelin.transport.accepting import close_server
from myelin.values import GREEDY, SamplingParams

MAX_CONNECTIONS = 256
MAX_WAITING = 64
"""Requests of one connection that are read ahead; more stay with the client until there is room."""

WRITE_TIMEOUT_S = 30.0
"""A client that takes nothing for this long has gone away."""

_HTTP_METHODS = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"OPTIONS ", b"DELETE ", b"PATCH ", b"CONNECT ")


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """What a request that doesn't say otherwise gets."""

    max_tokens: int = 64
    sampling: SamplingParams = GREEDY
    stop: tuple[str, ...] = ()


def bind(address: str) -> socket.socket:
    """A socket that listens on ``host:port`` of this machine alone; port 0 takes a free one.

    Clients that come before the server was started wait.

    Raises:
        ConfigError: It is no address, or one that other machines could reach: the prompt RPC asks nobody who they are.
        TransportError: It is in use, or not this machine's.
    """
    host, port = split_address(address)
    key = "prompt.rpc_addr"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{key} names a host that can't be found: {host!r} ({error})", "use 127.0.0.1") from None
    family, _, _, _, place = found[0]
    if not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"{key} is {address}, which other machines could reach, and the prompt RPC asks nobody who they are",
            "use 127.0.0.1, and an SSH forward to reach it from elsewhere",
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise TransportError(
            f"The prompt RPC can't listen on {address}: {error.strerror}",
            "end what uses that port, or choose another one with --rpc-bind",
            reason="address-in-use",
        ) from None
    return listener


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``.

    Raises:
        ConfigError: It is neither.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{address!r} is no address", "write it as host:port, such as 127.0.0.1:19777")
    return host, int(port)


def show_address(listener: socket.socket) -> str:
    """``host:port`` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class PromptServer:
    """Answers the prompt RPC until it is closed.

    Args:
        pipeline: What computes.
        prompter: What turns words into tokens.
        places: Requests that are computed at once; the others wait in the order in which they came.
        defaults: For requests that don't say otherwise.
        on_request: Told a line for people at the end of each request.
        book: Told of every request.
    """

    def __init__(
        self,
        pipeline: TokenPipeline,
        prompter: Prompter,
        *,
        places: int = 1,
        defaults: RequestDefaults = RequestDefaults(),
        on_request: Callable[[str], None] = lambda line: None,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        book: RequestBook | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._prompter = prompter
        self._places = asyncio.Semaphore(places)
        self._defaults = defaults
        self._on_request = on_request
        self._write_timeout_s = write_timeout_s
        self._book = book if book is not None else RequestBook()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Begin to answer on a socket from :func:`bind`, which is the server's from now on."""
        # In two steps: cancelled in the middle of both, asyncio would leave nobody to close the socket.
        self._server = await asyncio.start_server(self._accept, sock=listener, start_serving=False)
        await self._server.start_serving()

    async def close(self) -> None:
        """Stop answering: running requests are cancelled, connections closed. Twice is fine."""
        if self._server is not None:
            await close_server(self._server)
        connections = tuple(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) > MAX_CONNECTIONS:
                await self._send(writer, fault(None, "too many connections", "close some", "too-many"))
            else:
                await self._serve(reader, writer)
            writer.close()
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            # The client has gone, or takes nothing, or the server is closing: there is nobody to tell, and nothing to
            # wait for.
            writer.transport.abort()
        finally:
            self._connections.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read requests and answer them, until the client has gone."""
        waiting: asyncio.Queue[SubmitPrompt | MyelinError] = asyncio.Queue(MAX_WAITING)
        answering = asyncio.ensure_future(self._answer_all(waiting, writer))
        reading = asyncio.ensure_future(self._read_all(reader, waiting))
        try:
            finished, _ = await asyncio.wait({answering, reading}, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
        finally:
            for task in (answering, reading):
                task.cancel()
            await asyncio.gather(answering, reading, return_exceptions=True)

    async def _read_all(self, reader: asyncio.StreamReader, waiting: asyncio.Queue[SubmitPrompt | MyelinError]) -> None:
        """Put requests into ``waiting`` until the client has gone; a line that is none becomes the error to send."""
        lines = LineSplitter()
        first = True
        while data := await reader.read(65536):
            for line in lines.feed(data):
                item: SubmitPrompt | MyelinError
                if isinstance(line, TooLong):
                    item = MalformedLineError(f"a line is longer than {MAX_LINE_BYTES} bytes")
                else:
                    if first and line.startswith(_HTTP_METHODS):
                        return  # a web page must not be able to make a browser ask for text here
                    item = _request_or_error(line)
                first = False
                await waiting.put(item)

    async def _answer_all(
        self, waiting: asyncio.Queue[SubmitPrompt | MyelinError], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            item = await waiting.get()
            if isinstance(item, SubmitPrompt):
                await self._answer(item, writer)
            else:
                await self._send_fault(writer, getattr(item, "request_id", None), item)

    async def _answer(self, request: SubmitPrompt, writer: asyncio.StreamWriter) -> None:
        """Answer one request; whatever is wrong with it is told to its sender."""
        tale = self._book.arrived("prompt-rpc", str(request.request_id))
        try:
            # Templates and tokenizers may take a while over a long prompt, and other requests mustn't wait for that.
            text_request = await asyncio.to_thread(self._text_request, request)
            async with self._places:
                completion = await self._stream(request, text_request, writer, tale)
        except MyelinError as error:
            tale.end(RequestState.FAILED, error.reason, error.message)
            self._on_request(f"request {request.request_id!r} failed: {error.message}")
            await self._send_fault(writer, request.request_id, error)
            return
        finally:
            tale.end(RequestState.CANCELLED)  # it ended in another way, or whoever asked has gone away
        milliseconds = round(completion.timings.elapsed_s * 1000)
        count = len(completion.tokens)
        self._on_request(f"request {request.request_id!r}: {count} tokens in {milliseconds} ms")
        await self._send(
            writer, done(request.request_id, completion.text, count, milliseconds, completion.finish_reason)
        )

    async def _stream(
        self, request: SubmitPrompt, text_request: TextRequest, writer: asyncio.StreamWriter, tale: RequestTale
    ) -> Completion:
        async with aclosing(generate_text(self._pipeline, text_request, tale=tale)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Completion):
                    return piece
                await self._send(writer, text_delta(request.request_id, piece.text))
        raise AssertionError("a generation ends with its completion")

    def _text_request(self, request: SubmitPrompt) -> TextRequest:
        defaults, sampling = self._defaults, self._defaults.sampling
        if request.messages is not None:
            prompt = self._prompter.conversation([message.model_dump() for message in request.messages])
        else:
            prompt = self._prompter.one(request.prompt_text or "", raw=request.raw)
        return TextRequest(
            prompt=prompt,
            max_tokens=defaults.max_tokens if request.max_tokens is None else request.max_tokens,
            sampling=SamplingParams(
                temperature=sampling.temperature if request.temperature is None else request.temperature,
                top_k=sampling.top_k if request.top_k is None else request.top_k,
                top_p=sampling.top_p if request.top_p is None else request.top_p,
                seed=sampling.seed if request.seed is None else request.seed,
            ),
            stop=defaults.stop if request.stop is None else tuple(request.stop),
            label=UNLABELLED if request.messages is None and request.raw else CHAT,
        )

    async def _send_fault(self, writer: asyncio.StreamWriter, request_id: str | int | None, error: MyelinError) -> None:
        await self._send(writer, fault(request_id, error.message, error.hint, error.reason))

    async def _send(self, writer: asyncio.StreamWriter, line: bytes) -> None:
        writer.write(line)
        async with asyncio.timeout(self._write_timeout_s):
            await writer.drain()


def _request_or_error(line: bytes) -> SubmitPrompt | MyelinError:
    try:
        return parse_request(line)
    except MyelinError as error:
        return error
