"""The page's state: whatever happens, a page that began anywhere and took the increments shows what the server does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.orchestrator.events import NodeEvent, NodeState, PhaseEvent, ProgressEvent
from myelin.orchestrator.pipeline import StageStatus
from myelin.serve.dashboard.figures import Counted, request_row, sample, stage_figures
from myelin.serve.dashboard.reducer import LogLines, NodeFacts, RequestNow, RunFacts, Sampled, StageFacts, reduce
from myelin.serve.dashboard.state import RINGS, TABLES, Snapshot, apply, difference
from myelin.serve.request_book import RequestBook, RequestState
from myelin.telemetry.phases import PHASES
from myelin.values import Attempt, NodeId

NODES = st.integers(0, 400).map(lambda index: NodeId(f"stage-{index}"))
TEXTS = st.text(max_size=12)
STATES = ("waiting", "running", "done", "failed", "cancelled")


@st.composite
def requests(draw: st.DrawFn) -> RequestNow:
    book = RequestBook()
    tale = book.arrived("prompt-rpc", draw(TEXTS))
    tale.number = draw(st.integers(1, 500))
    if draw(st.booleans()):
        tale.begin(3, 10)
        for _ in range(draw(st.integers(0, 3))):
            tale.token()
        if draw(st.booleans()):
            tale.end(draw(st.sampled_from([state for state in RequestState if state.ended])), "stop", draw(TEXTS))
    return RequestNow(request_row(tale, tale.arrived + 1))


EVENTS = st.one_of(
    st.builds(
        PhaseEvent,
        st.sampled_from([*PHASES, "recovery", "unknown"]),
        st.sampled_from(["started", "done", "failed"]),
        st.floats(0, 100),
        TEXTS,
    ),
    st.builds(NodeEvent, NODES, st.integers(0, 400), st.integers(1, 9).map(Attempt), st.sampled_from(NodeState), TEXTS),
    st.builds(
        ProgressEvent,
        NODES,
        st.integers(-1, 400),
        st.sampled_from(["open", "fetch", "compile", "load", "other"]),
        st.integers(0, 1 << 40),
        st.integers(0, 1 << 40),
    ),
    st.builds(RunFacts, st.just({"model": "m", "tokens": 3})),
    st.builds(StageFacts, st.integers(0, 400), st.just({"busy": 0.5})),
    st.builds(NodeFacts, NODES.map(str), st.just({"stage": 1})),
    st.builds(Sampled, st.just({"tokens_per_s": 1.0, "running": 1, "waiting": 0})),
    st.builds(
        LogLines,
        st.lists(st.fixed_dictionaries({"t": st.just(1.0), "text": TEXTS}), max_size=5).map(tuple),
        st.integers(0, 3),
    ),
    requests(),
    st.just(object()),
)


@given(st.lists(EVENTS, max_size=60), st.data())
@settings(max_examples=60, deadline=None)
def test_increments_lead_to_what_the_server_shows(events: list[object], data: st.DataObject) -> None:
    history = [Snapshot()]
    for moment, event in enumerate(events):
        history.append(reduce(event, history[-1], float(moment)))
    places = sorted(data.draw(st.lists(st.integers(0, len(events)), max_size=6)))
    shown = history[places[0]] if places else history[0]
    for place in [*places, len(events)]:
        increment = json.loads(json.dumps(difference(shown, history[place]).as_json()))
        assert increment["version"] == history[place].version
        after = apply(shown.tables, shown.rings, difference(shown, history[place]))
        assert {name: dict(rows) for name, rows in after.tables.items()} == history[place].as_json()["tables"]
        assert after.rings == history[place].rings
        shown = history[place]


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=40, deadline=None)
def test_a_snapshot_is_json_and_stays_as_it_was(events: list[object]) -> None:
    snapshot = Snapshot()
    for moment, event in enumerate(events):
        before, copy = snapshot, json.dumps(snapshot.as_json())
        snapshot = reduce(event, snapshot, float(moment))
        assert json.dumps(before.as_json()) == copy
    assert json.loads(json.dumps(snapshot.as_json())) == snapshot.as_json()


def test_it_stays_bounded_whatever_comes() -> None:
    snapshot = Snapshot()
    for index in range(1000):
        node = NodeId(f"stage-{index}")
        for event in (
            NodeEvent(node, index, Attempt(1), NodeState.STARTING),
            ProgressEvent(node, index, "fetch", index, 1000),
            PhaseEvent(f"phase-{index}", "started", 0, "x" * 10_000),
            StageFacts(index, {"busy": 0.1}),
            RequestNow({"number": index, "state": "done", "ttft_ms": 1, "token_ms": 1, "tokens": 1}),
            Sampled({"tokens_per_s": 0}),
            LogLines(tuple({"text": "line"} for _ in range(5))),
            NodeEvent(node, index, Attempt(1), NodeState.LOST, "y" * 10_000),
        ):
            snapshot = reduce(event, snapshot, float(index))
    assert {name: len(rows) for name, rows in snapshot.tables.items()} == {**TABLES}
    assert {name: len(ring) for name, ring in snapshot.rings.items()} == {**RINGS}
    assert len(json.dumps(snapshot.as_json())) < 4_000_000


def told(*events: object) -> Snapshot:
    snapshot = Snapshot()
    for moment, event in enumerate(events):
        snapshot = reduce(event, snapshot, 100.0 + moment)
    return snapshot


def test_a_phase_that_is_told_of_afterwards_began_when_it_did() -> None:
    snapshot = told(PhaseEvent("config", "started"), PhaseEvent("config", "done", 40.0))
    assert snapshot.row("phases", "config")["began"] == 101.0 - 40.0


def test_a_run_serves_recovers_and_ends() -> None:
    states = []
    snapshot = Snapshot()
    for event in (
        PhaseEvent("config", "started"),
        PhaseEvent("serving", "started"),
        NodeEvent(NodeId("stage-1"), 1, Attempt(1), NodeState.LOST, "killed"),
        PhaseEvent("recovery", "started", 0, "stage-1 was lost"),
        NodeEvent(NodeId("stage-1"), 1, Attempt(2), NodeState.STARTING),
        NodeEvent(NodeId("stage-1"), 1, Attempt(2), NodeState.SERVING),
        NodeEvent(NodeId("stage-1"), 1, Attempt(2), NodeState.REPLACED, "", 1.5),
        PhaseEvent("recovery", "done", 1.6),
        PhaseEvent("serving", "done", 9),
        PhaseEvent("shutdown", "started"),
        PhaseEvent("provider_stop", "done", 0.1),
    ):
        snapshot = reduce(event, snapshot, 1.0)
        states.append(snapshot.row("run", "run")["state"])
    assert states == [
        *("starting", "serving", "serving", "recovering", "recovering", "recovering", "recovering", "serving"),
        *("serving", "ending", "ended"),
    ]
    node = snapshot.row("nodes", "stage-1")
    assert (node["attempt"], node["losses"], node["state"]) == (2, 1, "serving")
    assert snapshot.row("run", "run")["recoveries"] == 1
    assert any("stage-1 is replaced: attempt 2" in str(item["text"]) for item in snapshot.rings["news"])


def test_a_bootstrap_that_fails_is_lost_with_its_reason() -> None:
    snapshot = told(PhaseEvent("run_plan", "started"), PhaseEvent("run_plan", "failed", 0.1, "there is no such file"))
    run = snapshot.row("run", "run")
    assert (run["state"], run["detail"]) == ("lost", "there is no such file")


def test_spans_of_an_attempt_follow_one_another() -> None:
    node = NodeId("stage-0")
    snapshot = told(
        NodeEvent(node, 0, Attempt(1), NodeState.STARTING),  # 100
        NodeEvent(node, 0, Attempt(1), NodeState.ANNOUNCED),
        NodeEvent(node, 0, Attempt(1), NodeState.READY),
        NodeEvent(node, 0, Attempt(1), NodeState.LOADING),
        ProgressEvent(node, 0, "fetch", 1, 2),
        ProgressEvent(node, 0, "fetch", 2, 2),
        ProgressEvent(node, 0, "load", 1, 2),
        NodeEvent(node, 0, Attempt(1), NodeState.LOADED),
        NodeEvent(node, 0, Attempt(1), NodeState.SERVING),
    )
    spans = [(span["name"], span["began"], span["ended"]) for span in snapshot.tables["spans"].values()]
    assert spans == [
        ("start", 100, 101),
        ("connect", 101, 102),
        ("ready", 102, 103),
        ("prepare", 103, 104),
        ("fetch", 104, 106),
        ("load", 106, 107),
        ("loaded", 107, 108),
    ]


def test_a_stage_that_went_back_is_another_attempt() -> None:
    before = StageStatus(0, (0, 2), NodeId("stage-0"), "p", "cpu", 1, 1, 1, 1, 1, 1, 1, 1.0, steps=10, busy_seconds=8.0)
    now = replace(before, steps=30, rows=60, busy_seconds=9.0)
    assert stage_figures([before], [now], 2.0)[0] | {} == {
        "busy": 0.5, "steps_per_s": 10.0, "rows_per_s": 30.0, "step_ms": 50.0,
        "resident_bytes": 1, "peak_resident_bytes": 1,
    }  # fmt: skip
    fresh = replace(before, steps=4, busy_seconds=0.2)
    assert stage_figures([now], [fresh], 2.0)[0]["busy"] == pytest.approx(0.1)


@given(st.integers(0, 1000), st.integers(0, 1000), st.floats(0, 100))
def test_a_rate_is_never_negative(before: int, now: int, seconds: float) -> None:
    row = sample(Counted(0.0, before), Counted(seconds, now), 1, 2)
    rate = row["tokens_per_s"]
    assert isinstance(rate, float)
    assert rate >= 0
    assert (row["running"], row["waiting"]) == (1, 2)
