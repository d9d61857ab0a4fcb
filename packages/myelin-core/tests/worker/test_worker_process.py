"""Worker processes: what they say and where, and that they end, whatever happens to their parent."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from pydantic import SecretStr

from myelin.cluster.boot import PARENT_VARIABLE, boot_line, parse_announcement
from myelin.cluster.provider import BootSpec
from myelin.transport.contract import Endpoint
from myelin.values import Attempt, NodeId, RunId
from myelin.worker.control import Patience
from myelin.worker.logs import WorkerLog
from myelin.worker.main import ParentWatch, patience_from

PROGRAM = """
import sys
from myelin.worker.main import main_from_stdin
def registry():
    print("a library that prints")
    from myelin.plugins.registry import Registry
    return Registry.discover()
sys.exit(main_from_stdin(registry))
"""
ORDERLY = f"""
import atexit, sys
from myelin.worker.main import ParentWatch
ParentWatch.__init__.__kwdefaults__["grace_s"] = 100.0
atexit.register(lambda: sys.stderr.write('{{"event": "left in good order"}}\\n'))
{PROGRAM}
"""
"""The same, with more time for the end, and a last word that only a good one has."""
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and process groups of POSIX")


def boot(**changes: object) -> BootSpec:
    fields: dict[str, object] = {
        "run": RunId("run"),
        "node": NodeId("stage-0"),
        "attempt": Attempt(1),
        "secret": SecretStr("the secret of this run"),
        "environment": {"MYELIN_LOG_FORMAT": SecretStr("json")},
    }
    return BootSpec(**{**fields, **changes})  # type: ignore[arg-type]  # a table of fields


@contextmanager
def worker(line: bytes, program: str = PROGRAM) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process whose boot line was written."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()


def announced(process: subprocess.Popen[bytes]) -> Endpoint:
    """Where it says that it listens; what it said before is an error."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0], "no announcement"
    endpoint = parse_announcement(process.stdout.readline().decode())
    assert endpoint is not None
    return endpoint


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str, list[dict[str, object]]]:
    """Exit code, the rest of standard output, and the log's lines."""
    assert process.stdout is not None
    assert process.stderr is not None
    code = process.wait(60)
    lines = process.stderr.read().decode().splitlines()
    return code, process.stdout.read().decode(), [json.loads(line) for line in lines if line.startswith("{")]


def test_it_announces_itself_and_ends_on_sigterm() -> None:
    with worker(boot_line(boot())) as process:
        (address,) = announced(process).candidates
        assert address.startswith("127.0.0.1:")
        assert int(address.rpartition(":")[2]) > 0
        process.send_signal(signal.SIGTERM)
        code, output, log = ended(process)
        assert code == 0
        assert output == "", "standard output carries the announcement alone"
        assert [line["event"] for line in log] == ["listening", "stopping"]
        assert {line["node"] for line in log} == {"stage-0"}
        assert log[1]["reason"] == "a signal asked for it"


def test_it_ends_when_its_parent_closes_the_channel() -> None:
    with worker(boot_line(boot()), ORDERLY) as process:
        announced(process)
        assert process.stdin is not None
        process.stdin.close()
        code, _, log = ended(process)
        assert code == 1
        assert log[-2]["reason"] == "the parent is gone"
        assert log[-1]["event"] == "left in good order"


def test_it_ends_when_its_parent_is_gone_before_it_listens() -> None:
    with worker(boot_line(boot())) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert ended(process)[0] == 1


