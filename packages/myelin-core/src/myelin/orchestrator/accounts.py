"""What a run writes down, and what it may cost: its book in the ledger, its deadlines, the agreement to its price."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from myelin.cluster.executor import Executor, LaunchTimes
from myelin.cluster.provider import Provider
from myelin.cluster.quote import dollars
from myelin.cluster.spec import NodeSpec
from myelin.errors import MyelinError, ProviderError

if TYPE_CHECKING:
    from myelin.cluster.ledger import RunBook
    from myelin.orchestrator.request import RunRequest

_log = logging.getLogger("myelin.orchestrator")

SLOWEST_LOOK_S = 2.0
"""Between looks at what a service on another machine is releasing."""
CALL_SPACING_S = 6.0
"""What each further node adds to deadlines: services allow a create or a destroy every few seconds."""
RELEASE_S = 75.0
"""For a service to show that what was destroyed is gone."""


def open_book(request: RunRequest, secret: SecretStr) -> RunBook | MyelinError | None:
    """The run's book in the ledger; None where the request keeps none. Blocking.

    Returns:
        The error where the ledger can't be used: whether the run can do without is known once its provider is.

    Raises:
        UsageError: The run belongs to another orchestrator.
    """
    if request.state_dir is None:
        return None
    from myelin.cluster.ledger import Ledger, LedgerError, RunRecord
    from myelin.cluster.node_logs import forget_old_logs

    log_dir = request.log_dir
    if log_dir is not None:
        forget_old_logs(log_dir)
    record = RunRecord(
        request.run,
        request.provider,
        request.model_uri,
        request.stages,
        request.secret or secret,
        log_dir=str(Path(log_dir).absolute()) if log_dir is not None else "",
    )
    try:
        return Ledger(request.state_dir).open_run(record, sole=True)
    except LedgerError as error:
        return error


def make_executor(
    request: RunRequest, provider: Provider, book: RunBook | MyelinError | None
) -> tuple[Executor, RunBook | None]:
    """The executor of a run, with the book that it keeps.

    Raises:
        MyelinError: The ledger can't be used, and the provider's nodes would outlive a crash of ours: nobody would know
            of them.
    """
    same_host = bool(getattr(provider, "same_host", False))
    if isinstance(book, MyelinError):
        if not same_host:
            raise book
        _log.warning("%s; going on without it, since local nodes end with this process", book.message)
        book = None
    if book is not None and same_host:
        book.note_same_host()
    found_by = getattr(provider, "found_by", None)
    if book is not None and found_by:
        book.note_found_by(found_by)
    times = launch_times(request, same_host=same_host, lag_s=float(getattr(provider, "listing_lag_s", 0.0)))
    return Executor(provider, request.provider, times, book, request.max_dollars_per_hour), book


def launch_times(request: RunRequest, *, same_host: bool, lag_s: float = 0.0) -> LaunchTimes:
    """Deadlines for a provider's calls, longer the more nodes take turns at a service that spaces its calls."""
    if same_host:
        return LaunchTimes(launch=request.startup_timeout_s, release=request.stop_grace_s + 15, settle=lag_s)
    return LaunchTimes(
        launch=request.startup_timeout_s + CALL_SPACING_S * request.stages,
        release=request.stop_grace_s + RELEASE_S,
        settle=lag_s,
        release_each=CALL_SPACING_S,
        listing=SLOWEST_LOOK_S,
    )


async def agree_on_price(
    request: RunRequest, provider: Provider, executor: Executor, specs: Sequence[NodeSpec]
) -> None:
    """Before the first dollar: the run fits under its cap, and somebody has agreed to what it costs.

    Nothing is asked where the offers cost nothing, and where the provider says ``price_agreed``.

    Raises:
        ProviderError: It would cost more than the cap, or nobody has agreed.
        MyelinError: What the request's own question raised.
    """
    if getattr(provider, "same_host", False):
        return
    quote = await executor.quote(specs)
    if quote.dollars_per_hour <= 0 or getattr(provider, "price_agreed", False):
        return
    ceiling = quote.ceiling(request.max_dollars_per_hour)
    if request.agree is None or not await request.agree(quote, ceiling):
        raise ProviderError(
            f"renting {len(quote.offers)} nodes for {dollars(quote.dollars_per_hour)}/h was not confirmed",
            "--yes agrees to the price; --max-cost caps it",
            reason="not-confirmed",
        )
    executor.cap = ceiling
