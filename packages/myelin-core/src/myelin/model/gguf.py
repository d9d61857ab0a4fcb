"""A bounded, fast reader of GGUF headers (versions 2 and 3, little-endian).

Nothing in the file is believed before it is checked: every length is compared with the bytes that are really there
before anything of that length is read or reserved, counts have limits, and whatever is wrong comes out as one
:class:`~myelin.errors.ModelError` that names the key or the tensor and says why. The file is read from the front in
growing pieces, so that a remote model can be planned from a few requests; string arrays (vocabularies) are located, not
decoded.

The format, as https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes it, all numbers little-endian::

    magic "GGUF", u32 version, u64 tensor count, u64 key count
    each key:     string name, u32 value type, value
    each tensor:  string name, u32 dimensions, u64 extents (fastest first), u32 type, u64 offset from the data's start
    padding to general.alignment (32 unless given), then the data

where a string is u64 bytes and those bytes, and an array is u32 element type, u64 count and the elements.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import numpy as np

from myelin.errors import ModelError
from myelin.model.facts import ModelFacts, PartInfo, TensorInfo
from myelin.model.quant import BLOCKS, RETIRED_TYPES, GgmlType
from myelin.model.shard import ByteSource
from myelin.model.strings import LENGTH_BYTES, StringArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Limits on what a header may ask of us. The largest real headers known to us are below 20 MiB (a vocabulary of 262,144
# tokens with its merges), with about 100 keys and a few thousand tensors.
MAX_HEADER_BYTES = 64 << 20
MAX_TEXT_BYTES = 16 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_STRINGS = 1 << 22
MAX_KEY_BYTES = 1 << 16
MAX_TENSOR_NAME_BYTES = 255
MAX_DIMENSIONS = 4

FIRST_READ = 1 << 20
SLACK_BYTES = 96 << 10
"""Read beyond where a header seems to end: a chat template, and what the estimate lacks."""
TENSOR_ENTRY_BYTES = 72
"""What a tensor takes in a header, by and large."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_PREAMBLE = struct.Struct("<4sIQQ")
_LEAST_KEY_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class ValueType(IntEnum):
    """The types of a header's values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_SCALARS: dict[int, struct.Struct] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}
_DTYPES: dict[int, np.dtype[np.generic]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("<u1"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}

_INTEGERS = frozenset(
    {
        ValueType.UINT8,
        ValueType.INT8,
        ValueType.UINT16,
        ValueType.INT16,
        ValueType.UINT32,
        ValueType.INT32,
        ValueType.UINT64,
        ValueType.INT64,
    }
)
_TEXT = frozenset({ValueType.STRING})
_FLAG = frozenset({ValueType.BOOL})

# Keys whose type we insist on: value types, or element types of arrays. A reader that trusts them would take the bytes
# of a narrower array for a wider one.
_KNOWN_SCALARS: dict[str, frozenset[ValueType]] = {
    "general.alignment": frozenset({ValueType.UINT32}),
    "general.architecture": _TEXT,
    "general.name": _TEXT,
    "split.no": _INTEGERS,
    "split.count": _INTEGERS,
    "split.tensors.count": _INTEGERS,
    "tokenizer.ggml.model": _TEXT,
    "tokenizer.ggml.pre": _TEXT,
    "tokenizer.ggml.bos_token_id": _INTEGERS,
    "tokenizer.ggml.eos_token_id": _INTEGERS,
    "tokenizer.ggml.eot_token_id": _INTEGERS,
    "tokenizer.ggml.eom_token_id": _INTEGERS,
    "tokenizer.ggml.unknown_token_id": _INTEGERS,
    "tokenizer.ggml.padding_token_id": _INTEGERS,
    "tokenizer.ggml.add_bos_token": _FLAG,
    "tokenizer.ggml.add_eos_token": _FLAG,
    "tokenizer.ggml.add_space_prefix": _FLAG,
    "tokenizer.chat_template": _TEXT,
}
_KNOWN_ARRAYS: dict[str, frozenset[ValueType]] = {
    "tokenizer.ggml.tokens": _TEXT,
    "tokenizer.ggml.merges": _TEXT,
    "tokenizer.ggml.scores": frozenset({ValueType.FLOAT32}),
    "tokenizer.ggml.token_type": frozenset({ValueType.INT32, ValueType.UINT32}),
}

_FOREIGN_BEGINNINGS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "It is a Git LFS pointer: fetch the file itself (git lfs pull)."),
    (b"<", "It looks like a web page: the download answered with a page instead of the file."),
    (b"PK\x03\x04", "It is a zip archive, perhaps a PyTorch checkpoint: convert it to GGUF first."),
    (b"lmgg", "It is in the old GGML format: convert it to GGUF first."),
    (b"fmgg", "It is in the old GGML format: convert it to GGUF first."),
    (b"tjgg", "It is in the old GGJT format: convert it to GGUF first."),
)


@dataclass(frozen=True, slots=True)
class PartHeader:
    """What one file's header says; tensors carry ``part`` as it was given to :func:`read_part`."""

    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    info: PartInfo


