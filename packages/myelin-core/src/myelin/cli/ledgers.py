"""What the commands about runs share: the ledger, a run's provider, and a run as people and programs see it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from myelin.cli.composition import log_folder
from myelin.cluster.clearing import Ended, ask_to_end, clear
from myelin.cluster.executor import Executor, LaunchTimes
from myelin.cluster.intents import Intent, spend
from myelin.cluster.ledger import FILE_NAME, Ledger, RunRecord
from myelin.cluster.quote import dollars
from myelin.config.settings import Layer
from myelin.errors import UsageError
from myelin.orchestrator.accounts import CALL_SPACING_S, RELEASE_S, SLOWEST_LOOK_S
from myelin.plugins.registry import PROVIDERS

if TYPE_CHECKING:
    from pathlib import Path

    from myelin.cli.composition import Root
    from myelin.cluster.provider import Provider


def open_ledger(root: Root) -> Ledger | None:
    """The ledger of this machine's runs; None where there was never one."""
    folder = root.settings.runtime.state_dir
    return Ledger(folder) if (folder / FILE_NAME).exists() else None


def find_run(ledger: Ledger | None, run: str) -> RunRecord:
    """A run by its name, or by the beginning of it.

    Raises:
        UsageError: There is none, or more than one.
    """
    records = ledger.runs() if ledger is not None else ()
    found = [record for record in records if record.run == run] or [
        record for record in records if run and record.run.startswith(run)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(record.run for record in found[:5])
        raise UsageError(f"{run!r} is the beginning of several runs: {names}", "write more of it", reason="no-run")
    raise UsageError(
        f"there is no run {run!r} in the ledger",
        "`myelin status --all` lists the runs of this machine",
        reason="no-run",
    )


def make_provider(root: Root, record: RunRecord) -> Provider:
    """The provider of a run, as the settings have it now.

    But where its nodes are is as the run had it (:attr:`~myelin.cluster.ledger.RunRecord.found_by`), unless the command
    line says otherwise.

    Raises:
        MyelinError: It can't be used.
    """
    from myelin.cluster.provider import ProviderContext

    root.registry.require({PROVIDERS: [record.provider]})
    name = root.registry.section_of(PROVIDERS, record.provider)
    section = root.settings.sections.get(name)
    if section is not None:
        said = {
            field for field in record.found_by if root.settings.origin(f"{name}.{field}").layer is Layer.COMMAND_LINE
        }
        known = record.found_by.keys() & type(section).model_fields.keys()
        section = section.model_copy(update={field: record.found_by[field] for field in known - said})
    context = ProviderContext(record.run, section, max(1, record.nodes))
    return root.registry.provider(record.provider, context)


async def take_over_and_clear(root: Root, ledger: Ledger, record: RunRecord) -> Ended:
    """Release all that is left of a run whose orchestrator is gone.

    Raises:
        MyelinError: Something could not be released, or its provider can't be used.
    """
    provider = make_provider(root, record)
    times = LaunchTimes(
        release=root.settings.runtime.stop_grace_s + RELEASE_S,
        release_each=CALL_SPACING_S,
        settle=float(getattr(provider, "listing_lag_s", 0.0)),
        listing=SLOWEST_LOOK_S,
    )
    executor = Executor(provider, record.provider, times, ledger.open_run(record))
    return await clear(executor, record.run)


async def end_run(root: Root, ledger: Ledger, record: RunRecord) -> Ended:
    """End a run: by its orchestrator where that lives, and otherwise by what the ledger and a listing show.

    Raises:
        MyelinError: It could not be ended.
    """
    if record.owner.lives:
        patience = root.settings.runtime.stop_grace_s + RELEASE_S + CALL_SPACING_S * record.nodes
        record = await ask_to_end(ledger, record, patience)
        if record.ended:
            return Ended(record.run, "ended by its orchestrator")
    return await take_over_and_clear(root, ledger, record)


def state_of(record: RunRecord) -> str:
    """``running``, ``left behind`` (it was not ended, and nobody owns it) or ``ended``."""
    if record.ended:
        return "ended"
    return "running" if record.owner.lives else "left behind"


def run_document(record: RunRecord, intents: tuple[Intent, ...], now: float) -> dict[str, object]:
    """A run, for programs. Times are Unix seconds; never its secret."""
    costs = spend(intents, now)
    owner = record.owner
    return {
        "run_id": record.run,
        "state": state_of(record),
        "provider": record.provider,
        "model": record.model,
        "created": record.created,
        "ended": record.ended or None,
        "owner": {"host": owner.host, "process": owner.process, "alive": owner.lives} if owner.process else None,
        "dollars_per_hour": costs.dollars_per_hour,
        "dollars": costs.dollars,
        "log_dir": record.log_dir or None,
        "nodes": [node_document(intent, now) for intent in intents],
    }


def node_document(intent: Intent, now: float) -> dict[str, object]:
    """One start of a node, for programs."""
    return {
        "node": intent.node,
        "attempt": intent.attempt,
        "state": intent.state.value,
        "lease": intent.lease or None,
        "offer": intent.offer or None,
        "dollars_per_hour": intent.dollars_per_hour,
        "dollars": intent.dollars(now),
        "started": intent.started,
        "ended": intent.ended or None,
        "failure": intent.failure or None,
    }


def run_row(record: RunRecord, intents: tuple[Intent, ...], now: float) -> tuple[str, ...]:
    """A run, as a line of a table."""
    costs = spend(intents, now)
    there = sum(intent.open for intent in intents)
    return (
        record.run,
        state_of(record),
        str(record.owner) if record.owner.process else "",
        record.provider,
        f"{there} of {record.nodes}",
        dollars(costs.dollars_per_hour),
        dollars(costs.dollars),
        age(now - record.created),
        record.model,
    )


RUN_HEADER = ("run", "state", "owner", "provider", "nodes", "$/h", "so far", "since", "model")


def age(seconds: float) -> str:
    """``42 s``, ``17 min``, ``5 h``, ``3 days``."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def logs_of(root: Root, record: RunRecord) -> Path:
    """The folder where the output of a run's nodes was kept."""
    from pathlib import Path

    return Path(record.log_dir) if record.log_dir else log_folder(root.settings)


def now() -> float:
    """Unix seconds."""
    return time.time()
