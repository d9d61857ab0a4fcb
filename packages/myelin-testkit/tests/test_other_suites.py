"""The suites for planners, sinks and transports notice what they say they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

MUTANTS = Path(__file__).with_name("mutants") / "broken_others.py"

CAUGHT_BY = {
    "DeclinesAll": ("SoundPlanner", "test_a_simple_request_is_planned[llama]"),
    "ForgetsTheHead": ("SoundPlanner", "test_a_stage_counts_what_it_must_hold[llama-2]"),
    "IgnoresMemory": (
        "SoundPlanner",
        "test_what_cannot_be_is_an_error_that_says_what_would_fit[llama-too little memory]",
    ),
    "IgnoresTheSplit": ("SoundPlanner", "test_a_split_by_hand_is_kept[llama]"),
    "ForgetsTheWayBack": (
        "SoundPlanner",
        "test_edges_lead_from_the_orchestrator_through_all_stages_and_back[llama-2]",
    ),
    "ChangesItsMind": ("SoundPlanner", "test_the_same_request_gives_the_same_plan[llama]"),
    "AlwaysOn": ("SoundSink", "test_unless_asked_for_it_exports_nothing"),
    "DropsSpans": ("SoundSink", "test_all_signals_that_it_takes_arrive"),
    "ChangesRequests": ("SoundSinkOfAllSignals", "test_it_leaves_a_request_as_it_was"),
    "RaisesInItsCheck": ("SoundSinkOfAllSignals", "test_a_check_answers_and_does_not_raise"),
    "RaisesAtTheEnd": ("SoundSink", "test_after_its_end_it_fails_without_raising"),
    "LeavesAThread": ("SoundSink", "test_no_thread_is_left"),
    "TrustsAnyNode": ("SoundTransport", "test_a_wrong_secret_never_reaches_a_handler"),
    "TriesOneAddress": ("SoundTransport", "test_candidates_are_tried_in_order"),
    "HasNoLimit": ("SoundTransport", "test_a_message_above_the_limit_is_refused_and_the_stream_lives_on"),
}
"""For each mutant, the class that it would be without its mistake, and the test that tells them apart."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], bool]:
    """Whether a test passed, by class and name."""
    report = tmp_path_factory.mktemp("mutants") / "report.xml"
    chosen = {(name, test) for mutant, (sound, test) in CAUGHT_BY.items() for name in (mutant, sound)}
    words = [f"{MUTANTS}::Test{name}::{test}" for name, test in sorted(chosen)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *words]
    subprocess.run(command, capture_output=True, timeout=120, check=False)
    return {
        (case.attrib["classname"].rpartition(".Test")[2], case.attrib["name"]): not len(case)
        for case in ElementTree.parse(report).iter("testcase")
    }


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_a_mistake_is_noticed_and_nothing_else(outcomes: dict[tuple[str, str], bool], mutant: str) -> None:
    sound, test = CAUGHT_BY[mutant]
    assert outcomes[mutant, test] is False
    assert outcomes[sound, test] is True
