"""``myelin down``: end a run from outside, by its orchestrator where that lives, otherwise by the ledger."""

from __future__ import annotations

from typing import Annotated

import typer

from myelin.cli.options import Invocation, with_options

NAME = "down"


@with_options(())
def command(
    invocation: Invocation,
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="Which run; it may be left out where there is one.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="All runs of this machine.")] = False,
) -> int:
    """End a run and release its nodes; returns once they are seen to be gone."""
    from dataclasses import asdict

    from myelin.cli.composition import assemble
    from myelin.cli.ledgers import end_run, find_run, open_ledger
    from myelin.cli.output import answer, answer_json
    from myelin.cli.running import run_to_end
    from myelin.cluster.clearing import Ended
    from myelin.errors import MyelinError, UsageError

    if run and everything:
        raise UsageError("a run and --all contradict each other", "leave one of them out")
    root = assemble(invocation)
    ledger = open_ledger(root)
    there = [record for record in (ledger.runs() if ledger is not None else ()) if not record.ended]
    if run:
        chosen = [find_run(ledger, run)]
    elif everything or len(there) <= 1:
        chosen = there
    else:
        names = ", ".join(record.run for record in there)
        raise UsageError(f"there are several runs: {names}", "name one of them, or say --all", reason="no-run")

    async def end_all() -> list[Ended]:
        assert ledger is not None
        ended, problem = [], None
        for record in chosen:
            if record.ended:
                ended.append(Ended(record.run, "it had ended already"))
                continue
            try:
                ended.append(await end_run(root, ledger, record))
            except MyelinError as error:
                if len(chosen) == 1:
                    raise
                problem = problem or error
        if problem is not None:
            raise problem
        return ended

    ended = run_to_end(end_all()) if chosen else []
    if invocation.json:
        answer_json([asdict(each) for each in ended])
    elif not ended:
        answer("No run that has not ended")
    else:
        for each in ended:
            released = f" ({each.released} nodes)" if each.released else ""
            answer(f"{each.run}: {each.how}{released}")
    return 0
