"""What metadata alone says, before anything is imported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_distributions import MadeUpDistribution, made_up
from packaging.version import Version

from myelin.plugins.discovery import Candidate, core_version, incompatibility, installed, is_disabled, judge
from myelin.plugins.report import PluginState
from myelin.plugins.specs import GROUPS

PROVIDERS = "myelin.providers"


def candidate(name: str, distribution: str = "dist", group: str = PROVIDERS, **more: object) -> Candidate:
    return Candidate(group, name, f"{distribution}.plugin", distribution, "1.0", **more)


def states(*candidates: Candidate, running: str = "0.1.0", disabled: tuple[str, ...] = ()) -> list[PluginState]:
    rows = judge(candidates, running=running, disabled=disabled)
    return [rows[one].state for one in candidates]


def test_entries_of_our_groups_are_found_with_their_owner_and_requirements() -> None:
    distribution = made_up(
        "Some_Dist",
        """
        [console_scripts]
        other = other:main

        [myelin.providers]
        mine = some.plugin

        [myelin.engines]
        quick = some.engine
        """,
        requires=("numpy>=1", "myelin-core>=0.1", "Myelin_Core<9"),
    )
    found, unreadable = installed(GROUPS, [distribution])
    assert [(one.group, one.name, one.value, one.distribution, one.version) for one in found] == [
        (PROVIDERS, "mine", "some.plugin", "Some_Dist", "1.0"),
        ("myelin.engines", "quick", "some.engine", "Some_Dist", "1.0"),
    ]
    assert found[0].requires == ("myelin-core>=0.1", "Myelin_Core<9")
    assert unreadable == ()


def test_a_distribution_that_is_on_the_path_twice_counts_once_the_first() -> None:
    first = made_up("a-b", "[myelin.providers]\nx = one\n", version="2.0")
    second = made_up("A_B", "[myelin.providers]\nx = other\n", version="1.0")
    found, _ = installed(GROUPS, [first, second])
    assert [(one.version, one.value) for one in found] == [("2.0", "one")]


def test_metadata_that_cannot_be_read_is_a_row_and_hurts_nobody_else() -> None:
    broken = made_up("broken", "[myelin.providers]\nthis line has no equals sign\n")
    well = made_up("well", "[myelin.providers]\nx = one\n")
    found, unreadable = installed(GROUPS, [broken, well])
    assert [one.distribution for one in found] == ["well"]
    (row,) = unreadable
    assert (row.distribution, row.state) == ("broken", PluginState.BROKEN)
    assert "entry_points.txt" in row.reason


def test_a_distribution_without_metadata_is_left_alone() -> None:
    assert installed(GROUPS, [MadeUpDistribution({})]) == ((), ())


def test_the_same_name_from_two_distributions_conflicts_though_others_lie_between() -> None:
    one, between, other = candidate("x", "a"), candidate("y", "b"), candidate("x", "c")
    assert states(one, between, other) == [PluginState.CONFLICTING, PluginState.INSTALLED, PluginState.CONFLICTING]
    rows = judge([one, between, other], running="0.1.0")
    assert rows[one] is not None
    assert rows[one] == rows[other]
    assert "a 1.0 and c 1.0" in rows[one].reason


def test_the_same_name_twice_in_one_distribution_conflicts() -> None:
    first = candidate("x", "a")
    second = Candidate(PROVIDERS, "x", "a.other", "a", "1.0")
    assert states(first, second) == [PluginState.CONFLICTING] * 2
    assert "a 1.0 (twice)" in judge([first, second], running="0.1.0")[first].reason


def test_the_same_name_in_two_groups_is_fine() -> None:
    assert states(candidate("x", "a"), candidate("x", "b", "myelin.engines")) == [PluginState.INSTALLED] * 2


def test_disabling_one_of_two_claimants_settles_the_conflict() -> None:
    one, other = candidate("x", "a"), candidate("x", "c")
    assert states(one, other, disabled=("C",)) == [PluginState.INSTALLED, PluginState.DISABLED]


@pytest.mark.parametrize("word", ["x", "providers:x", "myelin.providers:x", "the-dist", "The_Dist"])
def test_a_plugin_is_disabled_by_name_by_group_and_name_or_by_distribution(word: str) -> None:
    assert is_disabled(candidate("x", "the-dist"), [word])
    assert not is_disabled(candidate("y", "another"), [word])


@pytest.mark.parametrize(
    ("requirement", "running", "fits"),
    [
        ("myelin-core", "0.1.0", True),
        ("myelin-core==0.1.0", "0.1.0", True),
        ("myelin-core==0.1.0", "0.1.1", False),
        ("myelin-core>=0.2", "0.1.0", False),
        ("myelin-core>=0.1", "0.2.0.dev1", True),
        ("myelin-core>=5; python_version<'3'", "0.1.0", True),
        ("myelin-core[grpc]>=5; extra == 'all'", "0.1.0", True),
        ("myelin-core=>5", "0.1.0", False),
    ],
)
def test_requirements_of_the_core_are_checked(requirement: str, running: str, fits: bool) -> None:
    why = incompatibility([requirement], running)
    assert (why == "") is fits
    (state,) = states(candidate("x", requires=(requirement,)), running=running)
    assert state is (PluginState.INSTALLED if fits else PluginState.INCOMPATIBLE)


def test_the_reason_of_an_incompatibility_names_both_versions() -> None:
    assert incompatibility(["myelin-core>=7.5"], "0.1.0") == "it requires myelin-core>=7.5, and 0.1.0 is running"


def test_the_running_version_is_a_version() -> None:
    assert Version(core_version()).release >= (0, 1)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("pqrs")), max_size=12).map(
        lambda pairs: [Candidate(PROVIDERS, name, f"m{i}", owner, "1.0") for i, (name, owner) in enumerate(pairs)]
    )
)
def test_every_candidate_gets_a_row_and_conflicts_are_exactly_repeated_names(candidates: list[Candidate]) -> None:
    rows = judge(candidates, running="0.1.0")
    assert set(rows) == set(candidates)
    for one in candidates:
        repeated = sum(other.name == one.name for other in candidates) > 1
        assert (rows[one].state is PluginState.CONFLICTING) is repeated
