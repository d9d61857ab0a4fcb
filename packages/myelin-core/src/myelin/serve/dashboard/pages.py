"""The page's routes: itself, its files, its events, and signing in."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response

from myelin.serve.dashboard.feed import Feed
from myelin.serve.dashboard.state import Snapshot
from myelin.serve.http.guard import Access

STATIC = files("myelin.serve.dashboard") / "static"
MAX_WATCHERS = 64
HEARTBEAT_S = 10
SEND_TIMEOUT_S = 30.0
MAX_FORM_BYTES = 4096

_FRESH = {"cache-control": "no-cache"}
"""The files may be kept, but are asked about each time: they belong to this version of Myelin."""

_MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def dashboard_router(feed: Feed, access: Access) -> APIRouter:
    """``/dashboard`` and all below it."""
    router = APIRouter()
    watchers = Watchers(feed)
    names = {entry.name for entry in STATIC.iterdir() if PurePath(entry.name).suffix in _MEDIA_TYPES}

    @router.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("/dashboard", status_code=307)

    @router.get("/dashboard")
    async def page() -> Response:
        return FileResponse(str(STATIC / "index.html"), headers=_FRESH)

    @router.get("/dashboard/state")
    async def state() -> Response:
        return JSONResponse(_timed(feed.snapshot.as_json()), headers={"cache-control": "no-store"})

    @router.get("/dashboard/events")
    async def events() -> Response:
        return watchers.answer()

    @router.get("/dashboard/sign-in")
    async def sign_in(token: str = "") -> Response:
        """The form; a link with a token in it needs none."""
        if not access.token:
            return RedirectResponse("/dashboard", status_code=303)
        if token:
            return _signed_in(access) if access.is_token(token) else _form(wrong=True)
        return _form(wrong=False)

    @router.post("/dashboard/sign-in")
    async def sign_in_by_form(request: Request) -> Response:
        from urllib.parse import parse_qs

        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM_BYTES:
                return Response(status_code=413)
        token = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
        return _signed_in(access) if access.is_token(token) else _form(wrong=True)

    @router.get("/dashboard/static/{name}")
    async def file(name: str) -> Response:
        """One of the page's files, of which there are these and no others."""
        if name not in names:
            return Response(status_code=404)
        return FileResponse(str(STATIC / name), headers=_FRESH, media_type=_MEDIA_TYPES[PurePath(name).suffix])

    return router


def _form(*, wrong: bool) -> Response:
    text = (STATIC / "sign-in.html").read_text(encoding="utf-8")
    if wrong:
        text = text.replace("<p hidden", "<p")
    return HTMLResponse(text, 401 if wrong else 200, headers={"cache-control": "no-store"})


def _signed_in(access: Access) -> Response:
    response = RedirectResponse("/dashboard", status_code=303)
    response.set_cookie(access.cookie, access.session, httponly=True, samesite="strict", path="/")
    return response


class Watchers:
    """Those who have the page open."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._count = 0

    def answer(self) -> Response:
        """A stream of events for one more watcher: ``snapshot``, then ``increment`` after ``increment``, ``bye``."""
        if self._count >= MAX_WATCHERS:
            return JSONResponse({"error": {"message": "too many pages are open", "type": "too-many"}}, 503)
        return EventSourceResponse(
            self._events(),
            ping=HEARTBEAT_S,
            ping_message_factory=lambda: ServerSentEvent(data=json.dumps({"now": time.time()}), event="beat"),
            send_timeout=SEND_TIMEOUT_S,
            sep="\n",
        )

    async def _events(self) -> AsyncIterator[ServerSentEvent]:
        self._count += 1
        try:
            async for news in self._feed.watch():
                if isinstance(news, Snapshot):
                    yield _event("snapshot", news.as_json())
                else:
                    yield _event("increment", news.as_json())
            yield _event("bye", {})
        finally:
            self._count -= 1


def _event(kind: str, body: dict[str, object]) -> ServerSentEvent:
    return ServerSentEvent(event=kind, data=json.dumps(_timed(body), ensure_ascii=False, separators=(",", ":")))


def _timed(body: dict[str, object]) -> dict[str, object]:
    """With this machine's clock, so that a page on another one shows the right ages."""
    return {"now": round(time.time(), 3), **body}
