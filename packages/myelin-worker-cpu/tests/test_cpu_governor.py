"""When one thread takes over from all, and when they get the work back."""

from __future__ import annotations

import random

import pytest

from myelin_worker_cpu.governor import FIRST_PAUSE, LONGEST_PAUSE, PROBE, WINDOW, Governor


def run(governor: Governor, steps: int, one: float, every: float, noise: float = 0.0, seed: int = 0) -> list[int]:
    """Take steps that last ``one`` seconds with one thread and ``every`` with all; the numbers of threads used."""
    generator = random.Random(seed)
    used = []
    for _ in range(steps):
        threads = governor.threads()
        used.append(threads)
        governor.took((one if threads == 1 else every) * (1 + noise * generator.random()))
    return used


def test_undisturbed_threads_are_questioned_once() -> None:
    for seed in range(20):
        assert run(Governor(4), 3000, one=3.0, every=1.0, noise=0.4, seed=seed).count(1) == PROBE


def test_a_growing_context_is_no_disturbance() -> None:
    governor = Governor(2)
    run(governor, 100, one=1.5, every=1.0)
    for step in range(2000):
        assert governor.threads() == 2
        governor.took(1.0 + step / 2000)


def test_a_machine_that_was_busy_from_the_start() -> None:
    assert run(Governor(2), 200, one=1.0, every=3.0).count(2) <= FIRST_PAUSE + 2 * PROBE


def test_one_thread_takes_over_beside_a_neighbour_and_gives_back() -> None:
    governor = Governor(2)
    run(governor, 200, one=1.5, every=1.0)
    beside = run(governor, 400, one=1.7, every=5.0)
    # most of one window to notice, one trial; then all are tried ever less often
    assert beside[: WINDOW + PROBE + 1].count(2) <= WINDOW
    assert beside[WINDOW + PROBE + 1 :].count(2) <= 4 * PROBE
    assert set(run(governor, LONGEST_PAUSE + PROBE, one=1.5, every=1.0)[-PROBE:]) == {2}


def test_what_is_slow_for_one_thread_too_changes_nothing() -> None:
    governor = Governor(2)
    run(governor, 100, one=1.5, every=1.0)
    used = run(governor, 600, one=9.0, every=6.0)
    assert used.count(1) <= 5 * PROBE
    assert used[-1] == 2


@pytest.mark.parametrize("ratio", [0.3, 0.9, 1.2, 4.0])
def test_in_the_long_run_it_is_near_the_better_way(ratio: float) -> None:
    """Disturbed from the start, now and then."""
    generator = random.Random(3)
    governor = Governor(8)
    spent = 0.0
    for _ in range(4000):
        threads = governor.threads()
        usual = 1.0 if threads == 1 else ratio
        seconds = usual * (1.0 if generator.random() < 0.8 else 2.0)
        governor.took(seconds)
        spent += seconds
    assert spent / 4000 <= 1.2 * min(1.0, ratio) * 1.25


def test_a_single_thread_needs_no_governing() -> None:
    governor = Governor(1)
    assert run(governor, FIRST_PAUSE * 4, one=1.0, every=9.0, noise=5.0).count(1) == FIRST_PAUSE * 4