def read_facts(sources: Sequence[ByteSource]) -> ModelFacts:
    """Read the headers of a model's files, in order of their part numbers, and join them.

    Metadata is the first part's; a first part may hold nothing else. ``split.no`` counts from 0 although file names
    count from 1.

    Raises:
        ModelError: A header is damaged or malicious; a part is missing, doubled, or out of order; there is no
            ``general.architecture``.
    """
    if not sources:
        raise ModelError("the model has no files", "Name a .gguf file.", reason="model-missing")
    parts = [read_part(source, index) for index, source in enumerate(sources)]
    _check_split(parts)
    first = parts[0]
    architecture = first.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise _damaged(first.info.name, "key 'general.architecture'", "is missing or empty")
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                other = parts[tensors[name].part].info.name
                raise _damaged(part.info.name, f"tensor {_shown(name)}", f"is in {other} too")
            tensors[name] = tensor
    return ModelFacts(
        architecture=architecture,
        metadata=first.metadata,
        tensors=MappingProxyType(tensors),
        parts=tuple(part.info for part in parts),
    )


def read_part(source: ByteSource, part: int = 0) -> PartHeader:
    """Read one file's header.

    Args:
        source: The file; only its front is read, in pieces that grow from 1 MiB.
        part: Index of the file, kept in each tensor's entry.

    Raises:
        ModelError: It is no GGUF file, or its header is damaged or malicious.
    """
    return _HeaderReader(source, part).read()


def _shown(name: str) -> str:
    """A name from a file, fit for a message."""
    text = ascii(name) if not name.isprintable() else repr(name)
    return text if len(text) <= 96 else text[:93] + "…'"


def _damaged(file: str, subject: str, why: str) -> ModelError:
    return ModelError(
        f"{file}: {subject} {why}",
        "The file is damaged or was made to do harm: fetch it again from a source that you trust.",
        reason="model-header",
    )


