"""The web application: routers behind the guard. Whatever is served over HTTP joins it as one more router."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fastapi import APIRouter, FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from myelin import __version__
from myelin.serve.http.guard import SECURITY_HEADERS, Access, Verdict
from myelin.serve.http.health import LOST, Health

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

SIGN_IN = "/dashboard/sign-in"

_REFUSALS = {
    Verdict.WRONG_HOST: (421, "this server answers to the names of this machine alone"),
    Verdict.CROSS_SITE: (403, "another site asked for this"),
    Verdict.NO_TOKEN: (401, "show the token of this server: Authorization: Bearer …"),
}


def create_app(
    access: Access, health: Health, metrics: Callable[[], bytes], routers: Iterable[APIRouter] = ()
) -> FastAPI:
    """The application.

    Args:
        access: What clients must show.
        health: The truth about the run.
        metrics: What ``/metrics`` answers: Prometheus' text format.
        routers: What else is served.
    """
    app = FastAPI(title="Myelin", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(_vital_signs(health, metrics))
    for router in routers:
        app.include_router(router)
    app.add_middleware(Guard, access=access)
    return app


def _vital_signs(health: Health, metrics: Callable[[], bytes]) -> APIRouter:
    """``/health``, ``/health/live`` and ``/metrics``."""
    router = APIRouter()

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def is_healthy() -> Response:
        """200 while a token could go through the chain; 503 before, while it recovers, and after."""
        body = {"status": health.status, "phase": health.phase_now}
        return JSONResponse(body, 200 if health.healthy else 503, headers={"cache-control": "no-store"})

    @router.api_route("/health/live", methods=["GET", "HEAD"])
    async def is_alive() -> Response:
        """200 unless the run is lost: it answers, and restarting it would gain nothing."""
        lost = health.status == LOST
        return JSONResponse({"status": "lost" if lost else "alive"}, 503 if lost else 200)

    @router.get("/metrics")
    async def current_metrics() -> Response:
        """Prometheus' text format."""
        return Response(metrics(), media_type=PROMETHEUS_TEXT, headers={"cache-control": "no-store"})

    return router


class Guard:
    """Lets no request through that :meth:`Access.verdict` refuses, and puts the security headers on every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        joined = {name: headers[name] for name in set(headers.keys())}
        verdict = self._access.verdict(scope["path"], joined)

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                outgoing = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    outgoing.setdefault(name, value)
            await send(message)

        answer = self._app if verdict is Verdict.ADMIT else refusal(verdict, scope, headers)
        await answer(scope, receive, send_safely)


def refusal(verdict: Verdict, scope: Scope, headers: Headers) -> Response:
    """The answer to a request that isn't admitted; a person who wants to see the page is led to where one signs in."""
    wants_page = scope["path"] == "/dashboard" and "text/html" in headers.get("accept", "")
    if verdict is Verdict.NO_TOKEN and wants_page:
        query = scope.get("query_string", b"").decode("latin-1")
        return RedirectResponse(f"{SIGN_IN}?{query}" if query else SIGN_IN, status_code=303)
    status, message = _REFUSALS[verdict]
    challenge = {"www-authenticate": "Bearer"} if verdict is Verdict.NO_TOKEN else {}
    return JSONResponse({"error": {"message": message, "type": verdict.value}}, status, headers=challenge)
