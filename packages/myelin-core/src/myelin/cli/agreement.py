"""Asking before the first dollar, and saying what a run costs."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from myelin.cli.output import table, tell
from myelin.cluster.quote import Quote, dollars
from myelin.errors import UsageError

if TYPE_CHECKING:
    from myelin.cluster.intents import Spend
    from myelin.orchestrator.request import RunRequest


def asking(request: RunRequest, *, yes: bool, quiet: Callable[[], None] = lambda: None) -> RunRequest:
    """``request`` with a question to the person at the terminal; with ``yes``, the answer is known.

    Args:
        quiet: Clears the terminal for it.
    """

    async def agree(quote: Quote, ceiling: float) -> bool:
        quiet()
        return True if yes else await ask(quote, ceiling)

    return replace(request, agree=agree)


async def ask(quote: Quote, ceiling: float) -> bool:
    """Show what a run would cost, and ask.

    Raises:
        UsageError: There is nobody to ask.
    """
    price = f"{dollars(quote.dollars_per_hour)}/h"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            f"the run would cost {price} at the provider {quote.provider}, and there is no terminal to ask at",
            "--yes agrees to the price; --max-cost caps it",
            reason="not-confirmed",
        )
    rows = [(node, offer.description, f"{dollars(offer.dollars_per_hour)}/h") for node, offer in quote.offers]
    tell(table(("node", "offer", "price"), rows, right=(2,)))
    question = f"Rent {len(rows)} for {price} together (at most {dollars(ceiling)}/h with replacements)? [y/N] "
    return (await _line(question)).strip().lower() in ("y", "yes")


async def _line(prompt: str) -> str:
    """A line from the terminal, read by a daemon thread: a blocked read must not keep the process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[str] = loop.create_future()

    def deliver(line: str) -> None:
        if not result.done():
            result.set_result(line)

    def read() -> None:
        sys.stderr.write(prompt)
        sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except (OSError, ValueError):
            line = ""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, line)

    threading.Thread(target=read, name="myelin-question", daemon=True).start()
    return await result


def tell_price(spend: Spend) -> None:
    """A line about what the nodes cost, where they do."""
    if spend.dollars_per_hour > 0:
        tell(f"The nodes cost {dollars(spend.dollars_per_hour)}/h; {dollars(spend.dollars)} so far")


def tell_total(spend: Spend) -> None:
    """A line about what the run has cost, where it has."""
    if spend.dollars > 0:
        tell(f"The run has cost {dollars(spend.dollars)}")


def spend_document(spend: Spend) -> dict[str, object]:
    """What programs are told of it: a part of the document, empty where nothing costs anything."""
    if spend.dollars <= 0:
        return {}
    return {"spend": {"dollars_per_hour": spend.dollars_per_hour, "dollars": spend.dollars}}
