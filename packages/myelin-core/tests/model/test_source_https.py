"""The ``https:`` source, against a server that misbehaves on purpose."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from myelin.builtins.source_https import myelin_model_source
from myelin.errors import ModelError, UsageError
from myelin.model.remote.fetch import ShardFetch
from myelin.model.remote.file import RemoteFile
from myelin.model.remote.http import origin
from myelin.model.remote.store import CELL_BYTES
from myelin.model.shard import ByteRange, ByteSource
from myelin.model.source import SourceOptions
from myelin_testkit.hub import FakeHub, Fault

DATA = random.Random(7).randbytes(3_000_000)
LARGE = random.Random(8).randbytes(5 * CELL_BYTES + 12_345)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts are for servers, not for tests."""
    monkeypatch.setattr("myelin.model.remote.http.LONGEST_WAIT_S", 0.02)


def open_files(uri: str, cache: Path, **options: object) -> tuple[ByteSource, ...]:
    source = myelin_model_source(uri, SourceOptions(cache, **options))  # type: ignore[arg-type]  # any option
    assert source is not None
    return source.open()


def open_bytes(uri: str, cache: Path, **options: object) -> bytes:
    files = open_files(uri, cache, **options)
    try:
        return b"".join(file.read_at(0, file.size) for file in files)
    finally:
        for file in files:
            file.close()


def ranges_of(hub: FakeHub) -> list[str | None]:
    """What was asked for, but for the one byte that tells what a file is."""
    asked = [request.headers.get("range") for request in hub.gets()]
    return [one for one in asked if one != "bytes=0-0"]


