"""The commands about runs: what they show, what they end, and what they leave alone."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from myelin.cli.agreement import ask, asking, spend_document
from myelin.cluster.intents import Intent, Spend
from myelin.cluster.ledger import Ledger, RunRecord
from myelin.cluster.node_logs import NodeLogFile
from myelin.cluster.provider import LaunchKey, Lease, LeaseState, LogLine, Offer
from myelin.cluster.quote import Quote
from myelin.errors import ProviderError, UsageError
from myelin.orchestrator.request import RunRequest
from myelin.values import Attempt, LeaseId, NodeId, RunId

Myelin = Callable[..., tuple[int, str, str]]
SECRET = "planted-secret"


class Table:
    """A provider of all runs: leases in a table that outlives its objects."""

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.broken: set[str] = set()

    def add(self, run: str, node: str = "stage-0", attempt: int = 1) -> Lease:
        key = LaunchKey(RunId(run), NodeId(node), Attempt(attempt))
        lease = Lease(LeaseId(f"m-{key}"), key, LeaseState.RUNNING, "o", dollars_per_hour=0.5)
        self.leases[lease.id] = lease
        return lease

    def provider(self, root: object, record: RunRecord) -> Any:
        return TableProvider(self, record.run)


class TableProvider:
    """One run's view of the table."""

    def __init__(self, table: Table, run: RunId) -> None:
        self.table, self.run = table, run

    async def leases(self) -> Sequence[Lease]:
        return [lease for lease in self.table.leases.values() if lease.key.run == self.run]

    async def all_leases(self) -> Sequence[Lease]:
        return list(self.table.leases.values())

    async def release(self, lease: LeaseId) -> None:
        if self.run in self.table.broken:
            raise ProviderError("the service is down", "wait")
        self.table.leases.pop(lease, None)

    async def logs(self, lease: LeaseId) -> AsyncIterator[LogLine]:
        yield LogLine("stderr", f"hello from {lease}, with {SECRET}", 5.0)

    async def close(self) -> None:
        pass


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    table = Table()
    monkeypatch.setattr("myelin.cli.ledgers.make_provider", table.provider)
    return table


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the ledger."""
    monkeypatch.setenv("MYELIN_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def ledger(state: Path) -> Ledger:
    return Ledger(state)


def begin(ledger: Ledger, run: str, *leases: Lease, owned: bool = False, provider: str = "memory") -> None:
    """A run that has started ``leases``; nobody owns it, unless this process does."""
    record = RunRecord(RunId(run), provider, "toy.gguf", max(1, len(leases)), SecretStr(SECRET))
    book = ledger.open_run(record)
    for lease in leases:
        now = time.time() - 3600
        intent = Intent(lease.key.node, lease.key.attempt, since=now, started=now, offer="o", dollars_per_hour=0.5)
        book.put(intent.launched(lease, now))
    if not owned:
        book.close(ended=False)


# status


def test_status_of_a_machine_without_runs(myelin: Myelin, state: Path) -> None:
    assert myelin("status") == (0, "No run that has not ended (--all shows the others)\n", "")
    assert json.loads(myelin("status", "--json")[1]) == []
    assert not state.exists()


def test_status_shows_runs_owners_and_money(myelin: Myelin, ledger: Ledger, table: Table) -> None:
    begin(ledger, "lost", table.add("lost"), table.add("lost", "stage-1"))
    begin(ledger, "mine", table.add("mine"), owned=True)
    begin(ledger, "over")
    ledger.let_go(RunId("over"), ended=True)
    code, out, _ = myelin("status")
    assert code == 0
    assert "over" not in out
    lost = next(line for line in out.splitlines() if line.startswith("lost"))
    assert "left behind" in lost
    assert "2 of 2" in lost
    assert "$1.00" in lost
    document = json.loads(myelin("status", "--all", "--json")[1])
    assert {run["run_id"]: run["state"] for run in document} == {
        "lost": "left behind",
        "mine": "running",
        "over": "ended",
    }
    mine = next(run for run in document if run["run_id"] == "mine")
    assert mine["owner"]["alive"] is True
    assert mine["dollars"] == pytest.approx(0.5, abs=0.01)
    assert mine["nodes"][0]["lease"] == "m-mine.stage-0.1"
    assert SECRET not in myelin("status", "--all", "--json")[1] + out


def test_status_of_one_run_shows_its_starts(myelin: Myelin, ledger: Ledger, table: Table) -> None:
    begin(ledger, "run-abc", table.add("run-abc"))
    code, out, _ = myelin("status", "run-a")
    assert code == 0
    assert "m-run-abc.stage-0.1" in out


@pytest.mark.parametrize("words", [("status", "nobody"), ("logs", "nobody"), ("down", "nobody")])
def test_a_run_that_is_not_there(myelin: Myelin, state: Path, words: tuple[str, ...]) -> None:
    code, out, err = myelin(*words)
    assert (code, out) == (2, "")
    assert err.startswith("Error: there is no run 'nobody' in the ledger\nHint: ")


# down


def test_down_releases_what_an_orchestrator_left(myelin: Myelin, ledger: Ledger, table: Table) -> None:
    begin(ledger, "lost", table.add("lost"), table.add("lost", "stage-1"))
    code, out, _ = myelin("down")
    assert (code, out) == (0, "lost: released (2 nodes)\n")
    assert table.leases == {}
    assert [record.ended > 0 for record in ledger.runs()] == [True]
    assert myelin("down", "lost")[1] == "lost: it had ended already\n"
    assert myelin("down", "--all")[1] == "No run that has not ended\n"


def test_down_names_what_it_would_have_to_choose_from(myelin: Myelin, ledger: Ledger, table: Table) -> None:
    begin(ledger, "one", table.add("one"))
    begin(ledger, "two", table.add("two"))
    code, _, err = myelin("down")
    assert code == 2
    assert "several runs" in err
    assert len(table.leases) == 2
    assert myelin("down", "one", "--all")[0] == 2
    code, out, _ = myelin("down", "--all", "--json")
    assert code == 0
    assert {each["run"] for each in json.loads(out)} == {"one", "two"}
    assert table.leases == {}


def test_down_says_what_it_could_not_release(
    myelin: Myelin, ledger: Ledger, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myelin.cli.ledgers.RELEASE_S", 0.1)
    monkeypatch.setattr("myelin.cli.ledgers.CALL_SPACING_S", 0.0)
    begin(ledger, "lost", table.add("lost"))
    table.broken.add("lost")
    code, _, err = myelin("down", "lost", "--set", "runtime.stop_grace_s=0")
    assert code == 1
    assert "could not show that its nodes are gone (stage-0 (m-lost.stage-0.1)): the service is down" in err
    assert [record.ended for record in ledger.runs()] == [0]


OWNER = """
import signal, sys, time
from pathlib import Path
from pydantic import SecretStr
from myelin.cluster.ledger import Ledger, RunRecord
book = Ledger(Path(sys.argv[1])).open_run(RunRecord("alive", "memory", "toy", 1, SecretStr("s")))
signal.signal(signal.SIGTERM, lambda *_: (book.close(ended=True), sys.exit(130)))
print("up", flush=True)
time.sleep(150)
"""


def test_down_asks_a_living_orchestrator(myelin: Myelin, ledger: Ledger, table: Table, state: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(state)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        code, out, _ = myelin("down", "alive")
        assert (code, out) == (0, "alive: ended by its orchestrator\n")
        assert owner.wait(timeout=60) == 130
    finally:
        owner.kill()
        owner.communicate()


def test_another_machines_run_is_left_to_that_machine(
    myelin: Myelin, ledger: Ledger, table: Table, state: Path
) -> None:
    begin(ledger, "far", table.add("far"), owned=True)
    with sqlite3.connect(state / "ledger.sqlite") as base:
        base.execute("UPDATE runs SET host = 'elsewhere'")
    base.close()
    code, _, err = myelin("down", "far")
    assert code == 2
    assert "on elsewhere" in err
    assert json.loads(myelin("gc", "--json")[1]) == []
    assert len(table.leases) == 1


# gc


def test_gc_releases_what_nobody_owns_and_leaves_the_rest(myelin: Myelin, ledger: Ledger, table: Table) -> None:
    begin(ledger, "lost", table.add("lost"))
    begin(ledger, "mine", table.add("mine"), owned=True)
    begin(ledger, "over")
    ledger.let_go(RunId("over"), ended=True)
    table.add("over", attempt=4)  # it turned up after its end
    table.add("strange")
    before = dict(table.leases)
    dry = json.loads(myelin("gc", "--dry-run", "--json")[1])
    assert table.leases == before
    assert {each["run"]: each["done"] for each in dry} == {
        "lost": "would be released",
        "over": "would be released",
        "strange": "left alone (--unknown releases it)",
    }
    code, out, _ = myelin("gc")
    assert code == 0
    assert {lease.key.run for lease in table.leases.values()} == {"mine", "strange"}
    assert "strange" in out
    assert myelin("gc", "--unknown")[0] == 0
    assert {lease.key.run for lease in table.leases.values()} == {"mine"}
    assert myelin("gc")[1] == "Nothing is left behind\n"


def test_gc_goes_on_past_what_it_cannot_release(
    myelin: Myelin, ledger: Ledger, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myelin.cli.ledgers.RELEASE_S", 1.5)  # time enough for the one that can be
    monkeypatch.setattr("myelin.cli.ledgers.CALL_SPACING_S", 0.0)
    begin(ledger, "bad", table.add("bad"))
    begin(ledger, "good", table.add("good"))
    table.broken.add("bad")
    code, out, _ = myelin("gc", "--json", "--set", "runtime.stop_grace_s=0")
    assert code == 1
    assert {each["run"]: each["ok"] for each in json.loads(out)} == {"bad": False, "good": True}
    assert {lease.key.run for lease in table.leases.values()} == {"bad"}


# logs


def test_logs_come_from_the_kept_files(myelin: Myelin, ledger: Ledger, table: Table, state: Path) -> None:
    begin(ledger, "lost", table.add("lost"))
    for node in ("stage-0", "stage-1"):
        file = NodeLogFile(state / "logs", LaunchKey(RunId("lost"), NodeId(node), Attempt(1)))
        file.write(f"7.5 stderr {node} says hi\n")
        file.close()
    assert myelin("logs", "lost")[1] == "stage-0.1 stderr | stage-0 says hi\nstage-1.1 stderr | stage-1 says hi\n"
    assert myelin("logs", "lost", "stage-1", "-f")[1] == "stage-1.1 stderr | stage-1 says hi\n"
    assert json.loads(myelin("logs", "lost", "stage-1", "--json")[1]) == [
        {"node": "stage-1", "attempt": 1, "time": 7.5, "stream": "stderr", "text": "stage-1 says hi"}
    ]
    assert myelin("logs", "lost", "-f", "--json")[0] == 2


def test_logs_are_asked_of_the_provider_where_none_are_kept(myelin: Myelin, ledger: Ledger, table: Table) -> None:
    begin(ledger, "lost", table.add("lost"))
    for words in (("logs", "lost"), ("logs", "lost", "--json")):
        out = myelin(*words)[1]
        assert "hello from m-lost.stage-0.1, with [redacted]" in out
        assert SECRET not in out
    begin(ledger, "empty")
    code, _, err = myelin("logs", "empty")
    assert code == 2
    assert "there is no output of the run empty" in err


# offers, and the price


def test_offers_of_each_stage(myelin: Myelin, tmp_path: Path) -> None:
    from myelin_testkit.synthetic import Recipe, write_model

    pytest.importorskip("myelin_provider_process")
    recipe = Recipe(
        n_layers=4, width=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_width=64, vocab_size=301, context_length=64
    )
    model = str(write_model(recipe, tmp_path / "toy.gguf")[0])
    words = ("offers", "--model", model, "-N", "2", "--engine", "reference")
    code, out, _ = myelin(*words, "--json")
    assert code == 0
    document = json.loads(out)
    assert [stage["node"] for stage in document["stages"]] == ["stage-0", "stage-1"]
    assert document["stages"][0]["offers"][0]["id"] == "local"
    assert document["dollars_per_hour"] == 0
    assert "$0.00/h" in myelin(*words)[1]


QUOTE = Quote("rented", ((NodeId("stage-0"), Offer("o", "rented", "a fast box", dollars_per_hour=0.4)),))


def test_without_a_terminal_the_price_must_be_agreed_to_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match=r"would cost \$0\.40/h") as raised:
        asyncio.run(ask(QUOTE, 0.6))
    assert raised.value.exit_code == 2
    assert "--yes" in raised.value.hint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "agreed"), [("y\n", True), ("Yes\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_at_a_terminal_only_yes_is_yes(monkeypatch: pytest.MonkeyPatch, typed: str, agreed: bool) -> None:
    shown = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    monkeypatch.setattr("sys.stderr", shown)
    assert asyncio.run(ask(QUOTE, 0.6)) is agreed
    assert "a fast box" in shown.getvalue()
    assert "Rent 1 for $0.40/h together (at most $0.60/h with replacements)? [y/N] " in shown.getvalue()


def test_yes_is_known_beforehand() -> None:
    from myelin.model.source import SourceOptions

    quiet: list[bool] = []
    request = RunRequest(RunId("r"), "m", 1, SourceOptions(Path("/nowhere")))
    asked = asking(request, yes=True, quiet=lambda: quiet.append(True))
    assert asked.agree is not None
    assert asyncio.run(asked.agree(QUOTE, 0.6))
    assert replace(asked, agree=None) == request
    assert quiet == [True]


def test_prompt_says_what_it_costs(myelin: Myelin, scripted: Any) -> None:
    scripted.pipeline.spend = lambda: Spend(0.42, 0.005)
    code, _, err = myelin("prompt", "hi", "--yes")
    assert code == 0
    assert "The nodes cost $0.42/h; $0.005 so far" in err
    assert err.rstrip().endswith("The run has cost $0.005")
    document = json.loads(myelin("prompt", "hi", "--json")[1])
    assert document["spend"] == {"dollars_per_hour": 0.42, "dollars": 0.005}
    assert spend_document(Spend()) == {}
