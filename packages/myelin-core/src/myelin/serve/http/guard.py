"""Who may ask for what: one pure decision about a request's head, before anything else sees it.

Without a token the server is on loopback only, and what must be kept out are web pages in the browser of somebody on
this machine: one whose name was made to lead here (DNS rebinding) is told from us by its ``Host``, any other by what
the browser itself says of where a request came from. With a token, it is the token that counts: as ``Authorization:
Bearer``, or as the cookie that signing in with it once gives to a browser.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from http.cookies import CookieError, SimpleCookie

PUBLIC = ("/health", "/health/live", "/dashboard/sign-in", "/dashboard/static/")
"""Paths that ask for no token; one that ends in a slash stands for all below it."""

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'self'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""On every answer."""


class Verdict(Enum):
    """What becomes of a request."""

    ADMIT = "admit"
    WRONG_HOST = "wrong-host"
    CROSS_SITE = "cross-site"
    NO_TOKEN = "no-token"


@dataclass(frozen=True, slots=True)
class Access:
    """What clients must show.

    Attributes:
        token: The token; empty lets everybody in.
        cookie: Name of the cookie that a browser gets for it.
        session: That cookie's value, made anew for each process.
        host: The name that the server was told to listen on.
    """

    token: str
    cookie: str
    session: str
    host: str

    @classmethod
    def make(cls, token: str, host: str, port: int) -> Access:
        """With a new session. Cookies don't know ports, so the cookie's name says it."""
        return cls(token, f"myelin-{port}", secrets.token_urlsafe(32), host)

    def is_token(self, shown: str) -> bool:
        """Whether it is the token. Takes as long for a wrong one as for the right one."""
        return bool(self.token) and hmac.compare_digest(_digest(shown), _digest(self.token))

    def verdict(self, path: str, headers: Mapping[str, str]) -> Verdict:
        """What becomes of a request for ``path``; the headers' names are in lower case."""
        if not self.token and not self._is_ours(headers.get("host", "")):
            return Verdict.WRONG_HOST
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return Verdict.CROSS_SITE
        if not self.token or is_public(path) or self._has_shown(headers):
            return Verdict.ADMIT
        return Verdict.NO_TOKEN

    def _is_ours(self, host: str) -> bool:
        """Whether a ``Host`` names this machine; the port may be that of a forward."""
        name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        name = name.lower().removesuffix(".")
        return name in _LOOPBACK_NAMES or name.endswith(".localhost") or name == self.host.lower()

    def _has_shown(self, headers: Mapping[str, str]) -> bool:
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_token(shown.strip()):
            return True
        cookie = _cookie(headers.get("cookie", ""), self.cookie)
        return bool(cookie) and hmac.compare_digest(_digest(cookie), _digest(self.session))


def is_public(path: str) -> bool:
    """Whether a path asks for no token."""
    return any(path.startswith(public) if public.endswith("/") else path == public for public in PUBLIC)


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _digest(text: str) -> bytes:
    """Texts of any length and alphabet, as something that can be compared in constant time."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
