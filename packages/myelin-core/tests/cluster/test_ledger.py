"""The ledger: what it remembers, for whom, and that it is there before anything is done on its account."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from myelin.cluster.intents import Intent, IntentState
from myelin.cluster.ledger import KEPT_S, Ledger, LedgerError, RunRecord
from myelin.cluster.owner import NOBODY, Owner, start_of
from myelin.cluster.provider import LaunchKey, Lease, LeaseState
from myelin.errors import UsageError
from myelin.values import Attempt, LeaseId, NodeId, RunId

RUN = RunId("run-1")
NODE = NodeId("stage-0")
SECRET = "planted-secret"


def record(run: str = "run-1", **more: object) -> RunRecord:
    fields: dict[str, object] = {"provider": "memory", "model": "toy.gguf", "nodes": 2, "secret": SecretStr(SECRET)}
    return RunRecord(RunId(run), **{**fields, **more})


def launched(attempt: int = 1) -> Intent:
    key = LaunchKey(RUN, NODE, Attempt(attempt))
    lease = Lease(LeaseId(f"m{attempt}"), key, LeaseState.STARTING, "o", dollars_per_hour=0.5)
    return Intent(NODE, Attempt(attempt), since=1.0, started=1.0, offer="o").launched(lease, 2.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def abandon(folder: Path, run: str = "run-1") -> None:
    """Let the recorded owner of a run be a process that is gone."""
    with sqlite3.connect(folder / "ledger.sqlite") as base:
        base.execute("UPDATE runs SET process_started = 'long ago' WHERE run = ?", (run,))
    base.close()


def test_only_its_owner_can_read_it(folder: Path) -> None:
    before = os.umask(0)
    try:
        ledger = Ledger(folder)
        ledger.open_run(record())
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.iterdir()]}
    finally:
        os.umask(before)
    assert modes == {"state": 0o700, "ledger.sqlite": 0o600, "ledger.sqlite-wal": 0o600, "ledger.sqlite-shm": 0o600}
    ledger.close()


def test_a_secret_is_shown_nowhere(folder: Path) -> None:
    ledger = Ledger(folder)
    book = ledger.open_run(record())
    assert SECRET not in repr(book.record)
    assert SECRET not in repr(ledger.runs())
    assert book.record.secret.get_secret_value() == SECRET


def test_what_was_put_is_there_for_another_process(folder: Path) -> None:
    book = Ledger(folder).open_run(record())
    book.put(launched())
    script = (
        "import sys; from pathlib import Path; from myelin.cluster.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1])); print(ledger.runs()[0].owner.lives, ledger.intents('run-1')[0].lease)"
    )
    out = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["True", "m1"]


def test_a_run_that_is_killed_leaves_its_intents(folder: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from pydantic import SecretStr\n"
        "from myelin.cluster.ledger import Ledger, RunRecord; from myelin.cluster.intents import Intent\n"
        "book = Ledger(Path(sys.argv[1])).open_run(RunRecord('run-1', 'memory', 'm', 1, SecretStr('s3cret')))\n"
        "book.put(Intent('stage-0', started=5.0)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(folder)], check=False).returncode == -9
    ledger = Ledger(folder)
    (found,) = ledger.runs()
    assert found.owner.process
    assert not found.owner.lives
    book = ledger.open_run(record())
    assert book.inherited
    assert book.record.secret.get_secret_value() == "s3cret"
    (intent,) = book.intents()
    assert intent.state is IntentState.DOUBTFUL
    assert ledger.intents(RUN) == (intent,)


def test_a_living_orchestrators_run_is_not_taken(folder: Path) -> None:
    ledger = Ledger(folder)
    ledger.open_run(record())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with sqlite3.connect(folder / "ledger.sqlite") as base:
            base.execute("UPDATE runs SET process = ?, process_started = ?", (child.pid, start_of(child.pid)))
        base.close()
        with pytest.raises(UsageError, match=f"process {child.pid}'s") as raised:
            ledger.open_run(record())
        assert raised.value.reason == "run-taken"
    finally:
        child.communicate()
    assert ledger.open_run(record()).record.owner == Owner.this_process()


def test_another_machines_run_is_not_taken(folder: Path) -> None:
    ledger = Ledger(folder)
    ledger.open_run(record())
    with sqlite3.connect(folder / "ledger.sqlite") as base:
        base.execute("UPDATE runs SET host = 'elsewhere'")
    base.close()
    with pytest.raises(UsageError, match="on elsewhere"):
        ledger.open_run(record())


def test_nodes_at_another_provider_are_not_forgotten(folder: Path) -> None:
    ledger = Ledger(folder)
    ledger.open_run(record()).put(launched())
    abandon(folder)
    with pytest.raises(UsageError, match="left nodes at the provider memory"):
        ledger.open_run(record(provider="other"))


def test_an_ended_run_keeps_its_attempts_and_loses_its_secret(folder: Path) -> None:
    ledger = Ledger(folder)
    book = ledger.open_run(record())
    book.put(launched().unwanted("", 3.0).gone(4.0))
    book.close(ended=True)
    (found,) = ledger.runs()
    assert found.ended
    assert found.owner == NOBODY
    assert found.secret.get_secret_value() == ""
    ledger.close()
    assert [path.name for path in folder.iterdir() if SECRET.encode() in path.read_bytes()] == []
    ledger = Ledger(folder)
    again = ledger.open_run(record(secret=SecretStr("new")))
    assert not again.inherited
    assert again.record.secret.get_secret_value() == "new"
    assert [intent.attempt for intent in again.intents()] == [1]


def test_a_run_that_could_not_be_cleared_keeps_its_secret_and_has_no_owner(folder: Path) -> None:
    ledger = Ledger(folder)
    book = ledger.open_run(record())
    book.put(launched())
    book.close(ended=False)
    (found,) = ledger.runs()
    assert (found.ended, found.owner.lives) == (0, False)
    assert ledger.open_run(record(secret=SecretStr("new"))).record.secret.get_secret_value() == SECRET


def test_what_ended_long_ago_is_forgotten_with_all_that_belongs_to_it(folder: Path) -> None:
    now = [1e9]
    ledger = Ledger(folder, clock=lambda: now[0])
    old = ledger.open_run(record("old"))
    old.put(launched().gone(3.0))
    old.close(ended=True)
    ledger.open_run(record("open")).put(launched())
    now[0] += KEPT_S + 1
    ledger.open_run(record("new"))
    assert {found.run for found in ledger.runs()} == {"open", "new"}
    assert ledger.intents(RunId("old")) == ()


def test_many_processes_write_at_once(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from pydantic import SecretStr\n"
        "from myelin.cluster.ledger import Ledger, RunRecord; from myelin.cluster.intents import Intent\n"
        "book = Ledger(Path(sys.argv[1])).open_run(RunRecord(sys.argv[2], 'memory', 'm', 1, SecretStr('s')))\n"
        "for attempt in range(1, 41): book.put(Intent('stage-0', attempt))\n"
        "book.close(ended=True)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(folder), f"run-{n}"]) for n in range(4)]
    assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
    ledger = Ledger(folder)
    assert [len(ledger.intents(RunId(f"run-{n}"))) for n in range(4)] == [40] * 4


def test_threads_may_share_it(folder: Path) -> None:
    book = Ledger(folder).open_run(record())
    threads = [threading.Thread(target=book.put, args=(launched(n),)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [intent.attempt for intent in Ledger(folder).intents(RUN)] == list(range(1, 9))


def test_every_field_comes_back(folder: Path) -> None:
    ledger = Ledger(folder)
    full = Intent(
        NODE, Attempt(3), 2, IntentState.RELEASING, 1.5, 2.5, 3.5, 4.5, "offer", 0.25, LeaseId("x"), True, "why"
    )
    book = ledger.open_run(record(same_host=True, log_dir="/logs", found_by={"address": "there:1"}))
    book.put(full)
    assert ledger.intents(RUN) == (full,)
    found = ledger.run(RUN)
    assert found is not None
    assert replace(found, created=0.0) == replace(book.record, created=0.0)
    assert ledger.run(RunId("nobody")) is None


def test_where_a_runs_nodes_are_is_known_to_whoever_comes_later(folder: Path) -> None:
    ledger = Ledger(folder)
    book = ledger.open_run(record())
    book.note_found_by({"address": "there:1"})
    book.put(launched())
    book.close(ended=False)
    (found,) = Ledger(folder).runs()
    assert found.found_by == {"address": "there:1"}
    again = ledger.open_run(record())  # taken over
    assert again.record.found_by == {"address": "there:1"}
    assert ledger.runs()[0].found_by == {"address": "there:1"}


FORMAT_1 = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY, provider TEXT NOT NULL, model TEXT NOT NULL, nodes INTEGER NOT NULL,
    same_host INTEGER NOT NULL, secret TEXT NOT NULL, created REAL NOT NULL, ended REAL NOT NULL,
    log_dir TEXT NOT NULL, host TEXT NOT NULL, process INTEGER NOT NULL, process_started TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE intents (
    run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    node TEXT NOT NULL, attempt INTEGER NOT NULL, generation INTEGER NOT NULL, state TEXT NOT NULL,
    since REAL NOT NULL, started REAL NOT NULL, made REAL NOT NULL, ended REAL NOT NULL, offer TEXT NOT NULL,
    dollars_per_hour REAL NOT NULL, lease TEXT NOT NULL, served INTEGER NOT NULL, failure TEXT NOT NULL,
    PRIMARY KEY (run, node, attempt)
) WITHOUT ROWID;
INSERT INTO runs VALUES ('run-1', 'docker', 'toy.gguf', 2, 0, 'planted-secret', 5.0, 0.0, '', '', 0, '');
PRAGMA user_version = 1;
"""


