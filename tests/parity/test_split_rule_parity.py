"""Every split rule of byte-level vocabularies against llama.cpp, on a vocabulary that shows where words end.

Its tokens are the 256 bytes and pairs of them, ranked at random: in each word the pairs lie differently, so that
another cut nearly always gives other ids.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from myelin.model.gguf import read_facts
from myelin.model.local import LocalFile
from myelin.model.tokenizer import build_tokenizer
from myelin.model.tokenizers.byte_pair import byte_letters
from myelin.model.tokenizers.split_rules import SPLIT_RULES
from myelin_testkit.llama import LlamaOracle

pytestmark = pytest.mark.parity

WIDTH = 32
PAIRS = 24_000
TEXTS = 150

# One name for each rule.
NAMES = sorted({id(rule): name for name, rule in SPLIT_RULES.items()}.values())

POOLS = (
    [chr(code) for code in range(0x20, 0x7F)],
    list(" \t\n\r\v\f\0\x1c\x1d\x1e\x1f\x85\xa0\u2003\u2028\u3000\u1680"),
    list("  \n\r\t"),
    [chr(code) for code in range(0x80, 0x250)],
    [chr(code) for code in range(0x370, 0x590)],
    [chr(code) for code in range(0x590, 0xE80)],
    [chr(code) for code in range(0x3000, 0x3400)],
    [chr(code) for code in range(0x4E00, 0x4F00)],
    [chr(code) for code in range(0xAC00, 0xAD00)],
    [chr(code) for code in range(0xFF00, 0xFFEF)],
    [*(chr(code) for code in range(0x1F300, 0x1F700)), "\u200d", "\ufe0f"],
    list("0123456789"),
    list("0123456789٣²½Ⅷ"),
    ["'s", "'T", "'re", "'LL", "n't", "'S"],
    list("aAbBzZéÉßΩσЖж"),
    list("~$+<=>^|`!?.,…。，、।۔،()/"),
    ["\u1c89", "\U00013460", "\U00016d43", "\U0001fae9", "\u0897", "\U00010d40"],  # Unicode 16
)


@cache
def texts() -> list[str]:
    draw = random.Random(11)
    made: list[str] = []
    for _ in range(TEXTS):
        runs = (draw.choice(POOLS) for _ in range(draw.randint(0, 16)))
        made.append("".join("".join(draw.choice(pool) for _ in range(draw.randint(1, 7))) for pool in runs))
    return made


def packed(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def string_array(texts: Sequence[str]) -> bytes:
    return struct.pack("<IQ", 8, len(texts)) + b"".join(map(packed, texts))


@cache
def vocabulary() -> tuple[int, bytes, bytes]:
    """How many tokens, and the arrays of tokens and merges."""
    letters = byte_letters()
    draw = random.Random(5)
    ascii_pairs = [(left, right) for left in letters[:128] for right in letters[:128]]
    others = [(left, right) for left in letters for right in letters[128:]]
    pairs = ascii_pairs + draw.sample(others, PAIRS - len(ascii_pairs))
    draw.shuffle(pairs)
    tokens = [*letters, *(left + right for left, right in pairs), "<s>", "</s>"]
    return len(tokens), string_array(tokens), string_array([f"{left} {right}" for left, right in pairs])


def write_model(path: Path, pre: str) -> None:
    """A llama model of one block whose weights are holes in the file."""
    count, tokens, merges = vocabulary()
    keys: list[tuple[str, int, bytes]] = [
        ("general.architecture", 8, packed("llama")),
        ("llama.block_count", 4, struct.pack("<I", 1)),
        ("llama.context_length", 4, struct.pack("<I", 256)),
        ("llama.embedding_length", 4, struct.pack("<I", WIDTH)),
        ("llama.feed_forward_length", 4, struct.pack("<I", WIDTH)),
        ("llama.attention.head_count", 4, struct.pack("<I", 1)),
        ("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        ("llama.rope.dimension_count", 4, struct.pack("<I", WIDTH)),
        ("tokenizer.ggml.model", 8, packed("gpt2")),
        ("tokenizer.ggml.pre", 8, packed(pre)),
        ("tokenizer.ggml.tokens", 9, tokens),
        ("tokenizer.ggml.merges", 9, merges),
        ("tokenizer.ggml.token_type", 9, struct.pack(f"<IQ{count}i", 5, count, *[1] * (count - 2), 3, 3)),
        ("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", count - 2)),
        ("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", count - 1)),
    ]
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (WIDTH, count)),
        ("output_norm.weight", (WIDTH,)),
        ("blk.0.attn_norm.weight", (WIDTH,)),
        ("blk.0.ffn_norm.weight", (WIDTH,)),
        *((f"blk.0.{name}.weight", (WIDTH, WIDTH)) for name in square),
    ]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    header += b"".join(packed(key) + struct.pack("<I", kind) + value for key, kind, value in keys)
    offset = 0
    for name, shape in tensors:
        header += packed(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
        size = 4
        for extent in shape:
            size *= extent
        offset += -(-size // 32) * 32
    header += bytes(-len(header) % 32)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + offset)


@pytest.mark.parametrize("name", NAMES)
def test_text_is_split_as_llama_cpp_splits_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, name)
    tokenizer = build_tokenizer(read_facts([LocalFile(path)]))
    with LlamaOracle(path, context=64) as oracle:
        differing = [text for text in texts() if tokenizer.encode(text) != oracle.tokenize(text)]
    assert differing == []
