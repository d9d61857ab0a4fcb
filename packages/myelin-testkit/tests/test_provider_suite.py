"""The suite notices what it says it does: each provider with one mistake fails the test that is about that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

MUTANTS = Path(__file__).with_name("mutants") / "broken_providers.py"

CAUGHT_BY = {
    "ForgetsKeys": "test_launching_a_key_again_gives_the_same_lease",
    "ChecksKeysTooEarly": "test_launching_a_key_several_times_at_once_starts_one_node",
    "LeavesCancelledLaunches": "test_a_launch_cancelled_after_a_part_of_its_time_leaves_nothing[0.9]",
    "IsEmptyWhereUnknown": "test_an_unreadable_listing_is_an_error_and_never_empty",
    "RaisesForeignErrors": "test_a_launch_that_fails_says_why_and_leaves_nothing",
    "TellsSecrets": "test_no_secret_is_told",
    "DropsEndedNodes": "test_an_ended_node_is_listed_with_its_reason_until_it_is_released",
    "StartsEndedOnesAgain": "test_the_key_of_a_node_that_has_ended_gives_that_lease",
    "GivesNoReasons": "test_an_ended_node_is_listed_with_its_reason_until_it_is_released",
    "ReleasesLazily": "test_a_released_node_is_gone",
    "KnowsNoUnknownLease": "test_releasing_what_is_not_there_succeeds",
    "NeverEndsLogs": "test_logs_tell_what_the_node_wrote_and_end_when_it_ends",
    "ForgetsOnRestart": "test_a_new_object_finds_what_an_old_one_started",
    "MixesRuns": "test_runs_are_apart",
    "EndsNodesOnClose": "test_closing_touches_no_node",
    "AnnouncesTooEarly": "test_a_node_is_launched_listed_and_announces_itself",
    "OffersExcludedOnes": "test_excluded_offers_are_not_made_again",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], bool]:
    """Whether a test passed, by the kind of provider and the test's name: each mutant's own test, and the same tests
    on the provider without a mistake."""
    report = tmp_path_factory.mktemp("mutants") / "report.xml"
    chosen = list(CAUGHT_BY.items())
    chosen += [("Sound", test) for test in sorted(set(CAUGHT_BY.values()))]
    words = [f"{MUTANTS}::Test{mutant}::{test}" for mutant, test in chosen]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *words]
    subprocess.run(command, capture_output=True, timeout=120, check=False)
    return {
        (case.attrib["classname"].rpartition(".Test")[2], case.attrib["name"]): case.find("failure") is None
        for case in ElementTree.parse(report).iter("testcase")
    }


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_a_mistake_is_noticed(outcomes: dict[tuple[str, str], bool], mutant: str) -> None:
    assert outcomes[mutant, CAUGHT_BY[mutant]] is False


@pytest.mark.parametrize("test", sorted(set(CAUGHT_BY.values())))
def test_a_provider_without_mistakes_passes(outcomes: dict[tuple[str, str], bool], test: str) -> None:
    assert outcomes["Sound", test] is True
