"""The calls to Vast.ai's service: what is asked, how answers are read, and what a failure means.

Three kinds of failure, since money hangs on the difference: :class:`Refused` (the service said no: nothing was done),
:class:`Doubtful` (we can't know: a gateway's error, a broken connection, an answer that makes no sense), and
:class:`HalfDone` (it said no, and gave a machine all the same). Only what is safe to repeat is repeated here: reads and
destroys; never a create.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from myelin.plugin import ProviderError
from myelin_provider_vastai.asks import Ask, read_ask
from myelin_provider_vastai.instances import Instance, read_instance
from myelin_provider_vastai.pacing import Pacer

REQUEST_TIMEOUT_S = 60.0
TRIES = 4
"""Of a call that is safe to repeat, and of any that was refused for coming too soon."""
PAGE = 25
MAX_PAGES = 400
GONE_CODES = frozenset({"not_found", "no_such_instance"})
TAKEN_CODES = frozenset({"no_such_ask", "not_available", "no_such_offer"})
_SHOWN_CHARACTERS = 200
_Answer = TypeVar("_Answer")


class Refused(ProviderError):
    """The service said no; nothing was done.

    Attributes:
        status: Of HTTP; 0 where the service wasn't reached.
        code: Its ``error``, often empty.
    """

    default_reason = "refused"

    def __init__(self, message: str, hint: str, *, status: int = 0, code: str = "", reason: str = "") -> None:
        super().__init__(message, hint, reason=reason)
        self.status = status
        self.code = code


class Doubtful(ProviderError):
    """Whether it was done can't be known from the answer."""

    default_reason = "doubtful"


class HalfDone(ProviderError):
    """A create was answered by an error *and* a machine, which exists and is billed."""

    default_reason = "half-done"

    def __init__(self, message: str, hint: str, *, instance: int) -> None:
        super().__init__(message, hint)
        self.instance = instance


@dataclass(frozen=True, slots=True)
class Rent:
    """What to rent: an ask, and what to run on it. ``node_port`` is mapped to the outside."""

    ask: int
    image: str
    disk_gb: float
    label: str
    onstart: str
    node_port: int


