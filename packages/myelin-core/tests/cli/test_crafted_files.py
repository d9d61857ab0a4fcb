"""Crafted model files, good but odd and bad, and what the doctor says of each, here and behind a URL."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from myelin.model.quant import GgmlType
from myelin_testkit.hub import FakeHub
from myelin_testkit.synthetic import Recipe, write_model

Myelin = Callable[..., tuple[int, str, str]]
Change = Callable[[bytes], bytes]
LONGEST_S = 10.0
"""Of processor time, what is imported for the first inspection included."""

LLAMA = Recipe(n_layers=2)
BROKEN_TEMPLATE = "{{ raise_exception('no greetings') }}"


@dataclass(frozen=True)
class Craft:
    """A file and the right answer.

    Attributes:
        name: What is odd about it.
        recipe: What it is made from.
        change: What is done to its bytes.
        says: Part of what the doctor says; empty for a file that can be served.
        parts: Files of a split model.
        given: The number of the part that is named.
        leave_out: The number of the part that is missing.
    """

    name: str
    recipe: Recipe = LLAMA
    change: Change = bytes
    says: str = ""
    parts: int = 1
    given: int = 1
    leave_out: int = 0


def renamed(old: str, new: str) -> Change:
    """A key or tensor under another name of the same length, as if it weren't there."""
    assert len(old) == len(new)

    def change(data: bytes) -> bytes:
        assert data.count(struct.pack("<Q", len(old)) + old.encode()) == 1
        return data.replace(struct.pack("<Q", len(old)) + old.encode(), struct.pack("<Q", len(new)) + new.encode())

    return change


def after(text: str, skip: int, new: bytes) -> Change:
    """Other bytes, ``skip`` bytes behind the name ``text``."""

    def change(data: bytes) -> bytes:
        at = data.index(struct.pack("<Q", len(text)) + text.encode()) + 8 + len(text) + skip
        return data[:at] + new + data[at + len(new) :]

    return change


def at(offset: int, new: bytes) -> Change:
    """Other bytes at a place."""
    return lambda data: data[:offset] + new + data[offset + len(new) :]


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def value_type(key: str, kind: int) -> Change:
    return after(key, 0, u32(kind))


MATRIX = "blk.1.attn_q.weight"  # a name is followed by its dimensions (u32), two extents (u64), its type, its offset
ADD_BOS = "tokenizer.ggml.add_bos_token"
TOKENS = "tokenizer.ggml.tokens"

GOOD = [
    Craft("plain"),
    Craft("no output matrix", Recipe(n_layers=2, tied=True)),
    Craft("rope_freqs for every stage", Recipe(n_layers=3, rope_freqs=True)),
    Craft("an odd vocabulary size", Recipe(vocab_size=317)),
    Craft(
        "Q4_0 with a Q6_K output",
        Recipe(types={"output.weight": GgmlType.Q6_K, "*.ffn_down.weight": GgmlType.Q4_1, "*": GgmlType.Q4_0}),
    ),
    Craft("no pre", change=renamed("tokenizer.ggml.pre", "tokenizer.ggml.prX")),
    Craft("no BOS", change=renamed("tokenizer.ggml.bos_token_id", "tokenizer.ggml.boX_token_id")),
    Craft("no rule for BOS", change=renamed(ADD_BOS, "tokenizer.ggml.add_boX_token")),
    Craft("no kinds of tokens", change=renamed("tokenizer.ggml.token_type", "tokenizer.ggml.tokenXtype")),
    Craft("no name", change=renamed("general.name", "general.nXme")),
    Craft("a split model whose first part has no tensors", parts=3),
    Craft("two parts", parts=2),
    Craft("sliding windows without a pattern", Recipe("gemma3", n_layers=7, sliding_window=32)),
    Craft("biases", Recipe("qwen2", n_layers=2)),
    Craft("norms of queries and keys", Recipe("qwen3", n_layers=2)),
    Craft("a SentencePiece vocabulary", Recipe(tokenizer="llama")),
    Craft("one layer, so nowhere to cut", Recipe(n_layers=1)),
    Craft("a chat template that fails", Recipe(chat_template=BROKEN_TEMPLATE)),
    Craft("bytes behind the last tensor", change=lambda data: data + bytes(4096)),
    Craft("version 2", change=at(4, u32(2))),
]

