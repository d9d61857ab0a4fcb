"""A GGUF writer that can also write what no writer should, and files in memory."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from myelin.model.gguf import ValueType

_FORMS = {
    ValueType.UINT8: "<B",
    ValueType.INT8: "<b",
    ValueType.UINT16: "<H",
    ValueType.INT16: "<h",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<B",
    ValueType.UINT64: "<Q",
    ValueType.INT64: "<q",
    ValueType.FLOAT64: "<d",
}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: ValueType, item: object) -> bytes:
    """The bytes of a scalar or string value, without its type."""
    if kind is ValueType.STRING:
        assert isinstance(item, str | bytes)
        return string(item)
    return struct.pack(_FORMS[kind], item)


def elements(kind: ValueType, items: Sequence[object], count: int | None = None) -> bytes:
    """The bytes of an array value, without its type; ``count`` may lie."""
    body = b"".join(value(kind, item) for item in items)
    return struct.pack("<IQ", kind, len(items) if count is None else count) + body


@dataclass
class Header:
    """A header in the making; every part of it may be replaced by bytes that lie."""

    keys: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    alignment: int = 32
    version: int = 3
    magic: bytes = b"GGUF"
    key_count: int | None = None
    tensor_count: int | None = None

    def raw_key(self, name: str | bytes, kind: int, body: bytes) -> Header:
        self.keys.append(string(name) + struct.pack("<I", kind) + body)
        return self

    def key(self, name: str | bytes, kind: ValueType, item: object) -> Header:
        return self.raw_key(name, kind, value(kind, item))

    def text(self, name: str, item: str | bytes) -> Header:
        return self.key(name, ValueType.STRING, item)

    def u32(self, name: str, item: int) -> Header:
        return self.key(name, ValueType.UINT32, item)

    def f32(self, name: str, item: float) -> Header:
        return self.key(name, ValueType.FLOAT32, item)

    def array(self, name: str, kind: ValueType, items: Sequence[object], count: int | None = None) -> Header:
        return self.raw_key(name, ValueType.ARRAY, elements(kind, items, count))

    def tensor(
        self, name: str | bytes, extents: Sequence[int], kind: int = 0, offset: int = 0, dimensions: int | None = None
    ) -> Header:
        """``extents`` are GGUF's, the fastest first."""
        count = len(extents) if dimensions is None else dimensions
        self.tensors.append(string(name) + struct.pack(f"<I{len(extents)}QIQ", count, *extents, kind, offset))
        return self

    def bytes(self) -> bytes:
        head = self.magic + struct.pack(
            "<IQQ",
            self.version,
            len(self.tensors) if self.tensor_count is None else self.tensor_count,
            len(self.keys) if self.key_count is None else self.key_count,
        )
        front = head + b"".join(self.keys) + b"".join(self.tensors)
        return front + bytes(-len(front) % self.alignment) + self.data


class MemoryFile:
    """A byte source over bytes; notes what was read."""

    def __init__(self, data: bytes, name: str = "memory.gguf", size: int | None = None) -> None:
        self.data = data
        self.name = name
        self.size = len(data) if size is None else size
        self.reads: list[tuple[int, int]] = []

    def read_at(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        assert offset + length <= self.size, "a reader asked for bytes beyond the end"
        return self.data[offset : offset + length].ljust(length, b"\0")

    def close(self) -> None:
        pass


def plain_header() -> Header:
    """A small, correct file with a key of each type and three tensors."""
    header = Header()
    header.text("general.architecture", "llama").u32("general.alignment", 32)
    for kind in _FORMS:
        header.key(f"scalar.{kind.name}", kind, 1)
        header.array(f"array.{kind.name}", kind, [0, 1, 1])
    header.array("array.STRING", ValueType.STRING, ["", "ä", b"\xff\xfe"])
    header.array("array.empty", ValueType.STRING, [])
    header.tensor("first", [64, 2], 0, 0).tensor("second", [32], 0, 512).tensor("third", [64, 4], 8, 640)
    header.data = bytes(640 + 4 * 2 * 34)
    return header


@pytest.fixture
def new_header() -> type[Header]:
    """The builder."""
    return Header


@pytest.fixture
def plain() -> Callable[[], Header]:
    """Makes a small, correct file."""
    return plain_header


@pytest.fixture
def memory_file() -> type[MemoryFile]:
    """A byte source over bytes."""
    return MemoryFile
