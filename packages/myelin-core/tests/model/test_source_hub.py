"""The ``hf:`` source, through the Hub's own client, against a hub on loopback."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import SecretStr

from myelin.builtins.source_hub import myelin_model_source
from myelin.errors import ModelError, UsageError
from myelin.model.remote.fetch import ShardFetch
from myelin.model.shard import ByteRange
from myelin.model.source import ModelSource, SourceOptions
from myelin_testkit.hub import FakeHub, Fault

DATA = random.Random(8).randbytes(300_000)
URI = "hf:someone/model/sub/model.gguf"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    sleep = time.sleep
    monkeypatch.setattr("time.sleep", lambda seconds: sleep(min(seconds, 0.02)))
    with FakeHub() as hub:
        yield hub


def source(hub: FakeHub, cache: Path, uri: str = URI, **options: object) -> ModelSource:
    found = myelin_model_source(uri, SourceOptions(cache, hub_endpoint=hub.url, **options))  # type: ignore[arg-type]  # any
    assert found is not None
    return found


def content(opened: ModelSource) -> bytes:
    files = opened.open()
    data = b"".join(file.read_at(0, file.size) for file in files)
    for file in files:
        file.close()
    return data


def test_a_branch_becomes_a_commit_once_opened(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.add("someone/model", "sub/model.gguf", DATA)
    opened = source(hub, tmp_path)
    assert opened.uri == f"{URI}@main"
    assert content(opened) == DATA
    assert opened.uri == f"{URI}@{commit}"


def test_a_node_gets_the_commit_whatever_the_branch_does(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    opened = source(hub, tmp_path / "orchestrator")
    content(opened)
    hub.add("someone/model", "sub/model.gguf", DATA[::-1])
    assert content(source(hub, tmp_path / "node", opened.uri)) == DATA
    assert content(source(hub, tmp_path / "other")) == DATA[::-1]


def test_a_commit_in_the_cache_needs_no_hub(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.add("someone/model", "sub/model.gguf", DATA)
    content(source(hub, tmp_path))
    before = len(hub.seen)
    assert content(source(hub, tmp_path, f"{URI}@{commit}")) == DATA
    assert content(source(hub, tmp_path, offline=True)) == DATA
    assert len(hub.seen) == before


def test_offline_without_a_copy_says_so_and_sends_nothing(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        content(source(hub, tmp_path, offline=True))
    assert caught.value.reason == "model-offline"
    assert hub.seen == []


def test_the_token_goes_to_the_hub_and_not_to_the_store(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    hub.gate("someone/model", "hf_secret")
    assert content(source(hub, tmp_path, token=SecretStr("hf_secret"))) == DATA
    by_server = {name: [r for r in hub.seen if r.server == name] for name in ("hub", "store")}
    assert any(request.headers.get("authorization") == "Bearer hf_secret" for request in by_server["hub"])
    assert by_server["store"]
    assert all("authorization" not in request.headers for request in by_server["store"])


def test_without_a_token_none_is_sent(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_from_elsewhere")
    hub.add("someone/model", "sub/model.gguf", DATA)
    content(source(hub, tmp_path))
    assert all("authorization" not in request.headers for request in hub.seen)


@pytest.mark.parametrize("token", [None, SecretStr("hf_wrong")])
def test_a_gated_repository_says_what_to_do(hub: FakeHub, tmp_path: Path, token: SecretStr | None) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    hub.gate("someone/model", "hf_right")
    with pytest.raises(ModelError, match="gated") as caught:
        content(source(hub, tmp_path, token=token))
    assert caught.value.reason == "model-denied"
    assert "HF_TOKEN" in caught.value.hint
    assert "hf_wrong" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("hf:nobody/model/model.gguf", "nobody/model"),
        ("hf:someone/model/other.gguf", "other.gguf"),
        (f"{URI}@v9", "v9"),
        (f"{URI}@{'0' * 40}", "0" * 12),
    ],
)
def test_what_is_not_there_is_named(hub: FakeHub, tmp_path: Path, uri: str, named: str) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    with pytest.raises(ModelError) as caught:
        content(source(hub, tmp_path, uri))
    assert named in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.reason == "model-missing"


@pytest.mark.parametrize(
    "fault", [Fault(cut_after=100_000), Fault(status=503), Fault(status=429, retry_after=0), Fault(status=500)]
)
def test_a_stumbling_store_is_asked_again(hub: FakeHub, tmp_path: Path, fault: Fault) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    hub.fail(fault, fault)
    assert content(source(hub, tmp_path)) == DATA


def test_a_stumbling_hub_is_asked_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    hub.fail_hub(Fault(status=503), Fault(status=503))
    assert content(source(hub, tmp_path)) == DATA


def test_a_store_that_never_answers_well_ends_in_an_error(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    hub.fail(*[Fault(status=503)] * 100)
    with pytest.raises(ModelError, match="503") as caught:
        content(source(hub, tmp_path))
    assert caught.value.reason == "model-fetch"


def test_a_commit_is_asked_about_once_and_its_bytes_come_once(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.add("someone/model", "sub/model.gguf", DATA)
    assert content(source(hub, tmp_path)) == DATA
    assert [request.method for request in hub.seen] == ["HEAD", "GET"]
    for _ in range(2):
        assert content(source(hub, tmp_path, f"{URI}@{commit}")) == DATA
    assert len(hub.seen) == 2
    assert hub.served == len(DATA)


def test_a_file_that_two_commits_share_is_kept_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    content(source(hub, tmp_path))
    hub.add("someone/model", "README.md", b"news")
    opened = source(hub, tmp_path)
    assert content(opened) == DATA
    assert hub.served == len(DATA)


def test_a_store_address_that_is_over_is_asked_for_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    (file,) = source(hub, tmp_path).open()
    assert file.read_at(0, 1000) == DATA[:1000]
    for status in (401, 403, 404, 410):
        hub.fail(Fault(status=status))
        start = status * 100
        assert file.read_at(start, 1000) == DATA[start : start + 1000]
    assert len(hub.gets("hub")) == 4
    hub.fail(Fault(status=403), Fault(status=403))
    with pytest.raises(ModelError) as caught:
        file.read_at(100_000, 1000)
    assert caught.value.reason == "model-denied"
    file.close()


def test_a_file_that_changes_behind_a_commit_is_one_clear_error(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    (file,) = source(hub, tmp_path).open()
    file.read_at(0, 1000)
    hub.swap("someone/model", "sub/model.gguf", DATA[::-1])
    with pytest.raises(ModelError) as caught:
        file.read_at(5000, 1000)
    assert caught.value.reason == "model-changed"
    file.close()


@pytest.mark.parametrize("at", [0, 150_000, -1])
def test_a_byte_that_flips_on_the_way_is_noticed_once_the_file_is_whole(hub: FakeHub, tmp_path: Path, at: int) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    hub.fail(Fault(flip_at=at))
    (file,) = source(hub, tmp_path).open()
    fetch = ShardFetch((file,), [ByteRange(0, 0, len(DATA))], lambda *_: None)
    with pytest.raises(ModelError, match="SHA-256") as caught:
        fetch.wait()
    assert caught.value.reason == "model-corrupt"
    file.close()
    (file,) = source(hub, tmp_path).open()
    ShardFetch((file,), [ByteRange(0, 0, len(DATA))], lambda *_: None).wait()
    assert file.read_at(0, len(DATA)) == DATA
    file.close()


def test_an_unchanged_file_is_compared_with_its_checksum_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    (file,) = source(hub, tmp_path).open()
    ShardFetch((file,), [ByteRange(0, 0, len(DATA))], lambda *_: None).wait()
    file.close()
    assert len(list(tmp_path.rglob("verified"))) == 1


# The Hub's own cache


def in_hub_cache(folder: Path, commit: str, data: bytes) -> None:
    place = folder / "models--someone--model"
    file = place / "snapshots" / commit / "sub" / "model.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)


def test_a_file_in_the_hubs_own_cache_is_used_where_it_lies(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.add("someone/model", "sub/model.gguf", DATA)
    in_hub_cache(tmp_path / "hub", commit, DATA)
    opened = source(hub, tmp_path / "ours", f"{URI}@{commit}", hub_cache_dir=tmp_path / "hub")
    assert content(opened) == DATA
    assert hub.seen == []
    opened = source(hub, tmp_path / "ours", hub_cache_dir=tmp_path / "hub")
    assert content(opened) == DATA
    assert opened.uri == f"{URI}@{commit}"
    assert hub.served == 0
    opened = source(hub, tmp_path / "ours", hub_cache_dir=tmp_path / "hub", offline=True)
    assert content(opened) == DATA
    hub.fail_hub(*[Fault(status=503)] * 20)
    assert content(source(hub, tmp_path / "ours", hub_cache_dir=tmp_path / "hub")) == DATA
    assert not (tmp_path / "ours" / "files").exists()


def test_an_older_commit_in_the_hubs_own_cache_is_not_taken_for_the_branch(hub: FakeHub, tmp_path: Path) -> None:
    in_hub_cache(tmp_path / "hub", hub.add("someone/model", "sub/model.gguf", DATA), DATA)
    hub.add("someone/model", "sub/model.gguf", DATA[::-1])
    assert content(source(hub, tmp_path / "ours", hub_cache_dir=tmp_path / "hub")) == DATA[::-1]


def test_a_hub_that_cannot_be_reached_is_told_once(tmp_path: Path) -> None:
    """The Hub's client tells of each attempt by itself; we tell that we fetch, and what came of it."""
    source = (
        "import sys, time; from pathlib import Path; from myelin.builtins.source_hub import myelin_model_source; "
        "from myelin.model.source import SourceOptions; from myelin.errors import ModelError\n"
        "time.sleep = lambda seconds: None\n"
        "options = SourceOptions(Path(sys.argv[1]), hub_endpoint='http://127.0.0.1:9')\n"
        "try: myelin_model_source('hf:a/b/c.gguf', options).open(lambda done, total: print(done, total))\n"
        "except ModelError as error: print(error.message)"
    )
    found = subprocess.run(
        [sys.executable, "-c", source, str(tmp_path)], capture_output=True, text=True, timeout=150, check=False
    )
    assert found.stderr == ""
    first, last = found.stdout.splitlines()
    assert first == "0 0"
    assert last.startswith("the Hub can't be reached for a/b/c.gguf")


