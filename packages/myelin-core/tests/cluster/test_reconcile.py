"""The reconciler's rules, one by one: what is wanted, what is seen, and what follows."""

from __future__ import annotations

from dataclasses import replace

from myelin.cluster.intents import Intent, IntentState, inherited, spend
from myelin.cluster.provider import LaunchKey, Lease, LeaseState, Need
from myelin.cluster.reconcile import (
    Adopt,
    GiveUp,
    Gone,
    Launch,
    Listing,
    Observed,
    Policy,
    Release,
    Wait,
    Wanted,
    reconcile,
)
from myelin.values import Attempt, LeaseId, NodeId, RunId

NODE = NodeId("stage-0")
NEED = Need(NODE, 1 << 20, "cpu")
POLICY = Policy(tries=3, backoff_s=1.0, longest_backoff_s=3.0, settle_s=5.0)
NOW = 1000.0
WISH = Wanted(NEED)


def lease(attempt: int = 1, name: str = "", state: LeaseState = LeaseState.RUNNING, node: NodeId = NODE) -> Lease:
    return Lease(LeaseId(name or f"m{attempt}"), LaunchKey(RunId("r"), node, Attempt(attempt)), state, f"o{attempt}")


def intent(attempt: int = 1, state: IntentState = IntentState.LAUNCHED, age: float = 100.0, **more: object) -> Intent:
    """One that came to its state ``age`` seconds ago."""
    launched = state in (IntentState.LAUNCHED, IntentState.RELEASING)
    fields: dict[str, object] = {
        "since": NOW - age,
        "started": NOW - age,
        "made": NOW - age,
        "offer": f"o{attempt}",
        "lease": LeaseId(f"m{attempt}") if launched else LeaseId(""),
        "served": launched,
        **more,
    }
    return Intent(NODE, Attempt(attempt), state=state, **fields)


def decide(
    *intents: Intent, listed: tuple[Lease, ...] | None = (), wanted: tuple[Wanted, ...] = (WISH,), began: float = NOW
) -> tuple[object, ...]:
    listing = Listing(began, listed) if listed is not None else None
    return reconcile(wanted, Observed(NOW, listing, intents), POLICY)


def test_a_node_that_is_not_there_is_launched() -> None:
    assert decide() == (Launch(NEED, Attempt(1), 1),)


def test_a_node_that_is_there_needs_nothing() -> None:
    assert decide(intent(), listed=(lease(),)) == ()


def test_nothing_is_launched_while_the_listing_is_unknown() -> None:
    (wait,) = decide(listed=None)
    assert isinstance(wait, Wait)
    assert "can't be read" in wait.why


def test_an_unknown_listing_takes_nothing_away() -> None:
    assert decide(intent(), listed=None) == ()


def test_a_start_under_way_is_waited_for() -> None:
    assert all(isinstance(action, Wait) for action in decide(intent(state=IntentState.INTENDED)))


def test_a_doubtful_start_that_is_listed_is_taken() -> None:
    doubtful = intent(state=IntentState.DOUBTFUL, age=0.5)
    assert decide(doubtful, listed=(lease(),)) == (Adopt(doubtful, LeaseId("m1")),)


def test_a_doubtful_start_that_has_ended_is_released_and_waited_for() -> None:
    doubtful = intent(state=IntentState.DOUBTFUL, age=0.5)
    release, wait = decide(doubtful, listed=(lease(state=LeaseState.EXITED),))
    assert release == Release(LeaseId("m1"), NODE, Attempt(1), ends=doubtful)
    assert isinstance(wait, Wait)


def test_a_doubtful_start_is_followed_by_another_only_once_listings_cannot_hide_it() -> None:
    doubtful = intent(state=IntentState.DOUBTFUL, age=4.0, failure="504")
    waits = decide(doubtful)
    assert all(isinstance(action, Wait) for action in waits)
    assert min(action.until for action in waits if isinstance(action, Wait)) == NOW + 1.0
    settled = intent(state=IntentState.DOUBTFUL, age=5.0, failure="504")
    gone, launch = decide(settled)
    assert gone == Gone(settled)
    assert launch == Launch(replace(NEED, exclude=frozenset({"o1"})), Attempt(2), 1)
    # A listing that was asked for before that says nothing, however late it comes.
    assert all(isinstance(action, Wait) for action in decide(settled, began=NOW - 0.1))


def test_tries_are_spaced_and_counted() -> None:
    failed = [intent(n, IntentState.RELEASED, 0.5, failure=f"f{n}", ended=NOW - 0.5) for n in (1, 2, 3)]
    assert decide(failed[0]) == (Wait(NODE, "a moment before the next try", NOW + 0.5),)
    (wait,) = decide(*failed[:2])
    assert isinstance(wait, Wait)
    assert wait.until == NOW + 1.5
    assert decide(*failed) == (GiveUp(NODE, "f3"),)
    # Another wish has tries of its own, goes on counting attempts, and avoids what has failed.
    next_wish = Wanted(NEED, generation=2)
    assert decide(*failed, wanted=(next_wish,)) == (
        Launch(replace(NEED, exclude=frozenset({"o1", "o2", "o3"})), Attempt(4), 2),
    )


def test_impatience_ends_in_giving_up() -> None:
    impatient = Wanted(NEED, patience_until=NOW - 1)
    (give_up,) = decide(listed=None, wanted=(impatient,))
    assert isinstance(give_up, GiveUp)
    assert decide(intent(), listed=(lease(),), wanted=(impatient,)) == ()


