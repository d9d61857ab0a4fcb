"""What is decided about losses, as properties of pure functions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import MyelinError, NodeError
from myelin.orchestrator.admissions import Admissions, Mailbox
from myelin.orchestrator.recovery import (
    Budget,
    History,
    Order,
    Remedy,
    admission,
    cause,
    next_epoch,
    only_tells_of_a_break,
    remedy,
    worth_another_round,
)
from myelin.orchestrator.watch import Trouble
from myelin.values import Epoch, FinishReason, SamplingParams, SequenceId
from myelin.wire.requests import Finished, NewToken, Submit

CONTEXT = 24
REASONS = ("node-exited", "node-lost", "startup-timeout", "load-stalled", "different-model", "wrong-node", "no-address")


@pytest.mark.parametrize(
    ("reason", "more", "what"),
    [
        ("node-lost", {}, Remedy.REDIAL),
        ("node-lost", {"redialled": True}, Remedy.REPLACE),
        ("node-lost", {"reached": False}, Remedy.REPLACE),
        ("node-exited", {}, Remedy.REPLACE),
        ("node-exited", {"tries": 3}, Remedy.GIVE_UP),
        ("startup-timeout", {"reached": False}, Remedy.REPLACE),
        ("load-stalled", {}, Remedy.REPLACE),
        ("already-provisioned", {}, Remedy.REPLACE),
        ("kernel-trap", {"engine_dead": True}, Remedy.REPLACE),
        ("kernel-trap", {}, Remedy.GIVE_UP),
        ("different-model", {}, Remedy.GIVE_UP),
        ("wrong-node", {}, Remedy.GIVE_UP),
    ],
)
def test_what_is_done_about_an_attempt(reason: str, more: dict[str, object], what: Remedy) -> None:
    known = {"reached": True, "redialled": False, "tries": 1, "limit": 3, "engine_dead": False}
    assert remedy(reason, **{**known, **more}) is what


@given(st.lists(st.sampled_from(REASONS), max_size=40), st.integers(1, 6), st.booleans())
def test_any_sequence_of_failures_comes_to_an_end(reasons: list[str], limit: int, dead: bool) -> None:
    """However a node fails, there are at most ``limit`` launches and one redial for each, then it is given up."""
    tries, redialled, redials = 1, False, 0
    for reason in reasons:
        what = remedy(reason, reached=True, redialled=redialled, tries=tries, limit=limit, engine_dead=dead)
        if what is Remedy.GIVE_UP:
            return
        if what is Remedy.REDIAL:
            assert not redialled
            redialled, redials = True, redials + 1
        else:
            tries, redialled = tries + 1, False
        assert tries <= limit
        assert redials <= tries
    assert len(reasons) <= 2 * limit


@given(st.integers(0, 1000), st.lists(st.integers(0, 1000)))
def test_a_new_epoch_is_newer_than_any_that_anybody_has_seen(ours: int, seen: list[int]) -> None:
    assert next_epoch(Epoch(ours), seen) == max([ours, *seen]) + 1


@given(st.lists(st.floats(0, 100), max_size=50), st.integers(0, 6), st.floats(0.1, 50))
def test_no_window_holds_more_rounds_than_allowed(times: list[float], rounds: int, window: float) -> None:
    budget, history, held = Budget(rounds, window), History(), []
    for now in sorted(times):
        after = history.began(now, budget)
        recent = [time for time in held if now - time < window]
        assert (after is None) == (len(recent) >= rounds)
        if after is not None:
            history = after
            held.append(now)
    for start in held:
        assert sum(start <= time < start + window for time in held) <= rounds + 1  # a float's rounding at the edge


@given(
    prompt=st.lists(st.integers(0, 50), min_size=1, max_size=CONTEXT - 1),
    max_tokens=st.integers(1, 2 * CONTEXT),
    cut=st.integers(0, CONTEXT),
)
def test_what_is_admitted_again_and_what_was_sent_make_the_whole(prompt: list[int], max_tokens: int, cut: int) -> None:
    order = Order(SequenceId(3), tuple(prompt), max_tokens, SamplingParams(0.5, seed=9), True)
    most = min(max_tokens, CONTEXT - len(prompt))
    sent = list(range(min(cut, most)))
    what = admission(order, sent, CONTEXT)
    if len(sent) == most:
        assert what == Finished(SequenceId(3), FinishReason.LENGTH, most)
    else:
        assert isinstance(what, Submit)
        assert what.prompt == (*prompt, *sent)
        assert len(sent) + what.max_tokens == max_tokens
        assert len(what.prompt) < CONTEXT
        assert (what.sequence, what.sampling, what.ignore_end) == (order.sequence, order.sampling, True)


# A head that dies, again and again: its clients see one undisturbed stream.


@dataclass
class ModelHead:
    """A head in one epoch: it draws tokens that depend on the position alone, as a keyed draw does."""

    end_at: int | None
    retired: bool = False
    admitted: dict[SequenceId, tuple[Submit, object]] = field(default_factory=dict)

    def admit(self, submit: Submit, receiver: object) -> None:
        self.admitted[submit.sequence] = (submit, receiver)
        self.fed = {**getattr(self, "fed", {}), submit.sequence: (len(submit.prompt), 0)}

    def cancel(self, sequence: SequenceId) -> None:
        self.admitted.pop(sequence, None)

    def retire(self) -> None:
        self.retired = True

    def step(self, sequence: SequenceId) -> None:
        """The next token, or the end."""
        if sequence not in self.admitted:
            return
        submit, receiver = self.admitted[sequence]
        position, generated = self.fed[sequence]
        deliver = receiver if not self.retired else lambda event: None
        if position == self.end_at and not submit.ignore_end:
            del self.admitted[sequence]
            deliver(Finished(sequence, FinishReason.STOP, generated))
            return
        deliver(NewToken(sequence, position, drawn(sequence, position), -0.5))
        self.fed[sequence] = (position + 1, generated + 1)
        if generated + 1 == submit.max_tokens or position + 1 >= CONTEXT:
            del self.admitted[sequence]
            deliver(Finished(sequence, FinishReason.LENGTH, generated + 1))


def drawn(sequence: int, position: int) -> int:
    return (sequence * 31 + position * 7) % 101


def undisturbed(order: Order, end_at: int | None) -> tuple[list[int], FinishReason]:
    tokens: list[int] = []
    for position in range(len(order.prompt), CONTEXT):
        if position == end_at and not order.ignore_end:
            return tokens, FinishReason.STOP
        tokens.append(drawn(order.sequence, position))
        if len(tokens) == order.max_tokens:
            break
    return tokens, FinishReason.LENGTH


def taken(mailbox: Mailbox) -> list[object]:
    found = []
    while not mailbox._events.empty():
        found.append(mailbox._events.get_nowait())
    return found


ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 4)),
    st.tuples(st.just("late"), st.integers(0, 4)),
    st.tuples(st.just("lose"), st.just(0)),
    st.tuples(st.just("mend"), st.just(0)),
    st.tuples(st.just("submit"), st.integers(1, 12)),
    st.tuples(st.just("forget"), st.integers(0, 4)),
)


@given(st.lists(ACTIONS, max_size=120), st.integers(4, CONTEXT), st.lists(st.booleans(), min_size=5, max_size=5))
def test_any_sequence_of_losses_gives_each_client_its_own_tokens_once(
    actions: list[tuple[str, int]], end_at: int, ignores: list[bool]
) -> None:
    admissions, head, former = Admissions(CONTEXT), ModelHead(end_at), ModelHead(end_at)
    admissions.resume(head)
    mailboxes: list[Mailbox] = []
    forgotten: set[int] = set()
    for action, number in actions:
        if action == "submit" and len(mailboxes) < 5:
            ignore = ignores[len(mailboxes)]
            prompt = tuple(range(number % 5 + 1))
            mailboxes.append(admissions.submit(prompt, max_tokens=number, sampling=SamplingParams(), ignore_end=ignore))
        elif action == "step" and number < len(mailboxes) and not admissions.paused:
            head.step(mailboxes[number].order.sequence)
        elif action == "late" and number < len(mailboxes):
            former.step(mailboxes[number].order.sequence)  # what a fenced head still says
        elif action == "lose" and not admissions.paused:
            former = head
            admissions.pause()
        elif action == "mend" and admissions.paused:
            head = ModelHead(end_at)
            admissions.resume(head)
        elif action == "forget" and number < len(mailboxes):
            admissions.forget(mailboxes[number])
            forgotten.add(number)
    if admissions.paused:
        head = ModelHead(end_at)
        admissions.resume(head)
    for mailbox in mailboxes:
        for _ in range(CONTEXT + 1):
            head.step(mailbox.order.sequence)
    for number, mailbox in enumerate(mailboxes):
        tokens, reason = undisturbed(mailbox.order, end_at)
        events = taken(mailbox)
        got = [event.token for event in events if isinstance(event, NewToken)]
        if number in forgotten:
            assert got == tokens[: len(got)]
        else:
            assert got == tokens
            assert events[-1] == Finished(mailbox.order.sequence, reason, len(tokens))
            assert sum(isinstance(event, Finished) for event in events) == 1


@given(st.lists(st.tuples(st.sampled_from(["begin", "fault", "loss"]), st.integers(-2, 2)), max_size=40))
def test_only_news_of_the_open_epoch_are_news(actions: list[tuple[str, int]]) -> None:
    trouble, expected = Trouble(), None
    for number, (action, offset) in enumerate(actions):
        if action == "begin":
            trouble.begin(Epoch(trouble.epoch + 1))
            expected = None
            continue
        error = NodeError(str(number))
        trouble.report(error, None if action == "loss" else Epoch(trouble.epoch + offset))
        if expected is None and (action == "loss" or offset == 0):
            expected = error
    assert trouble.error is expected


async def test_trouble_wakes_who_waits_for_it() -> None:
    trouble = Trouble()
    trouble.begin(Epoch(2))
    waiting = asyncio.create_task(trouble.wait())
    trouble.of(Epoch(1))(NodeError("old"))
    await asyncio.sleep(0)
    assert not waiting.done()
    trouble.of(Epoch(2))(NodeError("now"))
    assert (await waiting).message == "now"


def test_which_errors_are_worth_another_round() -> None:
    assert worth_another_round(NodeError("", reason="probe-timeout"), trouble=True)
    assert worth_another_round(NodeError("", reason="edges-timeout"), trouble=False)
    assert not worth_another_round(NodeError("", reason="probe-timeout"), trouble=False)
    assert only_tells_of_a_break(NodeError("", reason="edge-lost"))
    assert not only_tells_of_a_break(NodeError("", reason="node-exited"))
    assert not only_tells_of_a_break(None)


@pytest.mark.parametrize(
    ("message", "short"),
    [
        ("stage-1 ended while it served (killed)", "ended while it served (killed)"),
        ("stage-1: a wire came loose", "a wire came loose"),
        ("stage-1 was lost: it doesn't answer any more", "it doesn't answer any more"),
        ("stage-10 was lost", "stage-10 was lost"),
    ],
)
def test_a_cause_without_the_name_in_front(message: str, short: str) -> None:
    assert cause(MyelinError(message), "stage-1") == short