def test_a_ledger_of_the_first_kind_is_brought_up_to_date(folder: Path) -> None:
    folder.mkdir()
    base = sqlite3.connect(folder / "ledger.sqlite")
    base.executescript(FORMAT_1)
    base.close()
    for _ in range(2):
        ledger = Ledger(folder)
        assert ledger.runs() == (record(provider="docker", created=5.0),)
        ledger.close()
    book = Ledger(folder).open_run(record(provider="docker"))
    book.put(launched())
    book.note_found_by({"host": "tcp://there:2376"})
    assert Ledger(folder).runs()[0].found_by == {"host": "tcp://there:2376"}


def test_a_ledger_of_a_newer_kind_is_left_alone(folder: Path) -> None:
    Ledger(folder).close()
    with sqlite3.connect(folder / "ledger.sqlite") as base:
        base.execute("PRAGMA user_version = 99")
    base.close()
    with pytest.raises(LedgerError, match="newer Myelin"):
        Ledger(folder)


def test_what_is_no_ledger_is_told_in_words(folder: Path) -> None:
    folder.mkdir()
    (folder / "ledger.sqlite").write_text("these are not the tables you are looking for " * 40)
    with pytest.raises(LedgerError, match="not a database"):
        Ledger(folder)
    (folder / "file").write_text("")
    with pytest.raises(LedgerError, match="can't be used"):
        Ledger(folder / "file")


def test_it_costs_a_start_next_to_nothing(folder: Path) -> None:
    Ledger(folder).close()
    began = time.thread_time()
    ledger = Ledger(folder)
    book = ledger.open_run(record())
    for attempt in range(1, 4):
        book.put(Intent(NODE, Attempt(attempt)))
    assert time.thread_time() - began < 0.5  # about 5 ms on a quiet machine; the disk's own time is its own affair


def test_owners_are_processes_not_numbers() -> None:
    me = Owner.this_process()
    assert me.lives
    assert me.is_here
    assert not replace(me, started="another time").lives
    assert not NOBODY.lives
    assert str(NOBODY) == "nobody"
    assert str(me) == f"process {os.getpid()}"
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    while start_of(zombie.pid):
        time.sleep(0.01)
    zombie.wait()
    assert start_of(zombie.pid) == ""