def test_a_replacement_starts_while_the_lost_one_is_released() -> None:
    lost = intent(1, IntentState.RELEASING, 0.1, failure="it fell silent")
    release, launch = decide(lost, listed=(lease(),), wanted=(Wanted(NEED, 2),))
    assert release == Release(LeaseId("m1"), NODE, Attempt(1), ends=lost)
    assert launch == Launch(replace(NEED, exclude=frozenset({"o1"})), Attempt(2), 2)


def test_one_is_replaced_at_a_time() -> None:
    first = intent(1, IntentState.RELEASING, 0.1, failure="lost")
    second = replace(intent(2, IntentState.RELEASING, 0.1, failure="lost"), generation=2)
    actions = decide(first, second, listed=(lease(1), lease(2)), wanted=(Wanted(NEED, 3),))
    assert [type(action) for action in actions] == [Release, Release, Wait]


def test_the_fruit_of_a_doubtful_start_is_no_node_being_replaced() -> None:
    fruit = intent(1, IntentState.RELEASING, 0.1, served=False)
    actions = decide(fruit, listed=(lease(),), wanted=(Wanted(NEED, 2),))
    assert [type(action) for action in actions] == [Release, Wait]


def test_a_lost_node_that_a_listing_may_still_hide_is_waited_for() -> None:
    lost = intent(1, IntentState.RELEASING, 2.0, failure="lost")
    assert all(isinstance(action, Wait) for action in decide(lost, wanted=(Wanted(NEED, 2),)))


def test_one_too_many_with_the_same_key_is_released() -> None:
    assert decide(intent(), listed=(lease(1, "m0"), lease())) == (Release(LeaseId("m0"), NODE, Attempt(1)),)


def test_a_node_of_an_unknown_start_is_released_before_another_is_made() -> None:
    release, wait = decide(listed=(lease(7),))
    assert isinstance(release, Release)
    assert (release.lease, release.ends) == (LeaseId("m7"), None)
    assert isinstance(wait, Wait)


def test_what_turns_up_late_is_released_again() -> None:
    old = intent(1, IntentState.RELEASED, ended=NOW - 50)
    assert decide(old, listed=(lease(),), wanted=()) == (Release(LeaseId("m1"), NODE, Attempt(1), ends=old),)
    turned_up = old.unwanted("", NOW, LeaseId("m1"))
    assert turned_up.open
    assert turned_up.ended == 0


def test_a_node_that_vanished_is_launched_again() -> None:
    gone, launch = decide(intent())
    assert gone == Gone(intent(), "it vanished from the provider's list")
    assert isinstance(launch, Launch)


def test_a_node_that_was_just_launched_may_not_be_listed_yet() -> None:
    assert decide(intent(age=1.0)) == ()


def test_at_the_end_everything_goes_and_gone_is_what_a_listing_shows() -> None:
    running = intent()
    assert decide(running, listed=(lease(),), wanted=()) == (Release(LeaseId("m1"), NODE, Attempt(1), ends=running),)
    releasing = intent(state=IntentState.RELEASING, age=20.0)
    assert decide(releasing, listed=(lease(),), wanted=()) == (
        Release(LeaseId("m1"), NODE, Attempt(1), ends=releasing),
    )
    assert decide(releasing, wanted=()) == (Gone(releasing),)
    assert decide(replace(releasing, state=IntentState.RELEASED), wanted=()) == ()


def test_at_the_end_an_unknown_listing_is_not_the_end() -> None:
    (wait,) = decide(listed=None, wanted=())
    assert isinstance(wait, Wait)
    # What is known is released meanwhile, listing or not.
    wait, release = decide(intent(), listed=None, wanted=())
    assert isinstance(release, Release)


def test_a_listing_from_before_the_release_does_not_show_its_success() -> None:
    releasing = intent(state=IntentState.RELEASING, age=1.0, made=NOW - 100)
    assert [type(action) for action in decide(releasing, wanted=(), began=NOW - 2.0)] == [Wait]


def test_an_heir_doubts_everything_that_was_open() -> None:
    for state in (IntentState.INTENDED, IntentState.LAUNCHED, IntentState.DOUBTFUL):
        assert inherited(intent(state=state), NOW).state is IntentState.DOUBTFUL
    assert inherited(intent(state=IntentState.INTENDED), NOW).made == NOW
    assert inherited(intent(state=IntentState.RELEASING), NOW).state is IntentState.RELEASING
    released = intent(state=IntentState.RELEASED)
    assert inherited(released, NOW) == released


def test_nodes_do_not_depend_on_each_other() -> None:
    other = NodeId("stage-1")
    wishes = (WISH, Wanted(Need(other, 1, "cpu")))
    actions = decide(intent(), listed=(lease(), lease(1, "x", node=NodeId("stage-9"))), wanted=wishes)
    assert [type(action) for action in actions] == [Launch, Release]


def test_money_is_counted_from_the_intent_to_its_end() -> None:
    now = 7200.0
    ended = Intent(NODE, started=0.0, ended=3600.0, dollars_per_hour=0.5, state=IntentState.RELEASED)
    running = Intent(NODE, Attempt(2), started=3600.0, dollars_per_hour=0.25, state=IntentState.LAUNCHED)
    leaving = Intent(NODE, Attempt(3), started=5400.0, dollars_per_hour=1.0, state=IntentState.RELEASING)
    told = spend((ended, running, leaving), now)
    assert told.dollars_per_hour == 1.25
    assert told.dollars == 0.5 + 0.25 + 0.5
