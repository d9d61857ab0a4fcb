"""From what happens to what the page shows: each kind of event is one pure function from a snapshot to the next.

Rows, by table and key (times are Unix seconds, sizes bytes, 0 or "" is unknown):

* ``run``, ``run``: what runs, how it fares (``state``: starting, serving, recovering, lost, ending, ended), counts;
* ``phases``, the phase: ``state`` (started, done, failed), ``began``, ``seconds``, ``detail``, ``order``;
* ``nodes``, the node: ``state`` (see :class:`~myelin.orchestrator.events.NodeState`), ``attempt``, ``stage``,
  ``since``, progress of its load;
* ``spans``, ``node#attempt#name``: what an attempt was at, from ``began`` to ``ended`` (None while it lasts);
* ``stages``, the index: what a stage is made of, and how busy it is;
* ``requests``, the number: see :class:`~myelin.serve.request_book.RequestTale`.

Rings: ``samples`` (rates, each second), ``answers`` (latencies of each finished request), ``news`` (what a person
should notice), ``logs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch

from myelin.orchestrator.events import NodeEvent, NodeState, PhaseEvent, ProgressEvent
from myelin.serve.dashboard.state import Row, Snapshot, Value, short
from myelin.telemetry.phases import PHASES, RECOVERY, Phase

_SPAN_NAMES = {
    NodeState.STARTING: "start",
    NodeState.ANNOUNCED: "connect",
    NodeState.READY: "ready",
    NodeState.LOADING: "prepare",
    NodeState.LOADED: "loaded",
}
_LOAD_PHASES = frozenset({"open", "fetch", "compile", "load"})
_ENDS = frozenset({NodeState.SERVING, NodeState.LOST, NodeState.REPLACED, NodeState.RELEASED})


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Something is known of the run: values of its row."""

    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class StageFacts:
    """Something is known of a stage: values of its row."""

    index: int
    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Something is known of a node: values of its row."""

    node: str
    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class RequestNow:
    """How a request is; ``row`` as :func:`myelin.serve.dashboard.figures.request_row` makes it."""

    row: Row


@dataclass(frozen=True, slots=True)
class Sampled:
    """Rates of the last second or so: ``tokens_per_s``, ``running``, ``waiting``."""

    row: Row


@dataclass(frozen=True, slots=True)
class LogLines:
    """Lines that were written since the last ones, and how many more there were that nobody will see."""

    rows: tuple[Row, ...]
    dropped: int = 0


@singledispatch
def reduce(event: object, snapshot: Snapshot, now: float) -> Snapshot:
    """The snapshot after ``event``, which happened at ``now``. Pure; an event of an unknown kind changes nothing."""
    return snapshot


@reduce.register
def _(event: RunFacts, snapshot: Snapshot, now: float) -> Snapshot:
    return snapshot.update("run", "run", **event.values)


@reduce.register
def _(event: StageFacts, snapshot: Snapshot, now: float) -> Snapshot:
    return snapshot.update("stages", str(event.index), index=event.index, **event.values)


@reduce.register
def _(event: NodeFacts, snapshot: Snapshot, now: float) -> Snapshot:
    return snapshot.put("nodes", event.node, {**_node(snapshot, event.node), **event.values})


@reduce.register
def _(event: LogLines, snapshot: Snapshot, now: float) -> Snapshot:
    if event.dropped:
        dropped = snapshot.row("run", "run").get("lines_dropped", 0)
        assert isinstance(dropped, int)
        snapshot = snapshot.update("run", "run", lines_dropped=dropped + event.dropped)
    return snapshot.add("logs", event.rows)


@reduce.register
def _(event: Sampled, snapshot: Snapshot, now: float) -> Snapshot:
    return snapshot.add("samples", [{"t": now, **event.row}])


@reduce.register
def _(event: RequestNow, snapshot: Snapshot, now: float) -> Snapshot:
    row = event.row
    snapshot = snapshot.put("requests", str(row["number"]), row)
    if row["state"] == "done":
        answer = {key: row[key] for key in ("number", "ttft_ms", "token_ms", "tokens")}
        snapshot = snapshot.add("answers", [{"t": now, **answer}])
    return snapshot


@reduce.register
def _(event: PhaseEvent, snapshot: Snapshot, now: float) -> Snapshot:
    snapshot = _run_after(event, snapshot, now)
    known = snapshot.row("phases", event.phase)
    began = known.get("began", now) if event.state != "started" else now
    if event.state != "started":
        assert isinstance(began, (int, float))
        # A phase may be told of when it is over already.
        began = min(began, now - event.seconds)
    order = PHASES.index(event.phase) if event.phase in PHASES else len(PHASES)
    return snapshot.put(
        "phases",
        event.phase,
        {
            "order": order,
            "state": event.state,
            "began": began,
            "seconds": event.seconds,
            "detail": short(event.detail),
        },
    )


def _run_after(event: PhaseEvent, snapshot: Snapshot, now: float) -> Snapshot:
    """What a phase says of the whole run."""
    run = snapshot.row("run", "run")
    state = run.get("state", "starting")
    facts: dict[str, Value] = {}
    if not run.get("began"):
        facts["began"] = now
    if event.state == "failed" and state not in ("ending", "ended", "lost"):
        facts.update(state="lost", detail=short(event.detail))
        tone, text = "bad", f"{_words(event.phase)} failed: {event.detail}"
        snapshot = _news(snapshot, now, tone, text)
    elif event.phase == Phase.SERVING and event.state == "started":
        facts.update(state="serving", detail="", serving_since=now)
        snapshot = _all_serve(snapshot, now)
        snapshot = _news(snapshot, now, "good", "A token went through the whole chain; it serves")
    elif event.phase == RECOVERY and event.state == "started":
        facts.update(state="recovering", detail=short(event.detail))
        snapshot = _news(snapshot, now, "bad", f"Recovery began{_after(event.detail)}")
    elif event.phase == RECOVERY and event.state == "done":
        count = run.get("recoveries", 0)
        assert isinstance(count, int)
        facts.update(state="serving", detail="", recoveries=count + 1)
        snapshot = _news(snapshot, now, "good", f"Serving again after {event.seconds:.1f} s")
    elif event.phase == Phase.SHUTDOWN and event.state == "started" and state != "lost":
        facts["state"] = "ending"
        snapshot = _news(snapshot, now, "info", "Shutting down")
    elif event.phase == Phase.PROVIDER_STOP and event.state == "done":
        facts.update(state="lost" if state == "lost" else "ended", ended=now)
        snapshot = _news(snapshot, now, "info", "All nodes are released")
    elif not run.get("state"):
        facts["state"] = "starting"
    return snapshot.update("run", "run", **facts) if facts else snapshot


def _all_serve(snapshot: Snapshot, now: float) -> Snapshot:
    """A chain that serves does so with all of its nodes, whatever was heard of each."""
    for node, row in snapshot.tables["nodes"].items():
        if row["state"] != NodeState.SERVING:
            snapshot = snapshot.update("nodes", node, state=NodeState.SERVING.value, since=now, load="")
        snapshot = _close_spans(snapshot, node, now, lost=False)
    return snapshot


@reduce.register
def _(event: NodeEvent, snapshot: Snapshot, now: float) -> Snapshot:
    row = dict(_node(snapshot, event.node))
    if event.attempt != row["attempt"] or event.state is NodeState.STARTING:
        row.update(load="", done=0, total=0)
    if event.state is NodeState.LOST:
        losses = row.get("losses", 0)
        assert isinstance(losses, int)
        row["losses"] = losses + 1
    if event.state is NodeState.STARTING:
        row["offer"] = short(event.detail)
    if event.state is NodeState.ANNOUNCED:
        row["address"] = short(event.detail)
    state = NodeState.SERVING if event.state is NodeState.REPLACED else event.state
    if state != row["state"] or event.attempt != row["attempt"]:
        row["since"] = now
    detail = short(event.detail) if event.state in (NodeState.LOST, NodeState.RELEASED) else ""
    row.update(stage=event.stage, attempt=int(event.attempt), state=state.value, detail=detail)
    snapshot = snapshot.put("nodes", event.node, row)
    if event.state is NodeState.LOST:
        snapshot = _news(snapshot, now, "bad", f"{event.node} (attempt {event.attempt}) is lost{_after(event.detail)}")
    if event.state is NodeState.REPLACED:
        text = f"{event.node} is replaced: attempt {event.attempt} serves, {event.seconds:.1f} s after the loss"
        snapshot = _news(snapshot, now, "good", text)
    snapshot = _close_spans(snapshot, event.node, now, lost=event.state is NodeState.LOST)
    if event.state not in _ENDS:
        snapshot = _open_span(snapshot, event.node, int(event.attempt), _SPAN_NAMES[event.state], now)
    return snapshot


@reduce.register
def _(event: ProgressEvent, snapshot: Snapshot, now: float) -> Snapshot:
    if event.stage < 0:
        return snapshot.update("run", "run", model_done=event.done, model_total=event.total)
    row = _node(snapshot, event.node)
    state = row["state"] if row["state"] in (NodeState.LOADED, NodeState.SERVING) else NodeState.LOADING.value
    changed: dict[str, Value] = {
        "stage": event.stage,
        "state": state,
        "load": event.phase,
        "done": event.done,
        "total": event.total,
    }
    if row["state"] != state:
        changed["since"] = now
    attempt = row["attempt"] or 1
    assert isinstance(attempt, int)
    snapshot = snapshot.put("nodes", event.node, {**row, **changed, "attempt": attempt})
    if event.phase in _LOAD_PHASES:
        snapshot = _open_span(snapshot, event.node, attempt, event.phase, now)
    return snapshot


def _node(snapshot: Snapshot, node: str) -> Row:
    empty: Row = {
        "node": node,
        "stage": -1,
        "attempt": 0,
        "state": "",
        "since": 0,
        "detail": "",
        "load": "",
        "done": 0,
        "total": 0,
        "losses": 0,
    }
    return {**empty, **snapshot.row("nodes", node)}


def _open_span(snapshot: Snapshot, node: str, attempt: int, name: str, now: float) -> Snapshot:
    """A span begins, unless it has; a part of the load ends the one before."""
    key = f"{node}#{attempt}#{name}"
    if key in snapshot.tables["spans"]:
        return snapshot
    if name in _LOAD_PHASES:
        for other, span in snapshot.tables["spans"].items():
            if span["node"] == node and span["attempt"] == attempt and span["ended"] is None:
                snapshot = snapshot.update("spans", other, ended=now)
    return snapshot.put(
        "spans", key, {"node": node, "attempt": attempt, "name": name, "began": now, "ended": None, "lost": False}
    )


def _close_spans(snapshot: Snapshot, node: str, now: float, *, lost: bool) -> Snapshot:
    for key, span in snapshot.tables["spans"].items():
        if span["node"] == node and span["ended"] is None:
            snapshot = snapshot.update("spans", key, ended=now, lost=lost)
    return snapshot


def _news(snapshot: Snapshot, now: float, tone: str, text: str) -> Snapshot:
    return snapshot.add("news", [{"t": now, "tone": tone, "text": short(text)}])


def _after(detail: str) -> str:
    return f": {detail}" if detail else ""


def _words(phase: str) -> str:
    return phase.replace("_", " ").capitalize()
