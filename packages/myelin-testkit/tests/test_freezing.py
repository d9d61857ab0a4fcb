"""A process that was frozen does nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from myelin_testkit.freezing import freeze, thaw

COUNTING = """
import threading, time
def count(number):
    while True:
        counts[number] += 1
        time.sleep(0.001)
counts = [0] * 8
for number in range(8):
    threading.Thread(target=count, args=(number,), daemon=True).start()
while True:
    print(sum(counts), flush=True)
    time.sleep(0.001)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_all_threads_of_a_frozen_process_have_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", COUNTING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline()
            for _ in range(5):
                freeze(process.pid)
                times = [processor_time(process.pid) for _ in range(2)]
                assert times[0] == times[1]
                thaw(process.pid)
                assert process.stdout.readline()
        finally:
            process.kill()


def processor_time(pid: int) -> list[str]:
    """What all of its threads have used so far, in ticks of the user's and the system's."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[11:13]
