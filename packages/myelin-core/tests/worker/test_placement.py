"""A node on cores of its own: which, and every thread of the process on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from myelin.cluster.boot import CORE_SET_VARIABLE
from myelin.worker.placement import keep_to, own_cores

PROGRAM = """
import json, os, sys, threading
from myelin.worker.placement import keep_to
cores = frozenset(json.loads(sys.argv[1]))
go, done = threading.Event(), threading.Event()
seen = []
def look():
    go.wait()
    seen.append(sorted(os.sched_getaffinity(0)))
early = threading.Thread(target=look)
early.start()
kept = keep_to(cores)
go.set()
early.join()
late = threading.Thread(target=look)
late.start()
late.join()
print(json.dumps([kept, sorted(os.sched_getaffinity(0)), *seen]))
"""

affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system places threads by itself")


@pytest.mark.parametrize(
    ("told", "threads", "cores"),
    [
        ("3", 1, {3}),
        ("0,2", 1, {0, 2}),
        ("0,2", 2, {0, 2}),
        ("0,2", 3, set()),  # they would wait for each other
        ("", 1, set()),
        ("0-3", 1, set()),
        ("1,,2", 1, set()),
        ("-1", 1, set()),
        ("²", 1, set()),
    ],
)
def test_what_the_provider_told(told: str, threads: int, cores: set[int]) -> None:
    assert own_cores({CORE_SET_VARIABLE: told}, threads) == cores


def test_without_a_word_a_node_goes_anywhere() -> None:
    assert own_cores({}, 1) == frozenset()


@affinity
def test_all_threads_keep_to_the_cores() -> None:
    one = min(os.sched_getaffinity(0))
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([one])], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(result.stdout) == [True, [one], [one], [one]]


@affinity
def test_cores_of_others_are_left_alone() -> None:
    before = os.sched_getaffinity(0)
    assert not keep_to(frozenset())
    assert not keep_to(frozenset({min(before), 100_000}))
    assert os.sched_getaffinity(0) == before