def test_a_file_comes_by_ranges_and_once(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("a/model.gguf", DATA)
    assert open_bytes(url, tmp_path) == DATA
    assert open_bytes(url, tmp_path) == DATA
    assert ranges_of(hub) == [f"bytes=0-{len(DATA) - 1}"]
    assert hub.served == len(DATA) + 2
    assert all(request.headers["accept-encoding"] == "identity" for request in hub.gets())
    assert all("if-range" in request.headers for request in hub.gets() if request.headers["range"] != "bytes=0-0")


def test_opening_a_file_brings_one_byte_and_reading_what_is_read(hub: FakeHub, tmp_path: Path) -> None:
    (file,) = open_files(hub.put("model.gguf", DATA), tmp_path)
    assert file.size == len(DATA)
    assert hub.served == 1
    assert file.read_at(1_000_000, 10) == DATA[1_000_000:1_000_010]
    assert file.read_at(1_000_005, 10) == DATA[1_000_005:1_000_015]
    assert file.read_at(7, 0) == b""
    assert hub.served == 1 + 15
    for offset, length in ((len(DATA) - 1, 2), (-1, 1)):
        with pytest.raises(ModelError, match="the file ends"):
            file.read_at(offset, length)
    file.close()
    file.close()
    with pytest.raises(ModelError):
        file.read_at(0, 10)


def test_a_body_cut_short_is_resumed_where_it_was_cut(hub: FakeHub, tmp_path: Path) -> None:
    (file,) = open_files(hub.put("model.gguf", DATA), tmp_path)
    hub.fail(Fault(cut_after=1_000_000), Fault(cut_after=500_000))
    assert file.read_at(0, len(DATA)) == DATA
    last = len(DATA) - 1
    assert ranges_of(hub) == [f"bytes=0-{last}", f"bytes=1000000-{last}", f"bytes=1500000-{last}"]
    file.close()


FAULTS = [
    Fault(ignore_range=True),
    Fault(wrong_range=True),
    Fault(status=429, retry_after=0),
    Fault(status=503),
    Fault(status=500),
    Fault(cut_after=0),
    Fault(cut_after=70_000),
    Fault(stall_s=0.1),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_server_answers_in_between_the_bytes_are_right(hub: FakeHub, tmp_path: Path, fault: Fault) -> None:
    (file,) = open_files(hub.put("model.gguf", LARGE), tmp_path)
    hub.fail(fault, fault)
    assert isinstance(file, RemoteFile)
    ranges = [ByteRange(0, 1000, 2 * CELL_BYTES), ByteRange(0, 3 * CELL_BYTES + 17, len(LARGE))]
    fetch = ShardFetch((file,), ranges, lambda done, total: None)
    fetch.wait()
    assert file.in_flight == 0
    for piece in ranges:
        assert file.read_at(piece.start, piece.end - piece.start) == LARGE[piece.start : piece.end]
    file.close()


def test_a_server_without_ranges_gives_the_whole_file_once(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", LARGE)
    hub.fail(Fault(ignore_range=True), Fault(ignore_range=True))
    (file,) = open_files(url, tmp_path)
    fetch = ShardFetch((file,), [ByteRange(0, 5, 9), ByteRange(0, 2 * CELL_BYTES, len(LARGE))], lambda *_: None)
    fetch.wait()
    assert file.read_at(0, len(LARGE)) == LARGE
    assert len(hub.gets()) == 2
    file.close()


def test_a_file_that_changes_while_it_comes_is_one_clear_error(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", LARGE)
    (file,) = open_files(url, tmp_path)
    assert file.read_at(0, 1000) == LARGE[:1000]
    other = LARGE[::-1]
    hub.put("model.gguf", other)
    with pytest.raises(ModelError) as caught:
        file.read_at(CELL_BYTES, 1000)
    assert caught.value.reason == "model-changed"
    fetch = ShardFetch((file,), [ByteRange(0, 2 * CELL_BYTES, len(LARGE))], lambda *_: None)
    with pytest.raises(ModelError) as caught:
        fetch.wait()
    assert caught.value.reason == "model-changed"
    file.close()
    assert open_bytes(url, tmp_path) == other


@pytest.mark.parametrize("change", [lambda data: data + b"more", lambda data: data[:1000], lambda data: data[:-1]])
def test_a_file_of_another_size_is_noticed(hub: FakeHub, tmp_path: Path, change: object) -> None:
    assert callable(change)
    url = hub.put("model.gguf", DATA)
    (file,) = open_files(url, tmp_path)
    hub.put("model.gguf", change(DATA))
    with pytest.raises(ModelError) as caught:
        file.read_at(500, len(DATA) - 500)
    assert caught.value.reason == "model-changed"
    file.close()
    assert open_bytes(url, tmp_path) == change(DATA)


def test_what_is_in_the_cache_serves_while_the_server_is_away(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", DATA)
    open_bytes(url, tmp_path)
    hub.fail(*[Fault(status=503)] * 9)
    assert open_bytes(url, tmp_path) == DATA
    assert open_bytes(url, tmp_path, offline=True) == DATA


def test_offline_gives_what_is_there_and_says_what_is_not(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", DATA)
    with pytest.raises(ModelError) as caught:
        open_files(url, tmp_path, offline=True)
    assert caught.value.reason == "model-offline"
    assert hub.seen == []
    (file,) = open_files(url, tmp_path)
    file.read_at(0, 1000)
    file.close()
    before = len(hub.seen)
    (file,) = open_files(url, tmp_path, offline=True)
    assert file.read_at(10, 900) == DATA[10:910]
    with pytest.raises(ModelError, match="switched off") as caught:
        file.read_at(0, 1001)
    assert caught.value.reason == "model-offline"
    assert len(hub.seen) == before
    file.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(status=404), "model-missing"),
        (Fault(status=401), "model-denied"),
        (Fault(status=403), "model-denied"),
        (Fault(status=418), "model-fetch"),
        (Fault(gzip=True), "model-fetch"),
    ],
)
def test_what_no_retry_mends_is_said_at_once(hub: FakeHub, tmp_path: Path, fault: Fault, reason: str) -> None:
    url = hub.put("model.gguf", DATA)
    hub.fail(fault)
    with pytest.raises(ModelError) as caught:
        open_bytes(url, tmp_path)
    assert caught.value.reason == reason
    assert caught.value.hint
    assert len(hub.gets()) == 1


def test_a_compressed_part_is_an_error(hub: FakeHub, tmp_path: Path) -> None:
    (file,) = open_files(hub.put("model.gguf", DATA), tmp_path)
    hub.fail(Fault(gzip=True))
    with pytest.raises(ModelError, match="compressed"):
        file.read_at(0, 100)
    file.close()


def test_failures_without_a_byte_in_between_come_to_an_end(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", DATA)
    hub.fail(*[Fault(status=503)] * 20)
    with pytest.raises(ModelError, match="503"):
        open_bytes(url, tmp_path)
    assert len(hub.gets()) == 5


@pytest.mark.parametrize("fault", [Fault(wrong_range=True), Fault(ignore_range=True), Fault(cut_after=0)])
def test_a_server_that_never_answers_well_is_one_error(hub: FakeHub, tmp_path: Path, fault: Fault) -> None:
    (file,) = open_files(hub.put("model.gguf", DATA), tmp_path)
    hub.fail(*[fault] * 40)
    with pytest.raises(ModelError) as caught:
        file.read_at(100, 1000)
    assert caught.value.reason == "model-fetch"
    assert len(hub.gets()) == 7
    file.close()


def test_nobody_there_is_an_error_in_two_lines(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        open_bytes("http://127.0.0.1:9/model.gguf", tmp_path)
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.reason == "model-fetch"


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(hub: FakeHub, tmp_path: Path) -> None:
    hub.put("model.gguf", DATA)
    options = {"token": SecretStr("hf_secret"), "hub_endpoint": hub.url}
    assert open_bytes(hub.redirect_url("model.gguf"), tmp_path, **options) == DATA
    assert hub.gets("hub")
    assert all(asked.headers["authorization"] == "Bearer hf_secret" for asked in hub.gets("hub"))
    assert all("authorization" not in served.headers for served in hub.gets("store"))


def test_the_token_does_not_go_to_other_hosts(hub: FakeHub, tmp_path: Path) -> None:
    open_bytes(hub.put("model.gguf", DATA), tmp_path, token=SecretStr("hf_secret"), hub_endpoint=hub.url)
    assert all("authorization" not in request.headers for request in hub.seen)


def test_all_parts_of_a_split_model_come(hub: FakeHub, tmp_path: Path) -> None:
    for number, part in enumerate((DATA[:1000], DATA[1000:5000], DATA[5000:]), 1):
        hub.put(f"m-{number:05d}-of-00003.gguf", part)
    assert open_bytes(hub.file_url("m-00001-of-00003.gguf"), tmp_path) == DATA
    with pytest.raises(ModelError, match="part 2 of 3"):
        open_bytes(hub.file_url("m-00002-of-00003.gguf"), tmp_path)


def test_files_of_one_name_from_two_places_stay_apart(hub: FakeHub, tmp_path: Path) -> None:
    one, other = hub.put("one/model.gguf", DATA), hub.put("other/model.gguf", DATA[:10])
    assert open_bytes(one, tmp_path) == DATA
    assert open_bytes(other, tmp_path) == DATA[:10]
    assert open_bytes(one, tmp_path, offline=True) == DATA


# Many at once


@contextmanager
def in_process(script: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A Python of its own: one that is forked off would have the locks of this one's threads, but not the threads."""
    command = [sys.executable, "-c", script, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


FETCH_SCRIPT = """
import hashlib, json, sys
from pathlib import Path
from myelin.builtins.source_https import myelin_model_source
from myelin.model.remote.fetch import ShardFetch
from myelin.model.shard import ByteRange
from myelin.model.source import SourceOptions
(file,) = myelin_model_source(sys.argv[1], SourceOptions(Path(sys.argv[2]))).open()
ranges = [ByteRange(*each) for each in json.loads(sys.argv[3])]
sys.stdin.readline()
ShardFetch((file,), ranges, lambda *_: None).wait()
print(json.dumps([hashlib.sha256(file.read_at(r.start, r.end - r.start)).hexdigest() for r in ranges]))
file.close()
"""


def test_processes_that_want_the_same_bytes_fetch_none_twice(hub: FakeHub, tmp_path: Path) -> None:
    """Stages of one host: a shared embedding, and layers of their own."""
    url = hub.put("model.gguf", LARGE)
    hub.bytes_per_s = 40e6
    shared = (0, 100, CELL_BYTES + 100)
    wanted = [
        [shared, (0, CELL_BYTES + 100, 2 * CELL_BYTES + 7)],
        [shared, (0, 2 * CELL_BYTES + 7, 4 * CELL_BYTES)],
        [shared, (0, 4 * CELL_BYTES, len(LARGE))],
    ]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(in_process(FETCH_SCRIPT, url, str(tmp_path), json.dumps(ranges))) for ranges in wanted
        ]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process, ranges in zip(processes, wanted, strict=True):
            out, _ = process.communicate(timeout=150)
            assert json.loads(out) == [hashlib.sha256(LARGE[first:end]).hexdigest() for _, first, end in ranges]
    assert hub.served == len(LARGE) - 100 + len(processes)  # and a byte each to ask what the file is


def test_readers_wait_for_their_own_bytes_alone(hub: FakeHub, tmp_path: Path) -> None:
    """Loading begins before the last byte is there."""
    (file,) = open_files(hub.put("model.gguf", LARGE), tmp_path)
    hub.bytes_per_s = 4e6
    seen: list[tuple[int, int]] = []
    fetch = ShardFetch((file,), [ByteRange(0, 0, len(LARGE))], lambda *told: seen.append(told), connections=2)
    assert file.read_at(0, 100_000) == LARGE[:100_000]
    assert not fetch.finished
    fetch.wait()
    assert seen[0] == (0, len(LARGE))
    assert seen[-1] == (len(LARGE), len(LARGE))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 5
    assert fetch.fetched_bytes == len(LARGE)
    assert isinstance(file, RemoteFile)
    assert file.in_flight == 0
    assert file.read_at(0, len(LARGE)) == LARGE
    file.close()


def test_readers_in_threads_and_the_fetch_agree(hub: FakeHub, tmp_path: Path) -> None:
    (file,) = open_files(hub.put("model.gguf", LARGE), tmp_path)
    fetch = ShardFetch((file,), [ByteRange(0, 0, len(LARGE))], lambda *_: None)
    right: list[bool] = []

    def read(seed: int) -> None:
        for _ in range(40):
            start = random.Random(seed).randrange(len(LARGE) - 9000)
            seed += 1
            right.append(file.read_at(start, 9000) == LARGE[start : start + 9000])

    threads = [threading.Thread(target=read, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fetch.wait()
    assert right == [True] * 160
    assert hub.served == len(LARGE) + 1
    file.close()


def test_a_fetch_that_nobody_wants_any_more_ends(hub: FakeHub, tmp_path: Path) -> None:
    (file,) = open_files(hub.put("model.gguf", LARGE), tmp_path)
    hub.bytes_per_s = 1e6
    fetch = ShardFetch((file,), [ByteRange(0, 0, len(LARGE))], lambda *_: None)
    refused: list[str] = []

    def read() -> None:
        try:
            file.read_at(0, len(LARGE))
        except ModelError as error:
            refused.append(error.reason)

    waiting = threading.Thread(target=read)
    waiting.start()
    began = time.monotonic()
    fetch.stop()
    waiting.join(60)
    assert refused == ["interrupted"]
    assert time.monotonic() - began < 50
    file.close()


def test_an_exception_of_whoever_shows_progress_ends_the_fetch(hub: FakeHub, tmp_path: Path) -> None:
    (file,) = open_files(hub.put("model.gguf", LARGE), tmp_path)

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    fetch = ShardFetch((file,), [ByteRange(0, 0, len(LARGE))], stop)
    with pytest.raises(KeyboardInterrupt):
        fetch.wait()
    file.close()
    assert open_bytes(hub.file_url("model.gguf"), tmp_path) == LARGE


MEMORY_SCRIPT = """
import sys
from pathlib import Path
from myelin.builtins.source_https import myelin_model_source
from myelin.model.remote.fetch import ShardFetch
from myelin.model.shard import ByteRange
from myelin.model.source import SourceOptions
def peak():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10
import httpx, tenacity
files = myelin_model_source(sys.argv[1], SourceOptions(Path(sys.argv[2]))).open()
files[0].read_at(0, 10)
before = peak()
fetch = ShardFetch(files, [ByteRange(0, 0, files[0].size)], lambda *_: None)
fetch.wait()
print(peak() - before, fetch.fetched_bytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_fetch_takes_little_memory(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", random.Random(1).randbytes(1 << 20) * 96)
    found = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, url, str(tmp_path)], capture_output=True, text=True, check=True
    )
    grown, fetched = map(int, found.stdout.split())
    assert fetched == (96 << 20) - 10
    assert grown < 64 << 20


# What else may go wrong


def test_a_full_disk_is_an_error_before_anything_is_written(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    (file,) = open_files(hub.put("model.gguf", DATA), tmp_path)
    monkeypatch.setattr("myelin.model.remote.store.shutil.disk_usage", lambda path: Usage)
    with pytest.raises(ModelError) as caught:
        file.read_at(0, len(DATA))
    assert caught.value.reason == "model-cache"
    with pytest.raises(ModelError) as caught:
        ShardFetch((file,), [ByteRange(0, 0, len(DATA))], lambda *_: None)
    assert caught.value.reason == "model-cache"
    assert hub.served == 1
    file.close()


def test_a_cache_that_is_no_folder_is_an_error(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError) as caught:
        open_bytes(hub.put("model.gguf", DATA), tmp_path / "file")
    assert caught.value.reason == "model-cache"


def test_messages_and_notes_leave_a_signature_out(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.file_url("gone.gguf") + "?signature=topsecret"
    with pytest.raises(ModelError) as caught:
        open_bytes(url, tmp_path)
    assert "topsecret" not in caught.value.message + caught.value.hint
    hub.put("here.gguf", DATA)
    open_bytes(hub.file_url("here.gguf") + "?signature=topsecret", tmp_path)
    assert all("topsecret" not in path.read_text() for path in tmp_path.rglob("*.json"))


def test_a_file_in_the_cache_has_its_own_name_and_offsets(hub: FakeHub, tmp_path: Path) -> None:
    (file,) = open_files(hub.put("some/model.gguf", DATA), tmp_path)
    assert isinstance(file, RemoteFile)
    assert file.name == "model.gguf"
    file.read_at(2_000_000, 500)
    (path,) = tmp_path.rglob("model.gguf")
    assert path.stat().st_size == len(DATA)
    assert path.read_bytes()[2_000_000:2_000_500] == DATA[2_000_000:2_000_500]
    file.close()


@pytest.mark.parametrize(
    "uri", ["https:", "https://", "https:///model.gguf", "https://user:secret@host/x.gguf", "http://example.org/x.gguf"]
)
def test_misspelt_addresses_are_usage_errors(uri: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        myelin_model_source(uri, SourceOptions(tmp_path))
    assert "secret" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("uri", ["/a/b.gguf", "hf:a/b/c.gguf", "pkg:a/b.gguf", "C:\\x.gguf", ""])
def test_other_spellings_are_left_to_others(uri: str, tmp_path: Path) -> None:
    assert myelin_model_source(uri, SourceOptions(tmp_path)) is None


def test_origin_knows_the_usual_ports() -> None:
    assert origin("https://Host/x") == origin("https://host:443/y")
    assert origin("http://host/x") != origin("https://host/x")
