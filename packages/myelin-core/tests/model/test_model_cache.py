"""The cache's files with holes: journal, locks, checksums, listing and pruning."""

from __future__ import annotations

import multiprocessing
import os
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import ModelError
from myelin.model.remote import store as store_module
from myelin.model.remote.cache import ModelCache
from myelin.model.remote.http import Address, Answer
from myelin.model.remote.journal import RECORD_BYTES, Kind, Record, records
from myelin.model.remote.store import CELL_BYTES, About, CacheFile

SIZE = 3 * CELL_BYTES + 1000
ABOUT = About("https://example.org/m.gguf", "m.gguf", '"v1"', SIZE)
DATA = random.Random(3).randbytes(SIZE)


def put(store: CacheFile, start: int, end: int, data: bytes = DATA) -> None:
    claim = store.claim(start, end)
    assert claim == (start, end)
    store.write(start, data[start:end])
    store.note(start, end, zlib.crc32(data[start:end]))
    store.release(start, end)


def read(store: CacheFile, start: int, end: int) -> bytes:
    target = bytearray(end - start)
    store.read_into(start, memoryview(target))
    return bytes(target)


def test_a_cache_file_has_the_full_size_and_holds_only_what_was_put(tmp_path: Path) -> None:
    store = CacheFile(tmp_path, ABOUT)
    put(store, 5000, 9000)
    assert store.path.stat().st_size == SIZE
    assert store.path.stat().st_blocks * 512 < 100_000
    assert store.missing(0, SIZE) == [(0, 5000), (9000, SIZE)]
    assert read(store, 5000, 9000) == DATA[5000:9000]
    store.close()


def test_another_process_and_a_later_one_see_what_is_there(tmp_path: Path) -> None:
    one, other = CacheFile(tmp_path, ABOUT), CacheFile(tmp_path, ABOUT)
    put(one, 0, 4000)
    assert other.missing(0, 4000)
    other.refresh()
    assert not other.missing(0, 4000)
    one.close()
    other.close()
    later = CacheFile(tmp_path, ABOUT)
    assert later.missing(0, SIZE) == [(4000, SIZE)]
    assert later.checked(0, 4000)
    later.close()


def test_a_cell_is_claimed_by_one_alone(tmp_path: Path) -> None:
    one, other = CacheFile(tmp_path, ABOUT), CacheFile(tmp_path, ABOUT)
    assert one.claim(CELL_BYTES + 5, CELL_BYTES + 9) == (CELL_BYTES + 5, CELL_BYTES + 9)
    assert one.claim(CELL_BYTES, CELL_BYTES + 1) is None
    assert other.claim(CELL_BYTES, CELL_BYTES + 1) is None
    assert other.claim(0, SIZE) == (0, CELL_BYTES)  # as far as nobody else is at it
    other.release(0, CELL_BYTES)
    one.release(CELL_BYTES + 5, CELL_BYTES + 9)
    assert other.claim(0, SIZE) == (0, SIZE)
    one.close()
    other.close()


def _claim_and_die(folder: Path) -> None:
    CacheFile(folder, ABOUT).claim(0, SIZE)
    os._exit(9)


def test_claims_end_with_their_process(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_claim_and_die, args=(tmp_path,))
    process.start()
    process.join()
    store = CacheFile(tmp_path, ABOUT)
    assert store.claim(0, SIZE) == (0, SIZE)
    store.close()


@pytest.mark.parametrize("at", [5000, 6500, 8999])
def test_bytes_that_changed_on_disk_are_fetched_again_and_never_used(tmp_path: Path, at: int) -> None:
    store = CacheFile(tmp_path, ABOUT)
    put(store, 0, 5000)
    put(store, 5000, 9000)
    store.close()
    with store.path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([DATA[at] ^ 1]))
    later = CacheFile(tmp_path, ABOUT)
    assert later.checked(0, 5000)
    assert not later.checked(at, at + 1)
    assert later.missing(0, 9000) == [(5000, 9000)]
    put(later, 5000, 9000)
    assert later.checked(0, 9000)
    later.close()
    last = CacheFile(tmp_path, ABOUT)
    assert not last.missing(0, 9000)
    assert last.checked(0, 9000)
    last.close()


