"""Real runs against a fake Vast.ai that misbehaves at random, with an orchestrator that is killed at every step.

Whatever happens: no launch key has two machines, there are never more machines than nodes are wanted and one that is
being replaced, and after `myelin gc` nothing is rented.
"""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from vastai_support import identity_at, service, tiny_model, told

from myelin_testkit.fake_vastai import FakeVastai, Trouble, offer

NODES = 2
STEPS = ("never", "after intent", "after create", "loading", "bootstrap", "serving")
"""At which step the orchestrator is killed."""
TROUBLES = (
    Trouble(answer="created-504"),
    Trouble(answer="lost-504"),
    Trouble(answer="error-and-contract"),
    Trouble(answer="broken"),
    Trouble(answer="no_such_ask-404"),
    Trouble(answer="no_such_ask-410"),
    Trouble(answer="created-504", listed_after_s=0.03),
    Trouble(state="created", message="OCI runtime create failed: no such device"),
    Trouble(state="exited"),
    Trouble(ssh=False),
    Trouble(ssh_after_s=0.5),
    Trouble(mapped=False),
    Trouble(deaf_destroys=1),
)
LIST_FAULTS = ("deprecated", "500", "html", "empty-object", "429")


class Storm:
    """One run id, from its first orchestrator to the clean-up."""

    def __init__(
        self, myelin, tmp_path: Path, fake: FakeVastai, chance: random.Random, ssh_timeout_s: float = 3.0
    ) -> None:
        self.myelin = myelin
        self.fake = fake
        self.chance = chance
        self.environment = told(fake, identity_at(tmp_path / "id_ed25519"), ssh_timeout_s)
        self.model = tiny_model(tmp_path / "model.gguf")
        fake.offers = [offer(number) for number in range(16)]

    def start(self, max_tokens: int) -> subprocess.Popen[str]:
        """The command, once more with the same run id."""
        words = ("prompt", "-N", str(NODES), "--yes", "--run-id", "storm", "--raw", "--engine", "reference")
        model = ("--model", self.model, "--max-context", "256", "--max-tokens", str(max_tokens))
        return self.myelin.start(*words, *model, "hello", **self.environment)

    def kill_at(self, step: str) -> None:
        """Run until ``step``, and end the orchestrator there: as a crash does, or as somebody at the keyboard."""
        hurt = signal.SIGKILL if self.chance.random() < 0.8 else signal.SIGINT
        create, struck = self.fake._create, threading.Event()
        process: subprocess.Popen[str] | None = None
        turn = self.chance.randrange(NODES)

        def strike(ask, body):
            """The create during which the orchestrator dies: before anything is made, or before it hears of it."""
            nonlocal turn
            turn -= 1
            if turn >= 0 or struck.is_set():
                return create(ask, body)
            answer = (0, "", {}) if step == "after intent" else create(ask, body)
            struck.set()
            assert process is not None
            process.send_signal(signal.SIGKILL)
            return answer

        if step in ("after intent", "after create"):
            self.fake._create = strike
        if step == "loading":
            self.fake.next_machines(*[Trouble(state="loading")] * NODES)
        process = self.start(max_tokens=200 if step == "serving" else 4)
        try:
            if step in ("after intent", "after create"):
                self.wait(struck.is_set, process)
            elif step == "loading":
                self.wait(lambda: len(self.fake.rented) >= NODES, process)
            elif step == "bootstrap":
                self.wait(lambda: any(map(is_worker, self.inside())), process)
            elif step == "serving":
                assert process.stdout is not None
                process.stdout.read(1)
            if step != "never":
                time.sleep(self.chance.random() * 0.3)
                process.send_signal(hurt)
            _, err = process.communicate(timeout=90)
            assert "Traceback" not in err, err
        finally:
            self.fake._create = create

    def wait(self, done: Callable[[], object], process: subprocess.Popen[str]) -> None:
        """Until ``done()``, or the end of the command, which may well have come first."""
        deadline = time.monotonic() + 60
        while not done() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def inside(self) -> list[psutil.Process]:
        return [process for rented in self.fake.live() for process in rented.machine.processes()]

    def check(self) -> None:
        """What holds at any time."""
        keys = [rented.label.rpartition(".")[0] for rented in self.fake.rented]
        assert len(set(keys)) == len(keys), f"two machines for one launch key: {keys}"
        assert self.fake.most_at_once <= NODES + 1, keys


def is_worker(process: psutil.Process) -> bool:
    try:
        return "--boot-stdin" in process.cmdline()
    except psutil.Error:
        return False


def weather(storm: Storm) -> None:
    """Something goes wrong with some of the next creates and listings."""
    chance = storm.chance
    storm.fake.next_machines(*(chance.choice(TROUBLES) if chance.random() < 0.4 else Trouble() for _ in range(6)))
    storm.fake.list_faults.extend(chance.choice(LIST_FAULTS) for _ in range(chance.randrange(3)))


def weathered(myelin, tmp_path: Path, step: str, seed: int) -> None:
    """One storm: a run that is killed at ``step``, then restarted or not, then cleaned up."""
    with service(tmp_path / "machines") as fake:
        storm = Storm(myelin, tmp_path, fake, random.Random(seed))
        if step != "loading":
            weather(storm)
        storm.kill_at(step)
        storm.check()
        if storm.chance.random() < 0.5:
            again = storm.start(max_tokens=200)  # long enough for the workers to be looked at
            _, err = again.communicate(timeout=90)
            assert again.returncode in (0, 1), err
            assert "Traceback" not in err, err
            storm.check()
        fake.list_faults.clear()
        done = myelin.run("gc", "--json", **storm.environment)
        assert done.code == 0, done.err
        assert fake.live() == []
        storm.check()


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("step", "seed"), [("after create", 1), ("serving", 3), ("after intent", 4)])
def test_a_storm_leaves_nothing_rented(myelin, tmp_path, step, seed):
    weathered(myelin, tmp_path, step, seed)


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(100, 130))
def test_thirty_storms_leave_nothing_rented(myelin, tmp_path, seed):
    weathered(myelin, tmp_path, STEPS[seed % len(STEPS)], seed)


@pytest.mark.timeout(120)
def test_a_restarted_orchestrator_takes_up_the_machines_of_the_killed_one(myelin, tmp_path):
    with service(tmp_path / "machines") as fake:
        storm = Storm(myelin, tmp_path, fake, random.Random(0), ssh_timeout_s=90)
        storm.environment["MYELIN_RUNTIME_DEAD_MAN_S"] = "100"  # which a restart doesn't take on any machine
        process = storm.start(max_tokens=200)
        assert process.stdout is not None
        process.stdout.read(1)
        process.kill()
        process.wait()
        left = sorted(each.pid for each in storm.inside() if is_worker(each))
        assert len(left) == NODES, "workers outlive their orchestrator for a while"
        again = storm.start(max_tokens=200)
        seen: set[int] = set()
        while True:
            seen |= {each.pid for each in storm.inside() if is_worker(each)}
            with suppress(subprocess.TimeoutExpired):
                _, err = again.communicate(timeout=0.05)
                break
        assert again.returncode == 0, err
        assert sorted(seen) == left, "no other worker was started"
        assert len(fake.rented) == NODES, "nothing is rented anew"
        assert fake.live() == []