class Api:
    """The calls.

    Args:
        url: Base URL.
        key: Of the account; sent as a bearer token, and masked wherever the service repeats it.
        spacing: How far calls are spaced; 1 is as far as the service asks.
    """

    def __init__(self, url: str, key: str, spacing: float = 1.0) -> None:
        self._url = url.rstrip("/")
        self._key = key
        self._pacer = Pacer(spacing)
        self._client: httpx.AsyncClient | None = None

    async def search(self, query: Mapping[str, Any]) -> list[Ask]:
        """What can be rented. Asks that can't be read are left out."""
        answer = await self._repeated(lambda: self._call("search", "POST", "/api/v0/bundles/", body=query))
        offers = answer.get("offers")
        if not isinstance(offers, list):
            raise self._senseless("a search")
        return [ask for offer in offers if isinstance(offer, dict) and (ask := read_ask(offer)) is not None]

    async def create(self, rent: Rent) -> int:
        """Rent a machine, once: a failure isn't tried again, but for a refusal that came for calling too soon.

        Returns:
            The machine's number.

        Raises:
            Refused, Doubtful, HalfDone: See there.
        """
        body = {
            "client_id": "me",
            "image": rent.image,
            "env": {f"-p {rent.node_port}:{rent.node_port}": "1"},
            "price": None,
            "disk": max(8.0, rent.disk_gb),
            "label": rent.label,
            "onstart": rent.onstart,
            "runtype": "ssh_direc ssh_proxy",
            "cancel_unavail": True,  # otherwise a machine that can't start stays, stopped and billed
        }
        answer = await self._call("create", "PUT", f"/api/v0/asks/{rent.ask}/", body=body)
        number = answer.get("new_contract")
        if not isinstance(number, int) or isinstance(number, bool):
            raise self._senseless("a create")
        return number

    async def instances(self) -> dict[int, Instance]:
        """Every machine of the account, by its number.

        Raises:
            ProviderError: The list, or any page or entry of it, can't be read: unknown, never empty.
        """
        found: dict[int, Instance] = {}
        token, seen = "", set[str]()
        for _ in range(MAX_PAGES):
            parameters = {"select_filters": "{}", "order_by": '[{"col":"id","dir":"asc"}]', "limit": str(PAGE)}
            if token:
                parameters["after_token"] = token
            answer = await self._repeated(
                lambda parameters=parameters: self._call("list", "GET", "/api/v1/instances/", parameters=parameters)  # type: ignore[misc]
            )
            page = answer.get("instances")
            if not isinstance(page, list):
                raise self._senseless("the list of machines")
            for entry in page:
                instance = read_instance(entry) if isinstance(entry, dict) else None
                if instance is None:
                    raise self._senseless("the list of machines")
                found[instance.id] = instance
            token = str(answer.get("next_token") or "")
            if not token:
                return found
            if token in seen:
                break
            seen.add(token)
        raise self._senseless("the list of machines")

    async def destroy(self, instance: int) -> None:
        """End a machine's lease. One that is gone already is fine."""
        try:
            await self._repeated(lambda: self._call("destroy", "DELETE", f"/api/v0/instances/{instance}/"))
        except Refused as error:
            if error.status != 404 and error.code not in GONE_CODES:
                raise

    async def register_key(self, public_key: str) -> None:
        """Have the account know an SSH key, unless it does already."""
        answer = await self._repeated(lambda: self._call("ssh", "GET", "/api/v0/ssh/"))
        known = answer.get("keys", answer.get("ssh_keys", answer.get("")))
        listed = [entry for entry in known if isinstance(entry, dict)] if isinstance(known, list) else []
        texts = [str(entry.get("key") or entry.get("public_key") or entry.get("ssh_key") or "") for entry in listed]
        if public_key.split()[:2] not in [text.split()[:2] for text in texts]:
            await self._repeated(lambda: self._call("ssh", "POST", "/api/v0/ssh/", body={"ssh_key": public_key}))

    async def attach_key(self, instance: int, public_key: str) -> None:
        """Let an SSH key in on a machine; the account's keys don't always get there by themselves."""
        path = f"/api/v0/instances/{instance}/ssh/"
        await self._repeated(lambda: self._call("ssh", "POST", path, body={"ssh_key": public_key}))

    async def close(self) -> None:
        """Free the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _repeated(self, call: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """A call that is safe to repeat, repeated while its outcome is doubtful."""
        for _ in range(TRIES - 1):
            try:
                return await call()
            except Doubtful:
                continue  # the spacing of calls is the wait
        return await call()

    async def _call(
        self,
        kind: str,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        parameters: Mapping[str, str] | None = None,
    ) -> Mapping[str, Any]:
        """One call, again where it came too soon; its answer, a list wrapped as ``{"": list}``."""
        for tries in range(TRIES):
            await self._pacer.turn(kind)
            response = await self._send(method, path, body, parameters)
            if response.status_code != 429 or "search_quota_exceeded" in response.text:
                return self._read(response)
            wait = self._pacer.wait_after_refusal(kind, tries, response.headers.get("Retry-After", ""))
            self._pacer.hold(kind, wait)
        raise Refused(
            f"Vast.ai refuses {kind} calls for coming too often",
            "wait a minute, and see that nothing else uses the account",
            status=429,
            reason="rate-limited",
        )

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, parameters: Mapping[str, str] | None
    ) -> httpx.Response:
        if self._client is None:
            loopback = urlsplit(self._url).hostname in ("127.0.0.1", "localhost", "::1")
            self._client = httpx.AsyncClient(
                base_url=self._url,
                headers={"Authorization": f"Bearer {self._key}", "Accept": "application/json"},
                timeout=REQUEST_TIMEOUT_S,
                trust_env=not loopback,
            )
        try:
            return await self._client.request(method, path, json=body, params=parameters)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise Refused(
                f"Vast.ai can't be reached at {self._url} ({type(error).__name__})",
                "check the network and vastai.api_url",
                reason="unreachable",
            ) from None
        except httpx.HTTPError as error:
            raise Doubtful(
                f"the connection to Vast.ai broke during {method} {path} ({type(error).__name__})", "try again"
            ) from None

    def _read(self, response: httpx.Response) -> Mapping[str, Any]:
        status = response.status_code
        try:
            document = json.loads(response.content)
        except (ValueError, RecursionError):
            document = None
        told = document if isinstance(document, dict) else {}
        code = str(told.get("error") or "")[:_SHOWN_CHARACTERS]
        text = str(told.get("msg") or told.get("message") or code or (response.text if document is None else ""))
        shown = " ".join(text.replace(self._key, "…").split())[:_SHOWN_CHARACTERS]
        failed = status >= 400 or told.get("success") is False
        contract = told.get("new_contract")
        if failed and isinstance(contract, int) and not isinstance(contract, bool):
            raise HalfDone(
                f"Vast.ai answered a create with an error and a machine: {shown}", "try again", instance=contract
            )
        if status >= 500 or (status < 400 and document is None):
            raise Doubtful(f"Vast.ai answered {status} to {response.request.method} {response.request.url.path}")
        if failed:
            raise self._refusal(status, code.replace(self._key, "…"), shown)
        return told if isinstance(document, dict) else {"": document}

    @staticmethod
    def _refusal(status: int, code: str, shown: str) -> Refused:
        if status in (401, 403):
            message, hint, reason = "Vast.ai does not accept the key", "set VAST_API_KEY to a valid one", "bad-key"
        elif "search_quota_exceeded" in f"{code} {shown}":
            message = "the account's searches of today are used up"
            hint, reason = "wait until midnight UTC", "quota"
        else:
            message = f"Vast.ai refused ({status}{f' {code}' if code else ''}): {shown or 'no reason given'}"
            hint, reason = "see the reason, or the account's page", "refused"
        return Refused(message, hint, status=status, code=code, reason=reason)

    @staticmethod
    def _senseless(what: str) -> Doubtful:
        return Doubtful(
            f"Vast.ai's answer to {what} can't be read", "its API may have changed: look for a newer version"
        )
