"""``myelin gc``: release what runs without a living orchestrator have left at their providers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from myelin.cli.options import Invocation, with_options

if TYPE_CHECKING:
    from myelin.cli.composition import Root
    from myelin.cluster.ledger import Ledger, RunRecord
    from myelin.cluster.provider import Lease

NAME = "gc"


@dataclass(frozen=True, slots=True)
class Find:
    """What was found of one run, and what became of it.

    Attributes:
        run, provider: Which, and where.
        why: ``left behind`` (in the ledger, its orchestrator gone), ``ended`` (in the ledger as ended, and still
            listed) or ``unknown`` (only listed: it may be served from another machine).
        nodes: How many starts are open in the ledger, or listed.
        done: ``released``, ``nothing was left``, ``would be released``, ``left alone``, or what went wrong.
        ok: Whether nothing of it has to be seen to any more.
    """

    run: str
    provider: str
    why: str
    nodes: int
    done: str = ""
    ok: bool = True


@with_options(())
def command(
    invocation: Invocation,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be released.")] = False,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Also runs that this machine's ledger doesn't know.")
    ] = False,
) -> int:
    """Release the nodes of runs whose orchestrator is gone, found by the ledger and by the provider's own listing."""
    from myelin.cli.composition import assemble
    from myelin.cli.output import answer, answer_json, table
    from myelin.cli.running import run_to_end

    found = run_to_end(_collect(assemble(invocation), dry_run=dry_run, unknown=unknown))
    if invocation.json:
        answer_json([asdict(each) for each in found])
    elif not found:
        answer("Nothing is left behind")
    else:
        rows = [(each.run, each.provider, each.why, each.nodes, each.done) for each in found]
        answer(table(("run", "provider", "why", "nodes", "done"), rows, right=(3,)))
    return 0 if all(each.ok for each in found) else 1


async def _collect(root: Root, *, dry_run: bool, unknown: bool) -> list[Find]:
    from myelin.cluster.clearing import left_behind, stranger, strays
    from myelin.cluster.ledger import Ledger

    # Made where it is missing: what is taken over must be noted, too.
    ledger = Ledger(root.settings.runtime.state_dir)
    finds = []
    for record in left_behind(ledger):
        nodes = sum(intent.open for intent in ledger.intents(record.run))
        finds.append(await _see_to(root, ledger, record, "left behind", nodes, dry_run=dry_run))
    names = dict.fromkeys([root.settings.provider.name, *(record.provider for record in ledger.runs())])
    for name in names:
        listed = await _all_leases(root, name)
        ended, others = strays(ledger, listed)
        for run, count in ended.items():
            known = ledger.run(run)
            assert known is not None
            finds.append(await _see_to(root, ledger, known, "ended", count, dry_run=dry_run))
        for run, count in others.items():
            if unknown:
                record = stranger(run, name, count)
                finds.append(await _see_to(root, ledger, record, "unknown", count, dry_run=dry_run))
            else:
                finds.append(Find(run, name, "unknown", count, "left alone (--unknown releases it)"))
    return finds


async def _see_to(root: Root, ledger: Ledger, record: RunRecord, why: str, nodes: int, *, dry_run: bool) -> Find:
    """Release what is left of a run; a failure is a row, so that the others are seen to all the same."""
    from myelin.cli.ledgers import take_over_and_clear
    from myelin.errors import MyelinError

    find = Find(record.run, record.provider, why, nodes)
    if dry_run:
        return Find(*_start_of(find), "would be released" if nodes else "nothing is left to release")
    try:
        ended = await take_over_and_clear(root, ledger, record)
    except MyelinError as error:
        return Find(*_start_of(find), error.message, ok=False)
    return Find(*_start_of(find), "released" if nodes else ended.how)


def _start_of(find: Find) -> tuple[str, str, str, int]:
    return find.run, find.provider, find.why, find.nodes


async def _all_leases(root: Root, name: str) -> tuple[Lease, ...]:
    """What a provider lists of all runs; nothing where it can't do that, or can't be used as it is configured.

    Raises:
        ProviderError: The listing can't be read.
    """
    from myelin.cli.ledgers import make_provider
    from myelin.cli.output import tell
    from myelin.cluster.clearing import stranger
    from myelin.errors import MyelinError
    from myelin.values import RunId

    try:
        provider = make_provider(root, stranger(RunId("gc"), name, 1))
    except MyelinError as error:
        tell(f"The provider {name} can't be asked: {error.message}")
        return ()
    try:
        all_leases = getattr(provider, "all_leases", None)
        return tuple(await all_leases()) if all_leases is not None else ()
    finally:
        await provider.close()
