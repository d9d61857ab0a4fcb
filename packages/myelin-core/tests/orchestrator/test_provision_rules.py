"""When a node is told to load its stage: the rules, as a table and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.orchestrator.provision import NO_PROGRESS_S, PROGRESS_OLD_S, ProvisionState, Verdict, decide

STALL_S = 200.0


def after(*events: tuple[float, str] | tuple[float, str, int]) -> ProvisionState:
    """The state after ``(time, "send")`` and ``(time, phase, done)`` events."""
    state = ProvisionState(began=0.0)
    for event in events:
        if len(event) == 2:
            state = state.after_send(event[0])
        else:
            state = state.after_progress(*event)
    return state


SENT = (10.0, "send")


@pytest.mark.parametrize(
    ("name", "state", "now", "verdict", "until"),
    [
        ("at once", after(), 0.0, Verdict.SEND, 0),
        ("just sent", after(SENT), 10.0, Verdict.WAIT, 10 + NO_PROGRESS_S),
        ("no progress came", after(SENT), 10 + NO_PROGRESS_S, Verdict.SEND, 0),
        ("still none", after(SENT, (12.0, "send")), 13.9, Verdict.WAIT, 14.0),
        ("and again", after(SENT, (12.0, "send")), 14.0, Verdict.SEND, 0),
        ("progress is active", after(SENT, (11.0, "load", 1)), 70.9, Verdict.WAIT, 11 + PROGRESS_OLD_S),
        ("progress is old", after(SENT, (11.0, "load", 1)), 71.0, Verdict.SEND, 0),
        ("sent for old progress", after(SENT, (11.0, "load", 1), (71.0, "send")), 130.9, Verdict.WAIT, 131.0),
        ("old once more", after(SENT, (11.0, "load", 1), (71.0, "send")), 131.0, Verdict.SEND, 0),
        ("the stall comes before", after(SENT, (11.0, "load", 1), (200.0, "load", 1)), 205.0, Verdict.WAIT, 211.0),
        (
            "stalled: it lives, but gets no further",
            after(SENT, (11.0, "load", 1), (205.0, "load", 1)),
            211.0,
            Verdict.STALLED,
            0,
        ),
        ("a new phase gets further", after(SENT, (11.0, "fetch", 9), (205.0, "load", 0)), 211.0, Verdict.WAIT, 265.0),
        ("never any progress: stalled", after(SENT, (209.0, "send")), 210.0, Verdict.STALLED, 0),
    ],
)
def test_rules(name: str, state: ProvisionState, now: float, verdict: Verdict, until: float) -> None:
    decision = decide(state, now, STALL_S)
    assert (name, decision.verdict, decision.until) == (name, verdict, until)


@given(st.lists(st.floats(0.01, 100.0), max_size=30), st.floats(0.0, 300.0))
def test_never_sent_again_while_progress_is_active(gaps: list[float], wait: float) -> None:
    state, now, done = ProvisionState(began=0.0).after_send(0.0), 0.0, 0
    for gap in gaps:
        now, done = now + gap, done + 1
        state = state.after_progress(now, "load", done)
    decision = decide(state, now + wait, stall_s=1e9)
    if gaps and wait < PROGRESS_OLD_S:
        assert decision.verdict is Verdict.WAIT
        assert decision.until >= now + wait
    if gaps and wait > PROGRESS_OLD_S:
        assert decision.verdict is Verdict.SEND


@given(st.floats(0.0, 1000.0), st.floats(1.0, 500.0))
def test_waiting_always_ends_in_another_verdict(now: float, stall: float) -> None:
    """Whoever waits until ``until`` never waits for nothing."""
    state = ProvisionState(began=0.0).after_send(0.0)
    decision = decide(state, now, stall)
    if decision.verdict is Verdict.WAIT:
        assert decision.until > now
        assert decide(state, decision.until, stall).verdict is not Verdict.WAIT