@given(cut=st.integers(0, 3 * RECORD_BYTES), noise=st.binary(max_size=3 * RECORD_BYTES))
def test_a_damaged_journal_claims_nothing_that_is_not_there(cut: int, noise: bytes) -> None:
    written = [Record(Kind.THERE, 1000 * n, 1000 * (n + 1), n) for n in range(3)]
    data = b"".join(record.pack() for record in written)[:cut] + noise
    found = list(records(data, SIZE))
    assert all(record in written for record in found)
    assert found[: cut // RECORD_BYTES] == written[: cut // RECORD_BYTES]


def test_a_record_that_was_cut_costs_itself_alone(tmp_path: Path) -> None:
    store = CacheFile(tmp_path, ABOUT)
    put(store, 0, 1000)
    put(store, 1000, 2000)
    store.close()
    journal = tmp_path / "journal"
    journal.write_bytes(journal.read_bytes()[:-5])
    later = CacheFile(tmp_path, ABOUT)
    assert later.missing(0, 2000) == [(1000, 2000)]
    put(later, 1000, 2000)
    later.close()
    last = CacheFile(tmp_path, ABOUT)
    assert not last.missing(0, 2000)
    last.close()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError) as caught:
        CacheFile(tmp_path / "file" / "x", ABOUT)
    assert caught.value.reason == "model-cache"


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    store = CacheFile(tmp_path, ABOUT)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(ModelError, match="still to come") as caught:
        store.check_space(2000)
    assert caught.value.reason == "model-cache"
    store.check_space(1000)
    monkeypatch.setattr(store_module.os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(ModelError, match="No space"):
        store.write(0, b"x")
    store.close()


# The folder of all


def opened(cache: ModelCache, name: str, etag: str = '"v"') -> CacheFile:
    answer = Answer(etag, SIZE)
    file = cache.open(None, Address(f"https://example.org/{name}"), f"https://example.org/{name}", name, answer)
    file.close()
    (entry,) = [entry for entry in cache.entries() if entry.about.name == name and entry.about.etag == etag]
    return CacheFile(entry.folder, entry.about)


def test_the_cache_lists_what_it_holds_and_prunes_the_longest_unused(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    assert cache.entries() == []
    for number, name in enumerate(("a.gguf", "b.gguf", "c.gguf")):
        store = opened(cache, name)
        put(store, 0, 1000 * (number + 1))
        store.close()
        for file in ("about.json", "journal"):
            os.utime(store.folder / file, (1000 + number, 1000 + number))
    assert [(entry.about.name, entry.held_bytes) for entry in cache.entries()] == [
        ("c.gguf", 3000),
        ("b.gguf", 2000),
        ("a.gguf", 1000),
    ]
    assert [entry.about.name for entry in cache.prune(keep_bytes=5000)] == ["a.gguf"]
    assert list(cache.prune(unused_for_s=1e12)) == []
    in_use = opened(cache, "c.gguf")
    assert [entry.about.name for entry in cache.prune()] == ["b.gguf"]
    in_use.close()
    assert [entry.about.name for entry in cache.prune()] == ["c.gguf"]
    assert cache.entries() == []


def test_two_versions_of_a_file_are_two_files(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    one, other = opened(cache, "a.gguf", '"1"'), opened(cache, "a.gguf", '"2"')
    put(one, 0, 1000)
    assert other.missing(0, 1000)
    one.close()
    other.close()


def test_what_a_server_said_is_remembered_without_its_signature(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    answer = Answer('"v"', 5, "0" * 64, "c" * 40, location="https://store/x?signature=secret")
    cache.remember("https://hub/x?token=secret", answer)
    recalled = cache.recall("https://hub/x?token=secret")
    assert recalled is not None
    assert (recalled.etag, recalled.size, recalled.commit, recalled.location) == ('"v"', 5, "c" * 40, "")
    assert cache.recall("https://hub/y") is None
    assert all("secret" not in path.read_text() + path.name for path in tmp_path.rglob("*.json"))
    for path in tmp_path.rglob("*.json"):
        path.write_text("{}")
    assert cache.recall("https://hub/x?token=secret") is None