class _HeaderReader:
    """Walks one header. ``buffer`` is the file's front as far as it was needed; ``position`` is where we are in it."""

    def __init__(self, source: ByteSource, part: int) -> None:
        self.source = source
        self.part = part
        self.size = source.size
        self.limit = min(self.size, MAX_HEADER_BYTES)
        self.buffer = b""
        self.position = 0
        self.subject = "the header"
        self.strings_left = MAX_STRINGS
        self.reads = 0
        self.tensor_count = 0
        self.expected_end = 0
        self.merges_follow = False

    def read(self) -> PartHeader:
        key_count, tensor_count = self._preamble()
        metadata: dict[str, object] = {}
        self.tensor_count = tensor_count
        for index in range(key_count):
            self._key(index, metadata)
        alignment = self._alignment(metadata)
        self._check_vocabulary(metadata)
        raw_tensors = [self._tensor(index) for index in range(tensor_count)]
        header_bytes = -(-self.position // alignment) * alignment
        tensors = self._place(raw_tensors, header_bytes, alignment)
        return PartHeader(
            metadata=MappingProxyType(metadata),
            tensors=MappingProxyType(tensors),
            info=PartInfo(name=self.source.name, size=self.size, header_bytes=min(header_bytes, self.size)),
        )

    # Bytes ---------------------------------------------------------------------------------------------------------

    def fail(self, why: str, subject: str = "") -> ModelError:
        return _damaged(self.source.name, subject or self.subject, why)

    def _require(self, end: int) -> None:
        """Have the file's first ``end`` bytes in the buffer, or say that they aren't there."""
        have = len(self.buffer)
        if end <= have:
            return
        if end > self.limit:
            if end > self.size:
                raise self.fail(f"ends beyond the file's {self.size} bytes")
            raise self.fail(f"ends beyond {MAX_HEADER_BYTES} bytes, more than any header needs")
        # What is known of the header by now tells well where it ends; where it doesn't, grow faster and faster.
        likely = max(end + self.tensor_count * TENSOR_ENTRY_BYTES, self.expected_end) + SLACK_BYTES
        target = max(end, FIRST_READ if not have else likely if self.reads < 4 else max(likely, 2 * have))
        target = min(target, self.limit)
        self.buffer += self.source.read_at(have, target - have)
        self.reads += 1

    def _take(self, size: int) -> int:
        """Move over ``size`` bytes that are there; returns where they begin."""
        start = self.position
        end = start + size
        if end > len(self.buffer):
            self._require(end)
        self.position = end
        return start

    def _u32(self) -> int:
        start = self._take(4)  # first, since it may replace the buffer
        value: int = _U32.unpack_from(self.buffer, start)[0]
        return value

    def _u64(self) -> int:
        start = self._take(8)
        value: int = _U64.unpack_from(self.buffer, start)[0]
        return value

    def _string(self, longest: int) -> bytes:
        length = self._u64()
        if length > longest:
            raise self.fail(f"has a string of {length} bytes (at most {longest} are allowed)")
        start = self._take(length)
        return self.buffer[start : start + length]

    # Parts of a header ---------------------------------------------------------------------------------------------

    def _preamble(self) -> tuple[int, int]:
        """Returns the counts of keys and tensors."""
        name = self.source.name
        if self.size:
            self._require(min(self.size, 32))
        start = self.buffer[:32]
        if start[:4] != MAGIC:
            hint = next((hint for beginning, hint in _FOREIGN_BEGINNINGS if start.startswith(beginning)), "")
            begins = f"it begins with {start[:4]!r}" if start else "it is empty"
            raise ModelError(f"{name} is not a GGUF file: {begins}", hint or "Name a .gguf file.", reason="not-gguf")
        front = self._take(_PREAMBLE.size)
        _, version, tensor_count, key_count = _PREAMBLE.unpack_from(self.buffer, front)
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if version & 0xFFFF == 0 and 0 < swapped <= 0xFFFF:
                raise ModelError(
                    f"{name} is a big-endian GGUF file",
                    "Only little-endian files are served: convert it (gguf-convert-endian) or fetch the usual one.",
                    reason="model-big-endian",
                )
            raise ModelError(
                f"{name} is of GGUF version {version}",
                f"Versions {' and '.join(map(str, VERSIONS))} are read: convert the model again.",
                reason="model-version",
            )
        for count, most, least_bytes, what in (
            (key_count, MAX_KEYS, _LEAST_KEY_BYTES, "keys"),
            (tensor_count, MAX_TENSORS, _LEAST_TENSOR_BYTES, "tensors"),
        ):
            if count * least_bytes > self.size - self.position:
                raise self.fail(f"claims {count} {what}, more than fit into the file's {self.size} bytes")
            if count > most:
                raise self.fail(f"claims {count} {what} (at most {most} are allowed)")
        return key_count, tensor_count

    def _key(self, index: int, metadata: dict[str, object]) -> None:
        self.subject = f"the name of key {index}"
        try:
            key = self._string(MAX_KEY_BYTES).decode()
        except UnicodeDecodeError:
            raise self.fail("is not UTF-8") from None
        if not key:
            raise self.fail("is empty")
        self.subject = f"key {_shown(key)}"
        if key in metadata:
            raise self.fail("appears twice")
        value_type = self._u32()
        expected = _KNOWN_SCALARS.get(key)
        if expected is not None and value_type not in expected:
            raise self.fail(f"is of type {self._type_name(value_type)}, not {self._names(expected)}")
        if key in _KNOWN_ARRAYS and value_type != ValueType.ARRAY:
            raise self.fail(f"is of type {self._type_name(value_type)}, not an array")
        if key == "tokenizer.ggml.tokens":
            self.merges_follow = metadata.get("tokenizer.ggml.model") == "gpt2"
        metadata[key] = self._array(key) if value_type == ValueType.ARRAY else self._scalar(value_type)

    def _scalar(self, value_type: int) -> object:
        if value_type == ValueType.STRING:
            return self._string(MAX_TEXT_BYTES).decode("utf-8", "replace")
        form = _SCALARS.get(value_type)
        if form is None:
            raise self.fail(f"is of unknown type {value_type}")
        start = self._take(form.size)
        value = form.unpack_from(self.buffer, start)[0]
        if value_type == ValueType.BOOL:
            if value > 1:
                raise self.fail(f"is a bool with the value {value}")
            return bool(value)
        return value

    def _array(self, key: str) -> object:
        element_type = self._u32()
        count = self._u64()
        expected = _KNOWN_ARRAYS.get(key)
        if expected is not None and element_type not in expected:
            raise self.fail(f"is an array of {self._type_name(element_type)}, not of {self._names(expected)}")
        if element_type == ValueType.ARRAY:
            raise self.fail("is an array of arrays, which no model needs")
        if element_type == ValueType.STRING:
            return self._strings(key, count)
        dtype = _DTYPES.get(element_type)
        if dtype is None:
            raise self.fail(f"is an array of unknown type {element_type}")
        if count * dtype.itemsize > self.size - self.position:
            raise self.fail(f"claims {count} elements, more than fit into the file's {self.size} bytes")
        start = self._take(count * dtype.itemsize)
        values = np.frombuffer(self.buffer, dtype, count, start)
        if element_type == ValueType.BOOL:
            if count and int(np.max(values)) > 1:
                raise self.fail("is an array of bools with a value above 1")
            values = values.astype(np.bool_)
        else:
            values = values.copy()
        values.flags.writeable = False
        return values

    def _strings(self, key: str, count: int) -> StringArray:
        if count * LENGTH_BYTES > self.size - self.position:
            raise self.fail(f"claims {count} strings, more than fit into the file's {self.size} bytes")
        if count > self.strings_left:
            raise self.fail(f"claims {count} strings (at most {MAX_STRINGS} are allowed in a header)")
        self.strings_left -= count
        # The one loop over a whole vocabulary: only locals, one unpack for each string, and bounds checked by
        # unpack_from itself; when it runs off the buffer, the file has more or the string before claimed too much.
        bounds = array("q")
        append, unpack, buffer = bounds.append, _U64.unpack_from, self.buffer
        begin = position = self.position
        done = 0
        while done < count:
            try:
                for _ in range(count - done):
                    (length,) = unpack(buffer, position)
                    append(position)
                    position += LENGTH_BYTES + length
                done = count
            except (struct.error, OverflowError):
                done = len(bounds)
                self._expect(key, count, count - done, position, (position - begin) / max(1, done))
                self._require(position + LENGTH_BYTES)
                buffer = self.buffer
        self._require(position)
        self.position = position
        append(position)
        return StringArray(self.buffer[begin:position], np.frombuffer(bounds, dtype=np.int64) - begin)

    def _expect(self, key: str, count: int, left: int, position: int, average: float) -> None:
        """Guess where the header ends from how far a vocabulary has come: its other arrays are as long, or absent."""
        end = position + int(left * average)
        if key == "tokenizer.ggml.tokens":
            if self.merges_follow:
                end += int(count * (average + 5)) + 4 * count  # pairs of tokens; kinds
            else:
                end += 8 * count  # scores and kinds
        # Later tokens are longer by and large: a twentieth more costs less than another request.
        self.expected_end = end + (end - position) // 20 + self.tensor_count * TENSOR_ENTRY_BYTES

    def _alignment(self, metadata: Mapping[str, object]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        self.subject = "key 'general.alignment'"
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.fail(f"is {alignment}, not a power of two")
        return alignment

    def _check_vocabulary(self, metadata: Mapping[str, object]) -> None:
        """Scores and kinds are one for each token."""
        tokens = metadata.get("tokenizer.ggml.tokens")
        for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
            values = metadata.get(key)
            if isinstance(tokens, StringArray) and isinstance(values, np.ndarray) and len(values) != len(tokens):
                raise self.fail(f"has {len(values)} elements for {len(tokens)} tokens", f"key '{key}'")

    def _tensor(self, index: int) -> tuple[str, GgmlType, tuple[int, ...], int, int]:
        """Returns name, type, shape (slowest axis first), bytes, and the offset from the data's start."""
        self.subject = f"the name of tensor {index}"
        try:
            name = self._string(MAX_TENSOR_NAME_BYTES).decode()
        except UnicodeDecodeError:
            raise self.fail("is not UTF-8") from None
        if not name:
            raise self.fail("is empty")
        self.subject = f"tensor {_shown(name)}"
        dimensions = self._u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.fail(f"has {dimensions} dimensions (1 to {MAX_DIMENSIONS} are allowed)")
        start = self._take(8 * dimensions)
        extents: tuple[int, ...] = struct.unpack_from(f"<{dimensions}Q", self.buffer, start)
        type_number = self._u32()
        offset = self._u64()
        try:
            ggml_type = GgmlType(type_number)
        except ValueError:
            known_as = RETIRED_TYPES.get(type_number, "")
            what = f"{type_number} ({known_as}, which GGML no longer has)" if known_as else str(type_number)
            raise ModelError(
                f"{self.source.name}: {self.subject} is of a type that Myelin does not know: {what}",
                "Take another quantization of the same model (Q4_K_M is always a good choice).",
                reason="tensor-type",
            ) from None
        block_elements, block_bytes = BLOCKS[ggml_type]
        elements = 1
        for extent in extents:
            if extent == 0:
                raise self.fail("has a dimension of 0")
            elements *= extent
        if extents[0] % block_elements:
            raise self.fail(
                f"has rows of {extents[0]} elements, not a multiple of the {block_elements} in a {ggml_type.name} block"
            )
        nbytes = elements // block_elements * block_bytes
        if nbytes > self.size:
            shape = "×".join(map(str, reversed(extents)))
            raise self.fail(f"of {shape} {ggml_type.name} elements has {nbytes} bytes, the file only {self.size}")
        return name, ggml_type, extents[::-1], nbytes, offset

    def _place(
        self,
        raw_tensors: Sequence[tuple[str, GgmlType, tuple[int, ...], int, int]],
        data_start: int,
        alignment: int,
    ) -> dict[str, TensorInfo]:
        """Turn relative offsets into the file's own; check that tensors are inside it and apart from each other."""
        tensors: dict[str, TensorInfo] = {}
        for name, ggml_type, shape, nbytes, relative in raw_tensors:
            self.subject = f"tensor {_shown(name)}"
            if name in tensors:
                raise self.fail("appears twice")
            if relative % alignment:
                raise self.fail(f"begins at offset {relative}, not a multiple of the alignment {alignment}")
            offset = data_start + relative
            if offset + nbytes > self.size:
                raise self.fail(f"ends at byte {offset + nbytes}, beyond the file's {self.size}")
            tensors[name] = TensorInfo(name, ggml_type, shape, self.part, offset, nbytes)
        end, before = data_start, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self.fail(f"overlaps tensor {_shown(before)}", f"tensor {_shown(tensor.name)}")
            end, before = tensor.offset + tensor.nbytes, tensor.name
        return tensors

    @staticmethod
    def _type_name(number: int) -> str:
        try:
            return ValueType(number).name.lower()
        except ValueError:
            return f"unknown type {number}"

    @staticmethod
    def _names(types: frozenset[ValueType]) -> str:
        return "an integer" if types == _INTEGERS else " or ".join(sorted(kind.name.lower() for kind in types))


def _check_split(parts: Sequence[PartHeader]) -> None:
    """The given files are all the parts of one model, in order."""
    count = _split_number(parts[0], "split.count", 1)
    names = ", ".join(part.info.name for part in parts)
    for index, part in enumerate(parts):
        number = _split_number(part, "split.no", 0)
        if number != index:
            raise ModelError(
                f"{part.info.name} is part {number + 1} of a split model, where part {index + 1} was expected",
                "Name the first part (…-00001-of-…); the others are found beside it.",
                reason="model-part",
            )
        if _split_number(part, "split.count", 1) != count:
            raise ModelError(
                f"{part.info.name} says that the model has {_split_number(part, 'split.count', 1)} parts, "
                f"{parts[0].info.name} says {count}",
                "They are parts of different models: fetch all parts from one place.",
                reason="model-part",
            )
    if max(count, 1) != len(parts):
        raise ModelError(
            f"the model has {count} parts, and {len(parts)} {'was' if len(parts) == 1 else 'were'} given: {names}",
            "Keep all parts in one folder under the names that they were published with, and name the first.",
            reason="model-part",
        )
    if len(parts) > 1:
        claimed = _split_number(parts[0], "split.tensors.count", -1)
        found = sum(len(part.tensors) for part in parts)
        if claimed not in (-1, found):
            raise ModelError(
                f"{parts[0].info.name} says that the model has {claimed} tensors, its parts hold {found}",
                "A part is damaged or of another model: fetch all parts again from one place.",
                reason="model-part",
            )


def _split_number(part: PartHeader, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if not isinstance(value, int):
        raise _damaged(part.info.name, f"key '{key}'", "is not an integer")
    return value
