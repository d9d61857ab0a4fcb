"""The archive on a disk that is really full, half way: serving doesn't notice, whole lines stay, losses are counted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from myelin.telemetry.archive import ArchiveSink
from myelin.telemetry.hub import TelemetryHub
from myelin.telemetry.signals import Signal

DISK_BYTES = 64 << 10
REQUESTS = 200


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; skipped where this user may not mount one."""
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    if mount is None or unmount is None:
        pytest.skip("there is no mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    words = [mount, "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"a tmpfs may not be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([unmount, "--lazy", str(folder)], check=True, timeout=60)


def request_of(number: int) -> ExportTraceServiceRequest:
    """A request with one span, about 1 KB as a line."""
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    span.name, span.trace_id, span.span_id = f"span-{number} {'x' * 900}", b"t" * 16, b"s" * 8
    return request


def fill(path: Path) -> None:
    """Write until there is no room."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def names(path: Path) -> list[str]:
    """The spans' names without their padding; each line must be whole."""
    lines = path.read_text("utf-8").splitlines()
    spans = (json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0] for line in lines)
    return [span["name"].split()[0] for span in spans]


def test_a_disk_that_fills_up_holds_nobody_up_and_has_whole_lines(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "frames.jsonl"
    hub = TelemetryHub([ArchiveSink(path, name="telemetry-frame-log")])
    began = time.monotonic()
    for number in range(REQUESTS):
        hub.offer(Signal.TRACES, request_of(number))
    assert time.monotonic() - began < 30, "whoever tells of something waits for no disk"
    assert hub.close(60)
    kept = names(path)
    assert kept == [f"span-{number}" for number in range(len(kept))]
    assert 0.8 * DISK_BYTES < path.stat().st_size <= DISK_BYTES
    (lost,) = hub.losses()
    assert (lost.where, lost.signal, lost.count) == ("telemetry-frame-log", Signal.TRACES, REQUESTS - len(kept))
    assert [record.getMessage() for record in caplog.records] == [
        f"telemetry could not be written to {path}: {os.strerror(28)}"
    ]


def test_it_goes_on_once_there_is_room(small_disk: Path) -> None:
    path, ballast = small_disk / "frames.jsonl", small_disk / "ballast"
    sink = ArchiveSink(path)
    assert sink.export(Signal.TRACES, request_of(1))
    with pytest.raises(OSError, match="No space left"):
        fill(ballast)
    taken = [sink.export(Signal.TRACES, request_of(number)) for number in range(2, 20)]
    assert not taken[-1], "what is left of the last page takes three lines or so"
    ballast.unlink()
    assert sink.export(Signal.TRACES, request_of(20))
    sink.close()
    assert names(path) == ["span-1", *(f"span-{2 + i}" for i, whole in enumerate(taken) if whole), "span-20"]
