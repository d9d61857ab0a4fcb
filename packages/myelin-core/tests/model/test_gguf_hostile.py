"""The header reader on damaged and malicious files: one error type, quickly, in bounded memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myelin.errors import ModelError
from myelin.model import gguf as reader
from myelin.model.gguf import ValueType, read_facts

Header = Any  # the builder and the file of conftest.py, which can't be imported
MemoryFile = Any

HUGE = (2**63, 2**64 - 1, 2**63 - 1, 2**40, 2**32, 2**31)
WITHIN_S = 2.0
WITHIN_BYTES = 64 << 20


def refused(file: MemoryFile, said: str = ".") -> ModelError:
    """Reading fails with the one error, in bounded time and memory."""
    tracemalloc.start()
    start = time.thread_time()
    try:
        with pytest.raises(ModelError, match=said) as caught:
            read_facts([file])
        took, (_, peak) = time.thread_time() - start, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took < WITHIN_S
    assert peak < WITHIN_BYTES + 3 * min(len(file.data), reader.MAX_HEADER_BYTES)
    assert caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    return caught.value


@pytest.mark.parametrize("count", HUGE)
def test_huge_counts(plain: Callable[[], Header], memory_file: MemoryFile, count: int) -> None:
    keys, tensors = plain(), plain()
    keys.key_count = tensors.tensor_count = count
    refused(memory_file(keys.bytes()), "keys")
    refused(memory_file(tensors.bytes()), "tensors")


def test_counts_that_would_fit_a_large_file_are_limited_too(
    plain: Callable[[], Header], memory_file: MemoryFile
) -> None:
    keys, tensors = plain(), plain()
    keys.key_count, tensors.tensor_count = reader.MAX_KEYS + 1, reader.MAX_TENSORS + 1
    refused(memory_file(keys.bytes(), size=1 << 40), "at most")
    refused(memory_file(tensors.bytes(), size=1 << 40), "at most")


@pytest.mark.parametrize("length", HUGE)
@pytest.mark.parametrize("size", [None, 1 << 40])
def test_huge_strings(new_header: Header, memory_file: MemoryFile, length: int, size: int | None) -> None:
    lie = struct.pack("<Q", length)
    value = new_header().raw_key("a.key", ValueType.STRING, lie)
    refused(memory_file(value.bytes(), size=size), r"key 'a\.key'")
    inside = new_header().raw_key("a.key", ValueType.ARRAY, struct.pack("<IQ", 8, 3) + struct.pack("<Q", 0) + lie)
    refused(memory_file(inside.bytes() + bytes(64), size=size), r"key 'a\.key'")
    name = new_header()
    name.keys.append(lie + b"name")
    refused(memory_file(name.bytes() + bytes(64), size=size), "name of key 0")
    tensor = new_header().text("general.architecture", "llama")
    tensor.tensors.append(lie + bytes(64))
    refused(memory_file(tensor.bytes(), size=size), "name of tensor 0")


@pytest.mark.parametrize("length", HUGE)
@pytest.mark.parametrize("kind", [kind for kind in ValueType if kind is not ValueType.ARRAY])
@pytest.mark.parametrize("size", [None, 1 << 42])
def test_huge_arrays(
    new_header: Header, memory_file: MemoryFile, kind: ValueType, length: int, size: int | None
) -> None:
    header = new_header().raw_key("an.array", ValueType.ARRAY, struct.pack("<IQ", kind, length) + bytes(32))
    refused(memory_file(header.bytes(), size=size), r"key 'an\.array'")


def test_nested_arrays_do_not_recurse(new_header: Header, memory_file: MemoryFile) -> None:
    nest = struct.pack("<IQ", ValueType.ARRAY, 1) * 100_000
    refused(memory_file(new_header().raw_key("nest", ValueType.ARRAY, nest).bytes()), "'nest' is an array of arrays")


@pytest.mark.parametrize(
    ("extents", "said"),
    [
        ((2**32, 2**32), "bytes, the file only"),
        ((2**33, 2**31, 2), "bytes, the file only"),
        ((2**63, 2**63, 2**63, 2**63), "bytes, the file only"),
        ((32, 0), "a dimension of 0"),
        ((0,), "a dimension of 0"),
        ((), "has 0 dimensions"),
        ((1, 1, 1, 1, 1), "has 5 dimensions"),
    ],
)
def test_impossible_dimensions(
    plain: Callable[[], Header], memory_file: MemoryFile, extents: tuple[int, ...], said: str
) -> None:
    refused(memory_file(plain().tensor("bad", extents, 0, 1024).bytes()), f"tensor 'bad' .*{said}")


def test_a_number_of_dimensions_that_lies(plain: Callable[[], Header], memory_file: MemoryFile) -> None:
    refused(memory_file(plain().tensor("bad", (4,), dimensions=2**32 - 1).bytes()), "'bad' has 4294967295 dimensions")


@pytest.mark.parametrize("kind", [2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39])
def test_rows_that_are_no_whole_blocks(plain: Callable[[], Header], memory_file: MemoryFile, kind: int) -> None:
    refused(memory_file(plain().tensor("bad", (33, 4), kind).bytes()), "'bad' has rows of 33 elements, not a multiple")


@pytest.mark.parametrize(("kind", "named"), [(4, "Q4_2"), (31, "Q4_0_4_4"), (38, "IQ4_NL_8_8"), (999, "999")])
def test_unknown_tensor_types_are_named(
    plain: Callable[[], Header], memory_file: MemoryFile, kind: int, named: str
) -> None:
    error = refused(memory_file(plain().tensor("blk.0.odd", (32, 4), kind).bytes()), r"tensor 'blk\.0\.odd'")
    assert named in error.message
    assert error.reason == "tensor-type"


@pytest.mark.parametrize("byte", [2, 7, 255])
def test_a_bool_is_0_or_1(new_header: Header, memory_file: MemoryFile, byte: int) -> None:
    refused(
        memory_file(new_header().key("flag", ValueType.BOOL, byte).bytes()), f"'flag' is a bool with the value {byte}"
    )
    array = new_header().array("flags", ValueType.BOOL, [0, 1, byte])
    refused(memory_file(array.bytes()), "'flags' is an array of bools")


@pytest.mark.parametrize("alignment", [0, 3, 33, 2**32 - 1])
def test_an_alignment_is_a_power_of_two(new_header: Header, memory_file: MemoryFile, alignment: int) -> None:
    header = new_header().text("general.architecture", "llama").u32("general.alignment", alignment)
    refused(memory_file(header.bytes()), f"'general.alignment' is {alignment}, not a power of two")


def test_an_enormous_alignment_reserves_nothing(plain: Callable[[], Header], memory_file: MemoryFile) -> None:
    header = plain()
    header.keys[1] = header.keys[1][:-4] + struct.pack("<I", 2**31)
    refused(memory_file(header.bytes()), "tensor")


@pytest.mark.parametrize(
    "kind", [kind for kind in ValueType if kind not in (ValueType.UINT32, ValueType.ARRAY, ValueType.STRING)]
)
def test_an_alignment_is_a_u32(new_header: Header, memory_file: MemoryFile, kind: ValueType) -> None:
    refused(memory_file(new_header().key("general.alignment", kind, 1).bytes()), "'general.alignment' is of type")


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "split.no",
        "split.count",
        "tokenizer.ggml.model",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.add_bos_token",
        "tokenizer.chat_template",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.scores",
    ],
)
def test_known_keys_of_a_wrong_type(new_header: Header, memory_file: MemoryFile, key: str) -> None:
    refused(memory_file(new_header().f32(key, 1.0).bytes()), f"key '{key}' is of type float32, not")
    if key not in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores"):
        refused(memory_file(new_header().array(key, ValueType.STRING, ["x"]).bytes()), f"key '{key}' is of type array")
    else:
        refused(memory_file(new_header().text(key, "x").bytes()), f"key '{key}' is of type string, not an array")


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("tokenizer.ggml.tokens", ValueType.UINT8),
        ("tokenizer.ggml.merges", ValueType.UINT32),
        ("tokenizer.ggml.scores", ValueType.UINT8),
        ("tokenizer.ggml.scores", ValueType.FLOAT64),
        ("tokenizer.ggml.token_type", ValueType.UINT8),
        ("tokenizer.ggml.token_type", ValueType.INT64),
        ("tokenizer.ggml.token_type", ValueType.STRING),
    ],
)
def test_vocabulary_arrays_of_other_elements(
    new_header: Header, memory_file: MemoryFile, key: str, kind: ValueType
) -> None:
    header = new_header().array(key, kind, ["x"] if kind is ValueType.STRING else [1])
    refused(memory_file(header.bytes()), f"key '{key}' is an array of {kind.name.lower()}, not of")


@pytest.mark.parametrize(
    ("key", "kind"), [("tokenizer.ggml.scores", ValueType.FLOAT32), ("tokenizer.ggml.token_type", ValueType.INT32)]
)
def test_vocabulary_arrays_of_other_lengths(
    new_header: Header, memory_file: MemoryFile, key: str, kind: ValueType
) -> None:
    header = new_header().array("tokenizer.ggml.tokens", ValueType.STRING, ["a", "b", "c"]).array(key, kind, [1, 2])
    refused(memory_file(header.bytes()), f"key '{key}' has 2 elements for 3 tokens")


def test_unknown_value_types(new_header: Header, memory_file: MemoryFile) -> None:
    refused(memory_file(new_header().raw_key("odd", 13, bytes(64)).bytes()), "'odd' is of unknown type 13")
    refused(
        memory_file(new_header().raw_key("odd", 9, struct.pack("<IQ", 77, 1) + bytes(64)).bytes()), "unknown type 77"
    )


def test_names_that_come_twice(plain: Callable[[], Header], memory_file: MemoryFile) -> None:
    refused(memory_file(plain().text("general.architecture", "qwen2").bytes()), "'general.architecture' appears twice")
    refused(memory_file(plain().tensor("first", [32], 0, 768).bytes()), "tensor 'first' appears twice")


def test_names_that_are_none(new_header: Header, memory_file: MemoryFile) -> None:
    refused(memory_file(new_header().u32("", 1).bytes()), "name of key 0 is empty")
    refused(memory_file(new_header().key(b"\xff\xfe", ValueType.UINT32, 1).bytes()), "name of key 0 is not UTF-8")
    refused(memory_file(new_header().tensor("", [32]).bytes() + bytes(128)), "name of tensor 0 is empty")
    refused(memory_file(new_header().tensor(b"\xff", [32]).bytes() + bytes(128)), "name of tensor 0 is not UTF-8")
    refused(
        memory_file(new_header().tensor("x" * 256, [32]).bytes() + bytes(128)), "name of tensor 0 has a string of 256"
    )


def test_names_in_messages_are_harmless(new_header: Header, memory_file: MemoryFile) -> None:
    error = refused(memory_file(new_header().raw_key("a\n\x1b[31m" + "b" * 5000, 13, b"").bytes() + bytes(99)))
    assert "\x1b" not in error.message


@pytest.mark.parametrize(
    ("offset", "said"),
    [
        (2**64 - 32, "ends at byte"),
        (2**63, "ends at byte"),
        (1024, "ends at byte"),
        (1001, "not a multiple of the alignment"),
        (0, "overlaps tensor"),
        (480, "overlaps tensor 'first'"),
    ],
)
def test_tensors_outside_the_file_or_in_each_other(
    plain: Callable[[], Header], memory_file: MemoryFile, offset: int, said: str
) -> None:
    refused(memory_file(plain().tensor("bad", [32], 0, offset).bytes()), f"tensor '(bad|first)' .*{said}")


@pytest.mark.parametrize("order", [">IQQ"])
def test_big_endian_files_are_named_as_such(memory_file: MemoryFile, order: str) -> None:
    error = refused(memory_file(b"GGUF" + struct.pack(order, 3, 0, 0) + bytes(64)), "big-endian")
    assert error.reason == "model-big-endian"


@pytest.mark.parametrize("version", [0, 1, 4, 99, 2**32 - 1])
def test_other_versions(memory_file: MemoryFile, version: int) -> None:
    refused(memory_file(b"GGUF" + struct.pack("<IQQ", version, 0, 0)), f"of GGUF version {version}")


@pytest.mark.parametrize(
    ("start", "hint"),
    [
        (b"", "Name a .gguf file"),
        (b"GGU", "Name a .gguf file"),
        (b"PK\x03\x04" + bytes(40), "zip"),
        (b"<!DOCTYPE html>" + bytes(40), "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:", "LFS"),
        (b"tjgg" + bytes(40), "old GGJT"),
    ],
)
def test_what_is_no_gguf(memory_file: MemoryFile, start: bytes, hint: str) -> None:
    error = refused(memory_file(start), "is not a GGUF file")
    assert error.reason == "not-gguf"
    assert hint in error.hint


def test_no_architecture(new_header: Header, memory_file: MemoryFile) -> None:
    refused(memory_file(new_header().u32("x", 1).bytes()), "'general.architecture' is missing")
    refused(memory_file(new_header().text("general.architecture", "").bytes()), "missing or empty")


def test_no_files_at_all() -> None:
    with pytest.raises(ModelError, match="no files"):
        read_facts([])


def test_a_header_that_never_ends(memory_file: MemoryFile, new_header: Header, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 1 << 20)
    long = new_header().raw_key("long", 9, struct.pack("<IQ", 0, 1 << 21))
    refused(memory_file(long.bytes(), size=1 << 30), "more than any header needs")


def test_strings_of_all_arrays_together_are_limited(
    memory_file: MemoryFile, new_header: Header, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_STRINGS", 100)
    header = new_header().array("one", ValueType.STRING, ["x"] * 60).array("two", ValueType.STRING, ["x"] * 60)
    refused(memory_file(header.bytes()), "'two' claims 60 strings")


def test_four_million_empty_strings_take_bounded_time(memory_file: MemoryFile, new_header: Header) -> None:
    count = reader.MAX_STRINGS
    header = new_header().raw_key("many", 9, struct.pack("<IQ", 8, count) + bytes(8 * count))
    file = memory_file(header.bytes())
    start = time.thread_time()
    with pytest.raises(ModelError, match="architecture"):
        read_facts([file])
    assert time.thread_time() - start < 5.0


def test_truncated_at_every_byte(plain: Callable[[], Header], memory_file: MemoryFile) -> None:
    whole = plain().bytes()
    assert read_facts([memory_file(whole)]).tensors
    for size in range(len(whole)):
        with pytest.raises(ModelError):
            read_facts([memory_file(whole[:size])])


def _damaged_file_gives_facts_or_the_error(data: bytes, memory_file: MemoryFile) -> None:
    start = time.thread_time()
    try:
        facts = read_facts([memory_file(data)])
    except ModelError:
        pass
    else:
        for tensor in facts.tensors.values():
            assert tensor.offset + tensor.nbytes <= len(data)
            assert tensor.row_bytes > 0
    assert time.thread_time() - start < WITHIN_S


@settings(max_examples=400, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=8))
def test_flipped_bytes(flips: list[tuple[int, int]]) -> None:
    data = bytearray(_PLAIN)
    for position, byte in flips:
        data[position % _PLAIN_HEADER] = byte
    _damaged_file_gives_facts_or_the_error(bytes(data), _MEMORY_FILE)


@settings(max_examples=200, deadline=None)
@given(
    at=st.integers(0, 1 << 16), number=st.sampled_from([*HUGE, 0, 1, 255, 65535]), width=st.sampled_from(["<I", "<Q"])
)
def test_numbers_replaced(at: int, number: int, width: str) -> None:
    raw = struct.pack(width, number % 2 ** (8 * struct.calcsize(width)))
    at %= _PLAIN_HEADER
    data = _PLAIN[:at] + raw + _PLAIN[at + len(raw) :]
    _damaged_file_gives_facts_or_the_error(data, _MEMORY_FILE)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 1 << 16), cut=st.integers(0, 64), put=st.binary(max_size=64))
def test_bytes_cut_out_and_put_in(at: int, cut: int, put: bytes) -> None:
    at %= _PLAIN_HEADER
    _damaged_file_gives_facts_or_the_error(_PLAIN[:at] + put + _PLAIN[at + cut :], _MEMORY_FILE)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_after_the_magic(body: bytes) -> None:
    _damaged_file_gives_facts_or_the_error(b"GGUF\3\0\0\0" + body, _MEMORY_FILE)


_PLAIN = b""
_PLAIN_HEADER = 1
_MEMORY_FILE: Any = None


@pytest.fixture(autouse=True)
def _small_file(plain: Callable[[], Header], memory_file: MemoryFile) -> None:
    """Hypothesis can't take fixtures of function scope into its tests; it finds them here."""
    global _PLAIN, _PLAIN_HEADER, _MEMORY_FILE
    if not _PLAIN:
        _PLAIN, _MEMORY_FILE = plain().bytes(), memory_file
        _PLAIN_HEADER = read_facts([memory_file(_PLAIN)]).parts[0].header_bytes
