"""The account's machines as last listed, shared by everyone who asks, so that a poll costs one call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

from myelin.plugin import ProviderError
from myelin_provider_vastai.api import Api
from myelin_provider_vastai.instances import Instance


class Inventory:
    """Lists machines no oftener than it must. The event loop owns it."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._began = float("-inf")
        self._instances: Mapping[int, Instance] = {}
        self._fetching: asyncio.Task[None] | None = None
        self._fetch_began = 0.0
        self.seen: set[int] = set()
        """Every machine that any listing has had."""

    async def listing(self, *, max_age_s: float = 0.0) -> Mapping[int, Instance]:
        """A listing that was asked for at most ``max_age_s`` before now; 0 asks anew.

        Raises:
            ProviderError: It can't be read. That is unknown, never empty. Where one couldn't that somebody else had
                asked for before, it is asked for anew.
        """
        asked = time.monotonic()
        not_before = asked - max_age_s
        while self._began < not_before:
            if self._fetching is None:
                self._fetch_began = time.monotonic()
                self._fetching = asyncio.create_task(self._fetch(self._fetch_began), name="list machines")
            began, fetching = self._fetch_began, self._fetching
            try:
                await asyncio.shield(fetching)
            except ProviderError:
                if began >= asked:
                    raise
        return self._instances

    def outdate(self) -> None:
        """Something was changed: what was listed before doesn't count any more."""
        self._began = float("-inf")

    async def close(self) -> None:
        """End what is under way."""
        if self._fetching is not None:
            self._fetching.cancel()
            with suppress(asyncio.CancelledError, ProviderError):
                await self._fetching

    async def _fetch(self, began: float) -> None:
        try:
            instances = await self._api.instances()
            self._instances = instances
            self.seen |= instances.keys()
            self._began = began
        finally:
            self._fetching = None
