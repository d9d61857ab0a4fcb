"""The ledger: which runs there are on this machine, who owns each, and what each has started. SQLite, in one file.

It is what remains of a run whose orchestrator was killed: enough to find every node again, to take it over (the run's
secret is in it), or to end it. So a row is on disk before the provider is called (:meth:`RunBook.put` returns after the
commit), and the file is readable by its owner alone.

Any number of processes may use the file at once. A run belongs to one process at a time, named by its id and the time
of its start, so that a number that the system has given to somebody else since is not taken for it.

Blocking: a call takes well under a millisecond, and up to :data:`BUSY_S` where another process is in the middle of
writing.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from myelin.cluster.intents import Intent, IntentState, inherited
from myelin.cluster.owner import NOBODY, Owner
from myelin.errors import MyelinError, UsageError
from myelin.values import Attempt, LeaseId, NodeId, RunId

FILE_NAME = "ledger.sqlite"
FORMAT = 2
BUSY_S = 5.0
KEPT_S = 30 * 86400.0
"""How long runs that have ended are remembered, without their secrets."""

_SCHEMA = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY, provider TEXT NOT NULL, model TEXT NOT NULL, nodes INTEGER NOT NULL,
    same_host INTEGER NOT NULL, secret TEXT NOT NULL, created REAL NOT NULL, ended REAL NOT NULL,
    log_dir TEXT NOT NULL, host TEXT NOT NULL, process INTEGER NOT NULL, process_started TEXT NOT NULL,
    found_by TEXT NOT NULL DEFAULT '{}'
) WITHOUT ROWID;
CREATE TABLE intents (
    run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    node TEXT NOT NULL, attempt INTEGER NOT NULL, generation INTEGER NOT NULL, state TEXT NOT NULL,
    since REAL NOT NULL, started REAL NOT NULL, made REAL NOT NULL, ended REAL NOT NULL, offer TEXT NOT NULL,
    dollars_per_hour REAL NOT NULL, lease TEXT NOT NULL, served INTEGER NOT NULL, failure TEXT NOT NULL,
    PRIMARY KEY (run, node, attempt)
) WITHOUT ROWID;
"""

_FROM_FORMAT_1 = "ALTER TABLE runs ADD COLUMN found_by TEXT NOT NULL DEFAULT '{}'"


class LedgerError(MyelinError):
    """The ledger can't be read or written."""

    default_reason = "ledger"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What is known of a run.

    Attributes:
        run, provider, model, nodes: What was asked for.
        secret: The run's; empty once it has ended.
        same_host: Its nodes die with their orchestrator: there is nothing to release after a crash.
        created, ended: Unix seconds; ``ended`` is 0 until everything is known to be gone.
        log_dir: Where its nodes' output is kept; empty for nowhere.
        owner: The orchestrator; nobody once it has ended.
        found_by: Settings of the provider's section by which another process finds the run's nodes; no secrets.
    """

    run: RunId
    provider: str
    model: str
    nodes: int
    secret: SecretStr
    same_host: bool = False
    created: float = 0.0
    ended: float = 0.0
    log_dir: str = ""
    owner: Owner = field(default=NOBODY)
    found_by: Mapping[str, str] = field(default_factory=dict)


class RunBook:
    """The ledger's pages of one run, which belongs to this process.

    Attributes:
        record: The run.
        inherited: Whether an orchestrator before us has left intents open: then its nodes may be there, and know the
            secret in :attr:`record`.
    """

    def __init__(self, ledger: Ledger, record: RunRecord, intents: tuple[Intent, ...], *, sole: bool = False) -> None:
        self.record = record
        self.inherited = any(intent.open for intent in intents)
        self._ledger = ledger
        self._intents = intents
        self._sole = sole

    def intents(self) -> tuple[Intent, ...]:
        """What had been started when the run was opened; of an earlier orchestrator, as its heir must see it."""
        return self._intents

    def put(self, intent: Intent) -> None:
        """Write an intent, new or changed. It is on disk when this returns.

        Raises:
            LedgerError: It isn't.
        """
        self._ledger.put(self.record.run, intent)

    def note_same_host(self) -> None:
        """The nodes turn out to die with their orchestrator."""
        self._ledger.note_same_host(self.record.run)

    def note_found_by(self, settings: Mapping[str, str]) -> None:
        """By which settings of its provider the run's nodes are found: see :class:`RunRecord`."""
        self._ledger.note_found_by(self.record.run, settings)

    def close(self, *, ended: bool) -> None:
        """Let go of the run. ``ended``: nothing of it is left, so that its secret may be forgotten too."""
        try:
            self._ledger.let_go(self.record.run, ended=ended)
        finally:
            if self._sole:
                self._ledger.close()


