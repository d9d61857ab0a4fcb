"""Running the application inside the loop of a run: signals stay the command's, and the end is bounded in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from myelin.orchestrator.background import in_thread
from myelin.serve.http.address import Listening
from myelin.transport.accepting import stop_accepting

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

GRACE_S = 1
"""Seconds that answers which are under way get when the server ends."""
CLOSE_TIMEOUT_S = 3.0


class HttpServer:
    """Serves an application until it is closed.

    Args:
        listening: Where. The server's own from now on.
        make_app: Makes the application. Called in a thread: importing the web framework takes half a second.
    """

    def __init__(self, listening: Listening, make_app: Callable[[], ASGIApp]) -> None:
        self.listening = listening
        self._make_app = make_app
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Import, build, and answer, until :meth:`close` or a cancellation."""
        self._server = await in_thread(self._make_server)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self.listening.socket]), name="http")
        await asyncio.shield(self._serving)

    def _make_server(self) -> uvicorn.Server:
        import uvicorn

        class InsideALoop(uvicorn.Server):
            """Leaves the signals to whoever owns the loop."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        config = uvicorn.Config(
            self._make_app(),
            http="h11",
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=GRACE_S,
            limit_concurrency=256,
        )
        config.load()
        return InsideALoop(config)

    async def close(self) -> None:
        """Stop answering, within :data:`CLOSE_TIMEOUT_S`. Twice is fine."""
        if self._server is not None and self._serving is not None:
            try:
                if self._server.started:
                    await stop_accepting([self.listening.socket])
            finally:
                self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=CLOSE_TIMEOUT_S)
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        self.listening.close()