def test_all_parts_of_a_split_model_come_from_one_commit(hub: FakeHub, tmp_path: Path) -> None:
    for number, part in enumerate((DATA[:1000], DATA[1000:5000], DATA[5000:]), 1):
        hub.add("someone/split", f"m-{number:05d}-of-00003.gguf", part)
    assert content(source(hub, tmp_path, "hf:someone/split/m-00001-of-00003.gguf")) == DATA
    with pytest.raises(ModelError, match="part 3 of 3"):
        content(source(hub, tmp_path, "hf:someone/split/m-00003-of-00003.gguf"))


OPEN_SCRIPT = """
import sys
from pathlib import Path
from myelin.builtins.source_hub import myelin_model_source
from myelin.model.source import SourceOptions
(file,) = myelin_model_source(sys.argv[1], SourceOptions(Path(sys.argv[2]), hub_endpoint=sys.argv[3])).open()
print(sum(file.read_at(0, file.size)))
file.close()
"""


def test_processes_that_want_the_same_file_all_get_it(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("someone/model", "sub/model.gguf", DATA)
    # Pythons of their own: one that is forked off would have the locks of this one's threads, but not the threads.
    words = [sys.executable, "-c", OPEN_SCRIPT, URI, str(tmp_path), hub.url]
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(subprocess.run, words, capture_output=True, text=True, timeout=150, check=False)
            for _ in range(2)
        ]
    assert [(run.result().stdout, run.result().stderr) for run in runs] == [(f"{sum(DATA)}\n", "")] * 2


@pytest.mark.parametrize(
    "uri",
    [
        "hf:",
        "hf:model.gguf",
        "hf:owner/model.gguf",
        "hf:owner/model/file.bin",
        "hf:owner/model/../../file.gguf",
        "hf:owner/model/file.gguf@",
        "hf:owner/model/file.gguf@a b",
    ],
)
def test_misspelt_names_are_usage_errors(uri: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        myelin_model_source(uri, SourceOptions(tmp_path))
    assert "hf:owner/repository/file.gguf" in caught.value.hint


def test_the_usual_spellings_are_read(tmp_path: Path) -> None:
    options = SourceOptions(tmp_path)
    for spelling in ("hf:o/r/f.gguf", "hf://o/r/f.gguf", "hf:o/r/f.gguf@main"):
        found = myelin_model_source(spelling, options)
        assert found is not None
        assert found.uri == "hf:o/r/f.gguf@main"
    assert myelin_model_source("/a/hf:b.gguf", options) is None
    assert myelin_model_source("https://huggingface.co/o/r/resolve/main/f.gguf", options) is None
