"""``myelin logs``: what the nodes of a run have written."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from myelin.cli.options import Invocation, with_options

if TYPE_CHECKING:
    from myelin.cli.composition import Root
    from myelin.cluster.ledger import Ledger, RunRecord
    from myelin.cluster.node_logs import KeptLog

NAME = "logs"
LOOK_S = 0.2


@with_options(())
def command(
    invocation: Invocation,
    run: Annotated[str, typer.Argument(metavar="RUN", help="Which run.")],
    node: Annotated[str, typer.Argument(metavar="[NODE]", help="Only this node: stage-0, stage-1, …")] = "",
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on as more is written, until the run has ended.")
    ] = False,
) -> int:
    """Show what a run's nodes have written, from the files that are kept of it or, without these, from the provider."""
    from myelin.cli.composition import assemble
    from myelin.cli.ledgers import find_run, logs_of, open_ledger
    from myelin.cli.output import answer, answer_json
    from myelin.cluster.node_logs import LogTail, kept_logs
    from myelin.errors import UsageError

    if follow and invocation.json:
        raise UsageError("--follow never ends, and --json answers one document", "leave out one of them")
    root = assemble(invocation)
    ledger = open_ledger(root)
    record = find_run(ledger, run)
    assert ledger is not None
    folder = logs_of(root, record)
    kept = [log for log in kept_logs(folder, record.run) if not node or log.node == node]
    if not kept and not follow:
        return _from_provider(root, ledger, record, node, as_json=invocation.json)
    if invocation.json:
        answer_json([_entry(log, line) for log in kept for line in log.lines()])
        return 0
    with ExitStack() as tails:
        open_tails: dict[tuple[str, int], LogTail] = {}
        going = True
        while going:
            going = follow and _is_going(ledger, record)
            for log in kept_logs(folder, record.run):
                if (log.node, log.attempt) not in open_tails and node in ("", log.node):
                    open_tails[log.node, log.attempt] = tails.enter_context(LogTail(log))
            for tail in open_tails.values():
                for line in tail.lines():
                    answer(_text(tail.log, line))
            if going:
                time.sleep(LOOK_S)
    return 0


def _is_going(ledger: Ledger, record: RunRecord) -> bool:
    now = ledger.run(record.run)
    return now is not None and not now.ended and now.owner.lives


def _text(log: KeptLog, line: str) -> str:
    _, stream, text = _parts(line)
    return f"{log.node}.{log.attempt} {stream} | {text}"


def _entry(log: KeptLog, line: str) -> dict[str, object]:
    when, stream, text = _parts(line)
    return {"node": log.node, "attempt": log.attempt, "time": when, "stream": stream, "text": text}


def _parts(line: str) -> tuple[float | None, str, str]:
    """Time, stream and text of a kept line; all of it is text where it isn't one of ours."""
    when, _, rest = line.partition(" ")
    stream, space, text = rest.partition(" ")
    try:
        return float(when), stream, text if space else ""
    except ValueError:
        return None, "", line


def _from_provider(root: Root, ledger: Ledger, record: RunRecord, node: str, *, as_json: bool) -> int:
    """What the provider still has of the nodes that are there."""
    from myelin.cli.output import answer, answer_json
    from myelin.cli.running import run_to_end
    from myelin.errors import UsageError
    from myelin.telemetry.redaction import Redactor, environment_secrets, secret_values

    redactor = Redactor([*secret_values((record.secret, root.settings)), *environment_secrets(os.environ)])
    leases = [
        intent for intent in ledger.intents(record.run) if intent.open and intent.lease and node in ("", intent.node)
    ]
    if record.same_host or not leases:
        of = f"the node {node} of the run" if node else "the run"
        raise UsageError(f"there is no output of {of} {record.run}", "it may be too old, or never have begun")

    async def collect() -> list[dict[str, object]]:
        import asyncio

        from myelin.cli.ledgers import make_provider

        provider = make_provider(root, record)
        entries: list[dict[str, object]] = []
        try:
            for intent in leases:
                # What is there comes at once; the rest would come for as long as the node lives.
                try:
                    async with asyncio.timeout(10 * LOOK_S):
                        async for line in provider.logs(intent.lease):
                            entry = {"time": line.time, "stream": line.stream, "text": redactor.text(line.text)}
                            entries.append({"node": intent.node, "attempt": intent.attempt, **entry})
                except TimeoutError:
                    pass
        finally:
            await provider.close()
        return entries

    entries = run_to_end(collect())
    if as_json:
        answer_json(entries)
    else:
        for entry in entries:
            answer(f"{entry['node']}.{entry['attempt']} {entry['stream']} | {entry['text']}")
    return 0
