"""The ``https:`` source and the downloader, against a server that misbehaves on purpose."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from myelin.builtins.source_https import myelin_model_source
from myelin.errors import ModelError, UsageError
from myelin.model.download import Download, fetch, origin
from myelin.model.source import SourceOptions
from myelin_testkit.hub import FakeHub, Fault

DATA = random.Random(7).randbytes(3_000_000)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts are for servers, not for tests."""
    monkeypatch.setattr("myelin.model.download.LONGEST_WAIT_S", 0.02)


def open_bytes(uri: str, cache: Path, **options: object) -> bytes:
    source = myelin_model_source(uri, SourceOptions(cache, **options))  # type: ignore[arg-type]  # any option
    assert source is not None
    files = source.open()
    data = b"".join(file.read_at(0, file.size) for file in files)
    for file in files:
        file.close()
    return data


def test_a_file_comes_whole_and_is_asked_about_with_its_etag_the_next_time(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("a/model.gguf", DATA)
    assert open_bytes(url, tmp_path) == DATA
    assert open_bytes(url, tmp_path) == DATA
    first, second = hub.gets()
    assert "if-none-match" not in first.headers
    assert second.headers["if-none-match"].startswith('"')
    assert first.headers["accept-encoding"] == "identity"


def test_progress_ends_at_the_whole_size(hub: FakeHub, tmp_path: Path) -> None:
    source = myelin_model_source(hub.put("model.gguf", DATA), SourceOptions(tmp_path))
    assert source is not None
    seen: list[tuple[int, int]] = []
    source.open(lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, len(DATA))
    assert seen[-1] == (len(DATA), len(DATA))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_body_cut_short_is_resumed_where_it_was_cut(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", DATA)
    hub.fail(Fault(cut_after=1_000_000), Fault(cut_after=500_000))
    assert open_bytes(url, tmp_path) == DATA
    ranges = [request.headers.get("range") for request in hub.gets()]
    assert ranges == [None, "bytes=1000000-", "bytes=1500000-"]


def test_a_fetch_that_was_given_up_is_resumed_by_the_next_process(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", DATA)
    hub.fail(Fault(cut_after=1_000_000), *[Fault(status=503)] * 6)
    with pytest.raises(ModelError, match="can't be fetched"):
        open_bytes(url, tmp_path)
    assert open_bytes(url, tmp_path) == DATA
    assert hub.gets()[-1].headers["range"] == "bytes=1000000-"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(ignore_range=True),
        Fault(wrong_range=True),
        Fault(status=429, retry_after=0),
        Fault(status=503),
        Fault(status=500),
        Fault(cut_after=0),
    ],
)
def test_whatever_answers_the_resumption_the_bytes_are_right(hub: FakeHub, tmp_path: Path, fault: Fault) -> None:
    url = hub.put("model.gguf", DATA)
    hub.fail(Fault(cut_after=1_000_000), fault)
    assert open_bytes(url, tmp_path) == DATA


def test_a_file_that_changes_while_it_comes_is_fetched_anew(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", DATA)
    hub.fail(Fault(cut_after=1_000_000), *[Fault(status=503)] * 6)
    with pytest.raises(ModelError):
        open_bytes(url, tmp_path)
    other = DATA[::-1]
    hub.put("model.gguf", other)
    assert open_bytes(url, tmp_path) == other


def test_a_file_that_changed_since_is_fetched_anew(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", DATA)
    open_bytes(url, tmp_path)
    hub.put("model.gguf", DATA[:1000])
    assert open_bytes(url, tmp_path) == DATA[:1000]


def test_the_copy_serves_while_the_server_is_away(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", DATA)
    open_bytes(url, tmp_path)
    hub.fail(*[Fault(status=503)] * 9)
    assert open_bytes(url, tmp_path) == DATA
    assert open_bytes(url, tmp_path, offline=True) == DATA


def test_offline_without_a_copy_says_so_and_sends_nothing(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        open_bytes(hub.put("model.gguf", DATA), tmp_path, offline=True)
    assert caught.value.reason == "model-offline"
    assert hub.seen == []


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


def test_failures_without_a_byte_in_between_come_to_an_end(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", DATA)
    hub.fail(*[Fault(status=503)] * 20)
    with pytest.raises(ModelError, match="503"):
        open_bytes(url, tmp_path)
    assert len(hub.gets()) == 6


def test_nobody_there_is_an_error_in_two_lines(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        open_bytes("http://127.0.0.1:9/model.gguf", tmp_path)
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.reason == "model-fetch"


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(hub: FakeHub, tmp_path: Path) -> None:
    hub.put("model.gguf", DATA)
    options = {"token": SecretStr("hf_secret"), "hub_endpoint": hub.url}
    assert open_bytes(hub.redirect_url("model.gguf"), tmp_path, **options) == DATA
    (asked,), (served,) = hub.gets("hub"), hub.gets("store")
    assert asked.headers["authorization"] == "Bearer hf_secret"
    assert "authorization" not in served.headers


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


def _open_in_process(url: str, cache: Path, results: multiprocessing.Queue[int]) -> None:
    results.put(sum(open_bytes(url, cache)))


def test_processes_that_want_the_same_file_fetch_it_once(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.put("model.gguf", DATA)
    hub.fail(Fault(stall_s=0.5))
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    processes = [context.Process(target=_open_in_process, args=(url, tmp_path, results)) for _ in range(3)]
    for process in processes:
        process.start()
    sums = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sums == [sum(DATA)] * 3
    assert sum("if-none-match" not in request.headers for request in hub.gets()) == 1


def test_a_full_disk_is_an_error_before_anything_is_written(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("myelin.model.download.shutil.disk_usage", lambda path: Usage)
    with pytest.raises(ModelError) as caught:
        open_bytes(hub.put("model.gguf", DATA), tmp_path)
    assert caught.value.reason == "model-cache"


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


def test_an_exception_of_whoever_shows_progress_frees_the_lock(hub: FakeHub, tmp_path: Path) -> None:
    download = Download(hub.put("model.gguf", DATA), tmp_path / "model.gguf")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(download, progress=stop)
    assert fetch(download).read_bytes() == DATA


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
