"""One listing for everyone who asks at about the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from myelin.plugin import ProviderError
from myelin_provider_vastai.inventory import Inventory


class Service:
    """Answers each listing as told, once it is let."""

    def __init__(self, *answers: dict[int, Any] | ProviderError) -> None:
        self.answers = list(answers)
        self.calls = 0
        self.let = asyncio.Event()

    async def instances(self) -> dict[int, Any]:
        self.calls += 1
        answer = self.answers.pop(0)
        await self.let.wait()
        if isinstance(answer, ProviderError):
            raise answer
        return answer


def inventory(*answers: dict[int, Any] | ProviderError) -> tuple[Inventory, Service]:
    service = Service(*answers)
    return Inventory(service), service  # type: ignore[arg-type]  # it has the one method that is called


async def test_who_may_have_an_old_listing_shares_one_that_is_under_way() -> None:
    shared, service = inventory({7: "machine"})
    first = asyncio.create_task(shared.listing())
    await asyncio.sleep(0)
    second = asyncio.create_task(shared.listing(max_age_s=60))
    await asyncio.sleep(0)
    service.let.set()
    assert await first == await second == {7: "machine"}
    assert service.calls == 1


async def test_one_that_fails_and_was_asked_for_before_is_asked_for_anew() -> None:
    """What was wrong with the service then need not be so now."""
    shared, service = inventory(ProviderError("not now"), {7: "machine"})
    first = asyncio.create_task(shared.listing())
    await asyncio.sleep(0.001)
    second = asyncio.create_task(shared.listing(max_age_s=60))
    await asyncio.sleep(0)
    service.let.set()
    with pytest.raises(ProviderError, match="not now"):
        await first
    assert await second == {7: "machine"}


async def test_one_that_fails_again_is_an_error_for_all() -> None:
    shared, service = inventory(ProviderError("not now"), ProviderError("not yet"))
    calls = []
    for _ in range(3):
        calls.append(asyncio.create_task(shared.listing(max_age_s=60)))
        await asyncio.sleep(0.001)
    service.let.set()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(error) for error in errors] == ["not now", "not yet", "not yet"]
    assert service.calls == 2
