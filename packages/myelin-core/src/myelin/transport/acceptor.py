"""The accepting side that all transports share: handshake, handler, and an end in which nothing is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from myelin.errors import StreamClosed, TransportError
from myelin.transport.contract import StreamHandler, TransportOptions
from myelin.transport.handshake import prove_as_acceptor
from myelin.transport.stream import OpenStream

_log = logging.getLogger(__name__)


class Acceptor:
    """Serves the streams of one listener, each in a task of its own."""

    def __init__(self, options: TransportOptions, handlers: Mapping[str, StreamHandler]) -> None:
        self.options = options
        self._handlers = dict(handlers)
        self._open: dict[asyncio.Task[None], OpenStream] = {}
        self._closed = False

    def knows(self, protocol: str) -> bool:
        """Whether a stream of this protocol would be served."""
        return protocol in self._handlers and not self._closed

    def start(self, stream: OpenStream, protocol: str) -> None:
        """Serve a stream that was just opened, from its handshake on."""
        task = asyncio.create_task(self._serve(stream, protocol), name=f"serve {protocol}")
        self._open[task] = stream
        task.add_done_callback(self._open.pop)

    async def close(self, grace_s: float) -> None:
        """Close all streams in good order and wait for their handlers; after ``grace_s`` seconds break both off."""
        self._closed = True
        current = asyncio.current_task()
        serving = {task: stream for task, stream in self._open.items() if task is not current}
        if not serving:
            return
        closing = [asyncio.create_task(stream.close()) for stream in serving.values()]
        await asyncio.wait([*closing, *serving], timeout=grace_s)
        for task in (*closing, *serving):
            task.cancel()
        await asyncio.gather(*(stream.abort("the listener was closed") for stream in serving.values()))
        await asyncio.gather(*closing, *serving, return_exceptions=True)

    async def _serve(self, stream: OpenStream, protocol: str) -> None:
        try:
            async with asyncio.timeout(self.options.connect_timeout_s):
                peer = await prove_as_acceptor(stream, self.options, protocol)
        except TimeoutError:
            _log.warning("a stream of %s was refused: no handshake within the deadline", protocol)
            await stream.abort("no handshake within the deadline")
            return
        except TransportError as error:
            _log.warning("a stream of %s was refused: %s", protocol, error.message)
            await stream.close()  # in good order: the dialler is to see why
            return
        except BaseException:
            await stream.abort("the listener was closed")
            raise

        stream.identify(peer)
        try:
            await self._handlers[protocol](stream)
        except StreamClosed:
            pass  # the handler let the peer's good end pass through: that is its end, too
        except TransportError as error:
            _log.info("a stream of %s with %s ended: %s", protocol, peer.node, error.message)
            await stream.abort("its handler gave it up")
            return
        except Exception:
            _log.exception("the handler of %s for %s failed", protocol, peer.node)
            await stream.abort("its handler failed")
            return
        except BaseException:
            await stream.abort("the listener was closed")
            raise
        await stream.close()