class Ledger:
    """The file. Safe to use from several threads.

    Args:
        folder: Where it is; made where it is missing, for this user alone.
        clock: Unix seconds.

    Raises:
        LedgerError: It can't be opened, or isn't a ledger of ours.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = folder / FILE_NAME
        self._clock = clock
        self._lock = threading.Lock()
        with self._told():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Made by us first: SQLite would make it for whomever the umask allows, and its -wal and -shm follow it.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._base = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                self._prepare()
            except BaseException:
                self._base.close()
                raise

    def _prepare(self) -> None:
        self._base.execute("PRAGMA foreign_keys = ON")
        # FULL: a commit is on the disk, not just on its way, before a provider is called and money flows.
        self._base.execute("PRAGMA synchronous = FULL")
        self._base.execute("PRAGMA secure_delete = ON")  # a secret that is forgotten is overwritten
        found = self._base.execute("PRAGMA user_version").fetchone()[0]
        if found > FORMAT:
            raise LedgerError(
                f"{self.path} was written by a newer Myelin (format {found})", "use that one, or another state folder"
            )
        if found == FORMAT:
            return
        self._base.execute("PRAGMA journal_mode = WAL")
        with self._writing():
            found = self._base.execute("PRAGMA user_version").fetchone()[0]  # somebody may have been faster
            for statement in {0: _SCHEMA.split(";"), 1: [_FROM_FORMAT_1]}.get(found, []):
                self._base.execute(statement)
            self._base.execute(f"PRAGMA user_version = {FORMAT}")

    def open_run(self, record: RunRecord, *, sole: bool = False) -> RunBook:
        """Note a run of this process, or take over one whose orchestrator is gone.

        Of a run that was not ended, the secret and the intents are kept, so that its nodes can be adopted; one that was
        keeps only the numbers of its attempts.

        Args:
            sole: The ledger is closed with the run's book.

        Raises:
            UsageError: Another process, which lives, has this run.
            LedgerError: The file can't be written.
        """
        record = replace(record, owner=Owner.this_process(), created=self._clock(), ended=0.0)
        with self._told(), self._lock, self._writing():
            self._base.execute("DELETE FROM runs WHERE ended > 0 AND ended < ?", (self._clock() - KEPT_S,))
            before = self._find(record.run)
            if before is not None and before.ended == 0 and before.owner.lives and before.owner != record.owner:
                raise UsageError(
                    f"the run {record.run} is {before.owner}'s",
                    f"choose another --run-id, or end it with `myelin down {record.run}`",
                    reason="run-taken",
                )
            intents = self._intents_of(record.run) if before is not None else ()
            if before is not None and any(intent.open for intent in intents):
                if before.provider != record.provider:
                    raise UsageError(
                        f"the run {record.run} has left nodes at the provider {before.provider}",
                        f"choose another --run-id, or end them with `myelin down {record.run}`",
                        reason="run-taken",
                    )
                found_by = record.found_by or before.found_by
                secret = before.secret or record.secret
                record = replace(record, secret=secret, created=before.created, found_by=found_by)
                intents = tuple(inherited(intent, self._clock()) for intent in intents)
                for intent in intents:
                    self._put(record.run, intent)
            self._base.execute(
                "INSERT INTO runs VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT (run) DO UPDATE SET provider ="
                " excluded.provider, model = excluded.model, nodes = excluded.nodes, same_host = excluded.same_host,"
                " secret = excluded.secret, created = excluded.created, ended = 0, log_dir = excluded.log_dir, host ="
                " excluded.host, process = excluded.process, process_started = excluded.process_started, found_by ="
                " excluded.found_by",
                (
                    record.run,
                    record.provider,
                    record.model,
                    record.nodes,
                    record.same_host,
                    record.secret.get_secret_value(),
                    record.created,
                    0.0,
                    record.log_dir,
                    record.owner.host,
                    record.owner.process,
                    record.owner.started,
                    json.dumps(dict(record.found_by)),
                ),
            )
        return RunBook(self, record, intents, sole=sole)

    def runs(self) -> tuple[RunRecord, ...]:
        """All runs that are remembered, the newest first."""
        with self._told(), self._lock:
            rows = self._base.execute("SELECT * FROM runs ORDER BY created DESC, run").fetchall()
        return tuple(_record(row) for row in rows)

    def run(self, run: RunId) -> RunRecord | None:
        """One run; None where nothing is known of it."""
        with self._told(), self._lock:
            return self._find(run)

    def intents(self, run: RunId) -> tuple[Intent, ...]:
        """All that a run has started, in the order of nodes and attempts."""
        with self._told(), self._lock:
            return self._intents_of(run)

    def put(self, run: RunId, intent: Intent) -> None:
        """See :meth:`RunBook.put`."""
        with self._told(), self._lock, self._writing():
            self._put(run, intent)

    def note_same_host(self, run: RunId) -> None:
        """See :meth:`RunBook.note_same_host`."""
        with self._told(), self._lock, self._writing():
            self._base.execute("UPDATE runs SET same_host = 1 WHERE run = ?", (run,))

    def note_found_by(self, run: RunId, settings: Mapping[str, str]) -> None:
        """See :meth:`RunBook.note_found_by`."""
        with self._told(), self._lock, self._writing():
            self._base.execute("UPDATE runs SET found_by = ? WHERE run = ?", (json.dumps(dict(settings)), run))

    def let_go(self, run: RunId, *, ended: bool) -> None:
        """See :meth:`RunBook.close`."""
        with self._told(), self._lock, self._writing():
            self._base.execute("UPDATE runs SET process = 0, process_started = '', host = '' WHERE run = ?", (run,))
            if ended:
                self._base.execute("UPDATE runs SET ended = ?, secret = '' WHERE run = ?", (self._clock(), run))

    def close(self) -> None:
        """Close the file; twice is fine."""
        with self._lock:
            self._base.close()

    def _find(self, run: RunId) -> RunRecord | None:
        row = self._base.execute("SELECT * FROM runs WHERE run = ?", (run,)).fetchone()
        return _record(row) if row is not None else None

    def _intents_of(self, run: RunId) -> tuple[Intent, ...]:
        rows = self._base.execute(
            f"SELECT {', '.join(_INTENT_COLUMNS)} FROM intents WHERE run = ? ORDER BY node, attempt", (run,)
        ).fetchall()
        return tuple(_intent(row) for row in rows)

    def _put(self, run: RunId, intent: Intent) -> None:
        places = ",".join("?" * (len(_INTENT_COLUMNS) + 1))
        self._base.execute(
            f"INSERT OR REPLACE INTO intents (run, {', '.join(_INTENT_COLUMNS)}) VALUES ({places})",
            (run, *astuple(intent)),
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that has the right to write from its first statement on, so that it can't fail half-way."""
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._base.execute("ROLLBACK")
            raise
        self._base.execute("COMMIT")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the file, in words."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(
                f"The ledger of runs {self.path} can't be used: {getattr(error, 'strerror', None) or error}",
                "make room or set the permissions right, or name another folder by runtime.state_dir",
            ) from error


_INTENT_COLUMNS = tuple(each.name for each in fields(Intent))


def _record(row: tuple[Any, ...]) -> RunRecord:
    run, provider, model, nodes, same_host, secret, created, ended, log_dir, host, process, started, found_by = row
    owner = Owner(host, process, started) if process else NOBODY
    known = RunId(run), provider, model, nodes, SecretStr(secret), bool(same_host), created, ended, log_dir, owner
    return RunRecord(*known, json.loads(found_by))


def _intent(row: tuple[Any, ...]) -> Intent:
    fields_of = dict(zip(_INTENT_COLUMNS, row, strict=True))
    return Intent(
        **{
            **fields_of,
            "node": NodeId(fields_of["node"]),
            "attempt": Attempt(fields_of["attempt"]),
            "state": IntentState(fields_of["state"]),
            "lease": LeaseId(fields_of["lease"]),
            "served": bool(fields_of["served"]),
        }
    )
