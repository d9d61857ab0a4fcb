"""Ending runs from outside: by their orchestrator where it lives, otherwise by the ledger and by listings."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from pydantic import SecretStr

from myelin.cluster.executor import Executor
from myelin.cluster.ledger import Ledger, RunRecord
from myelin.cluster.provider import Lease
from myelin.errors import MyelinError, UsageError
from myelin.values import RunId

LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run was ended.

    Attributes:
        run: Which.
        how: ``ended by its orchestrator``, ``released`` or ``nothing was left``, for people and programs alike.
        released: How many starts were released, or seen to be gone, by us.
    """

    run: RunId
    how: str
    released: int = 0


async def ask_to_end(ledger: Ledger, record: RunRecord, timeout_s: float) -> RunRecord:
    """Tell a living orchestrator to end, as Ctrl-C would, and wait until it has.

    Returns:
        The run as it is then: ended or, where its orchestrator could not clear everything, left behind.

    Raises:
        UsageError: It is another machine's.
        MyelinError: It did not end in time.
    """
    if not record.owner.is_here:
        raise UsageError(f"the run {record.run} is {record.owner}'s", "run this there", reason="elsewhere")
    with suppress(ProcessLookupError):
        os.kill(record.owner.process, signal.SIGTERM)
    try:
        async with asyncio.timeout(timeout_s):
            while record.owner.lives and not record.ended:
                await asyncio.sleep(LOOK_S)
                record = ledger.run(record.run) or record
    except TimeoutError:
        raise MyelinError(
            f"{record.owner} did not end the run {record.run} within {timeout_s:g} s",
            f"end that process, then run `myelin down {record.run}` again",
            reason="still-there",
        ) from None
    return record


async def clear(executor: Executor, run: RunId) -> Ended:
    """Release all that is left of a run which was taken over.

    Raises:
        ProviderError: Something could not be shown to be gone.
    """
    open_before = sum(intent.open for intent in executor.intents)
    try:
        await executor.release_all()
    finally:
        await executor.close()
    left = sum(intent.open for intent in executor.intents)
    return Ended(run, "released" if open_before else "nothing was left", open_before - left)


def left_behind(ledger: Ledger) -> tuple[RunRecord, ...]:
    """The runs that were not ended, and whose orchestrator is gone."""
    return tuple(record for record in ledger.runs() if not record.ended and not record.owner.lives)


def strays(ledger: Ledger, leases: Sequence[Lease]) -> tuple[dict[RunId, int], dict[RunId, int]]:
    """Of leases of many runs: those of runs that the ledger knows to have ended, and those of runs it doesn't know.

    A run that isn't in this ledger may well be served from another machine.

    Returns:
        How many leases there are of each run: of ended ones, of unknown ones.
    """
    known = {record.run: record for record in ledger.runs()}
    ended: dict[RunId, int] = {}
    unknown: dict[RunId, int] = {}
    for lease in leases:
        record = known.get(lease.key.run)
        if record is None:
            unknown[lease.key.run] = unknown.get(lease.key.run, 0) + 1
        elif record.ended:
            ended[lease.key.run] = ended.get(lease.key.run, 0) + 1
    return ended, unknown


def stranger(run: RunId, provider: str, nodes: int) -> RunRecord:
    """A record for a run of which nothing is known but its leases."""
    return RunRecord(run, provider, "", nodes, SecretStr(""))