def test_it_survives_no_killed_parent() -> None:
    launcher = f"""
import os, subprocess, sys, time
environment = dict(os.environ, {PARENT_VARIABLE}=str(os.getpid()))
pipes = {{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}}
child = subprocess.Popen([sys.executable, "-c", {PROGRAM!r}], env=environment, **pipes)
child.stdin.write({boot_line(boot())!r}); child.stdin.flush()
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(150)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        assert parent.stdout is not None
        assert select.select([parent.stdout], [], [], 60)[0]
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 60
        while alive(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(child)
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped doesn't."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("line", [b"", b"not a boot line\n", b"{}\n"])
def test_a_bad_boot_line_is_said_in_two_lines(line: bytes) -> None:
    with worker(line) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.stderr is not None
        assert process.wait(60) == 1
        said = process.stderr.read().decode().splitlines()
        assert len(said) == 2
        assert "boot line" in said[0]


def test_an_address_in_use_is_said_and_ends_it() -> None:
    with worker(boot_line(boot())) as first:
        (address,) = announced(first).candidates
        with worker(boot_line(boot(bind=address))) as second:
            code, output, log = ended(second)
            assert (code, output) == (1, "")
            assert log[-1]["event"] == "failed"
            assert log[-1]["reason"] == "address-in-use"


def test_a_node_that_nobody_dials_ends() -> None:
    with worker(boot_line(boot(environment={"MYELIN_NODE_FIRST_DIAL_S": SecretStr("0.3")}))) as process:
        announced(process)
        code, _, log = ended(process)
        assert code == 1
        assert "nobody opened a control stream" in str(log[-1]["reason"])


def test_the_secret_is_nowhere_in_what_it_writes() -> None:
    with worker(boot_line(boot(transport="no-such-transport"))) as process:
        assert process.stderr is not None
        assert process.wait(60) == 1
        written = process.stderr.read().decode()
        assert "no-such-transport" in written
        assert "the secret of this run" not in written


# The parts.


def test_the_parent_watch_asks_then_leaves() -> None:
    read, write = os.pipe()
    told, left = threading.Event(), threading.Event()
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    watch = ParentWatch(read, grace_s=0.1, leave=leave)
    watch.tell(told.set)
    watch.start()
    os.write(write, b"whatever\n")
    assert not told.wait(0.1)
    os.close(write)
    assert told.wait(60)
    assert left.wait(60)
    assert codes == [1]
    os.close(read)
    late = threading.Event()
    watch.tell(late.set)
    assert late.is_set()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Patience(60.0, 30.0)),
        ({"MYELIN_NODE_FIRST_DIAL_S": "5", "MYELIN_NODE_DEAD_MAN_S": "7.5"}, Patience(5.0, 7.5)),
        ({"MYELIN_NODE_FIRST_DIAL_S": "soon", "MYELIN_NODE_DEAD_MAN_S": "-1"}, Patience(60.0, 30.0)),
        ({"MYELIN_NODE_FIRST_DIAL_S": "nan", "MYELIN_NODE_DEAD_MAN_S": "inf"}, Patience(60.0, 30.0)),
    ],
)
def test_patience_is_read_from_the_environment(environment: dict[str, str], expected: Patience) -> None:
    assert patience_from(environment) == expected


@pytest.mark.parametrize(
    ("now", "lost", "attached", "why"),
    [
        (59.0, None, False, ""),
        (60.0, None, False, "nobody opened a control stream within 60 s"),
        (1000.0, None, True, ""),
        (100.0, 80.0, False, ""),
        (110.0, 80.0, False, "the control stream has been lost for 30 s"),
        (110.0, 80.0, True, ""),
    ],
)
def test_patience(now: float, lost: float | None, attached: bool, why: str) -> None:
    assert Patience().exhausted(now=now, listening_since=0.0, lost_since=lost, attached=attached) == why


@pytest.mark.parametrize("form", ["json", "plain"])
def test_a_log_line_names_the_node_and_shows_the_traceback(form: str) -> None:
    stream = io.StringIO()
    log = WorkerLog({"node": "stage-3"}, {"MYELIN_LOG_FORMAT": form}, stream)
    log.info("listening", address="127.0.0.1:1")
    try:
        raise ValueError("a surprise")
    except ValueError as error:
        log.error("failed", error=error)
    written = stream.getvalue()
    assert written.count("stage-3") == 2
    assert "127.0.0.1:1" in written
    assert "ValueError: a surprise" in written
    if form == "json":
        first, second = map(json.loads, written.splitlines())
        assert (first["event"], first["level"]) == ("listening", "info")
        assert "Traceback" in second["exception"]