BAD = [
    Craft("an empty file", change=lambda data: b"", says="not a GGUF file"),
    Craft("another kind of file", change=at(0, b"PK\3\4"), says="not a GGUF file"),
    Craft("a web page", change=lambda data: b"<!DOCTYPE html><html></html>", says="not a GGUF file"),
    Craft("a pointer of Git LFS", change=lambda data: b"version https://git-lfs.github.com/spec/v1\n", says="GGUF"),
    Craft("big-endian", change=at(4, struct.pack(">I", 3)), says="big-endian"),
    Craft("version 1", change=at(4, u32(1)), says="version 1"),
    Craft("2^63 keys", change=at(16, u64(2**63)), says="keys"),
    Craft("2^40 tensors", change=at(8, u64(2**40)), says="tensors"),
    Craft("a key of 2^63 bytes", change=at(24, u64(2**63)), says="key 0"),
    Craft("2^62 tokens", change=after(TOKENS, 8, u64(2**62)), says=TOKENS),
    Craft("an array of arrays", change=after(TOKENS, 4, u32(9)), says=TOKENS),
    Craft("narrower tokens", change=after(TOKENS, 4, u32(0)), says=TOKENS),
    Craft("a bool of 7", change=after(ADD_BOS, 4, b"\7"), says=ADD_BOS),
    Craft("a rule of a wrong type", change=value_type(ADD_BOS, 1), says=ADD_BOS),
    Craft("two keys of one name", change=lambda data: same_key(data), says="appears twice"),
    Craft("two tensors of one name", change=lambda data: doubled_tensor(data), says="blk.0.attn_norm.weight"),
    Craft("a tensor of dimension 0", change=after(MATRIX, 4, u64(0)), says=MATRIX),
    Craft("dimensions whose product wraps", change=after(MATRIX, 4, u64(2**63) + u64(2**3)), says=MATRIX),
    Craft("five dimensions", change=after(MATRIX, 0, u32(5)), says=MATRIX),
    Craft("part of a block", Recipe(types={"*": GgmlType.Q4_0}), after(MATRIX, 4, u64(255)), MATRIX),
    Craft("an unknown type", change=after(MATRIX, 20, u32(4321)), says="4321"),
    Craft("a type that GGML retired", change=after(MATRIX, 20, u32(4)), says="Q4_2"),
    Craft("a tensor past the end", change=after(MATRIX, 24, u64(2**50)), says=MATRIX),
    Craft("an offset that is not aligned", change=after(MATRIX, 24, u64(33)), says=MATRIX),
    Craft("two tensors in one place", change=after(MATRIX, 24, u64(0)), says="overlap"),
    Craft("a header that is cut", change=lambda data: data[:3000], says="the file's 3000 bytes"),
    Craft("data that is cut", change=lambda data: data[:-1], says="output.weight"),
    Craft("another architecture", change=lambda data: data.replace(b"llama", b"mamba"), says="mamba"),
    Craft("no layers", change=after("llama.block_count", 4, u32(0)), says="block_count"),
    Craft("2^31 layers", change=after("llama.block_count", 4, u32(2**31)), says="block_count"),
    Craft("no epsilon", change=renamed("llama.attention.layer_norm_rms_epsilon", "l" * 38), says="epsilon"),
    Craft("no merges", change=renamed("tokenizer.ggml.merges", "tokenizer.ggml.merXes"), says="no merges"),
    Craft("another tokenizer", change=after("tokenizer.ggml.model", 12, b"bert"), says="'bert'"),
    Craft("a layer without a matrix", change=renamed(MATRIX, "blk.1.attn_X.weight"), says="blk.1.attn_"),
    Craft("embeddings of another width", change=after("llama.embedding_length", 4, u32(512)), says="token_embd.weight"),
    Craft("the second part of a split model", parts=3, given=2, says="part 2 of 3"),
    Craft("a part that is missing", parts=3, leave_out=3, says="00003-of-00003"),
]


def same_key(data: bytes) -> bytes:
    key, other = "llama.attention.value_length", "llama.attention.key_length"
    first = data.index(u64(len(other)) + other.encode())
    second = data.index(u64(len(key)) + key.encode())
    entry = data[first : first + 8 + len(other) + 8]
    end = second + 8 + len(key) + 8
    # The entry is two bytes shorter than the one that it takes the place of: the padding before the data grows.
    return _repadded(data, data[:second] + entry + data[end:])


def doubled_tensor(data: bytes) -> bytes:
    return renamed("blk.1.attn_norm.weight", "blk.0.attn_norm.weight")(data)


def _repadded(old: bytes, new: bytes) -> bytes:
    return new + bytes(len(old) - len(new))


def write(craft: Craft, folder: Path) -> list[Path]:
    """The craft's files; the first is the one that is named, but for ``given``."""
    paths = write_model(craft.recipe, folder / "model.gguf", parts=craft.parts)
    paths[0].write_bytes(craft.change(paths[0].read_bytes()))
    if craft.leave_out:
        paths[craft.leave_out - 1].unlink()
    return paths


def judge(craft: Craft, myelin: Myelin, source: str) -> dict[str, Any]:
    """Ask the doctor, and hold its answer to the craft's."""
    began = time.process_time()
    code, out, err = myelin("inspect", source, "--json")
    assert time.process_time() - began < LONGEST_S
    if not craft.says:
        assert code == 0, out + err
        document: dict[str, Any] = json.loads(out)
        assert (document["servable"], document["problems"]) == (True, [])
        assert document["legal_cuts"] == list(range(1, craft.recipe.n_layers))
        return document
    assert code == 1, out + err
    reasons = " ".join(json.loads(out)["problems"]) if out else err
    assert craft.says in reasons
    assert "Traceback" not in err
    return {}


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.mark.parametrize("craft", GOOD + BAD, ids=lambda craft: craft.name)
def test_the_doctor_knows_what_it_sees(craft: Craft, myelin: Myelin, tmp_path: Path) -> None:
    paths = write(craft, tmp_path)
    document = judge(craft, myelin, str(paths[craft.given - 1]))
    if craft.name == "a chat template that fails":
        assert "no greetings" in document["tokenizer"]["chat_error"]


@pytest.mark.parametrize("craft", GOOD + BAD, ids=lambda craft: craft.name)
def test_the_doctor_says_the_same_of_a_file_behind_a_url(
    craft: Craft, myelin: Myelin, tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYELIN_MODEL_CACHE_DIR", str(tmp_path / "cache"))
    paths = write(craft, tmp_path)
    place = craft.name.replace(" ", "-")
    for path in paths:
        if path.exists():
            hub.put(f"{place}/{path.name}", path.read_bytes())
    before = hub.served
    judge(craft, myelin, hub.file_url(f"{place}/{paths[craft.given - 1].name}"))
    assert hub.served - before <= len(paths) * ((1 << 20) + 1)
