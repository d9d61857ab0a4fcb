"""``myelin status``: the runs of this machine, what each has started, and what it costs."""

from __future__ import annotations

from typing import Annotated

import typer

from myelin.cli.options import Invocation, with_options

NAME = "status"


@with_options(())
def command(
    invocation: Invocation,
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="Only this run, with all that it has started.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Also runs that have ended.")] = False,
) -> int:
    """Show the runs of this machine: who owns them, their nodes, and what they cost."""
    from myelin.cli.composition import assemble
    from myelin.cli.ledgers import RUN_HEADER, find_run, now, open_ledger, run_document, run_row
    from myelin.cli.output import answer, answer_json, table
    from myelin.cluster.quote import dollars

    ledger = open_ledger(assemble(invocation))
    if run:
        records = [find_run(ledger, run)]
    else:
        records = [record for record in (ledger.runs() if ledger is not None else ()) if everything or not record.ended]
    at = now()
    found = [(record, ledger.intents(record.run)) for record in records if ledger is not None]
    if invocation.json:
        answer_json([run_document(record, intents, at) for record, intents in found])
        return 0
    if not found:
        answer("No run" if everything else "No run that has not ended (--all shows the others)")
        return 0
    answer(table(RUN_HEADER, [run_row(record, intents, at) for record, intents in found], right=(5, 6)))
    if run:
        cells = [
            (
                intent.node,
                intent.attempt,
                intent.state.value,
                intent.lease,
                intent.offer,
                dollars(intent.dollars_per_hour),
                intent.failure,
            )
            for intent in found[0][1]
        ]
        answer("\n" + table(("node", "attempt", "state", "lease", "offer", "$/h", "failure"), cells, right=(1, 5)))
    return 0
