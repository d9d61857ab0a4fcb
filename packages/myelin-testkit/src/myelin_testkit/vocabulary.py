"""Small, complete tokenizers for synthetic models: every byte can be written, and a few pieces are merged."""

from __future__ import annotations

from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""``llama_token_type``."""

_WORDS = ("the", "and", "ing", "er", "on", "in", "of", "to", "is", "at", "re", "hello", "world", "token", "layer", "12")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What ``tokenizer.ggml.*`` of a model file says.

    Attributes:
        model: ``gpt2`` (byte-level BPE) or ``llama`` (SentencePiece with byte fallback).
        pre: Name of the split pattern; empty for SentencePiece.
        tokens, types: One for each id.
        merges: Of a ``gpt2`` vocabulary, best first.
        scores: Of a ``llama`` vocabulary, one for each id.
        bos, eos: Ids.
        add_bos: Whether a prompt begins with it.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...]
    bos: int
    eos: int
    add_bos: bool


def byte_letters() -> dict[int, str]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves, others for ``U+0100`` and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + index) for index, byte in enumerate(others)}


def byte_level(size: int, pre: str = "gpt-2") -> Vocabulary:
    """A ``gpt2`` vocabulary of ``size`` tokens, at least 259: three control tokens, the bytes, merges, unused ones.

    Raises:
        ValueError: ``size`` is too small.
    """
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_letters().values()]
    _check_size(size, len(tokens))
    merges: list[str] = []
    known = set(tokens)
    for word in (*_WORDS, *("Ġ" + word for word in _WORDS)):
        left = word[0]
        for letter in word[1:]:
            if left + letter not in known and len(tokens) < size:
                merges.append(f"{left} {letter}")
                tokens.append(left + letter)
                known.add(left + letter)
            left += letter
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3)
    tokens, types = _filled(tokens, types, size)
    return Vocabulary("gpt2", pre, tuple(tokens), tuple(types), tuple(merges), (), bos=0, eos=0, add_bos=False)


def sentence_piece(size: int) -> Vocabulary:
    """A ``llama`` vocabulary of ``size`` tokens, at least 260: unknown, BOS, EOS, the bytes, pieces, then unused ones.

    Raises:
        ValueError: ``size`` is too small.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    _check_size(size, len(tokens) + 1)
    known = set(tokens)
    spaced = [("▁" + word)[:length] for word in _WORDS for length in range(1, len(word) + 2)]
    bare = [word[:length] for word in _WORDS for length in range(1, len(word) + 1)]
    letters = [chr(code) for code in (*range(ord(" ") + 1, 127), *(ord(letter) for letter in "äéñ日本語"))]
    for piece in (*spaced, *letters, *bare):
        if piece not in known and len(tokens) < size:
            tokens.append(piece)
            types.append(NORMAL)
            known.add(piece)
    tokens, types = _filled(tokens, types, size)
    scores = tuple(0.0 if kind != NORMAL else -float(index) for index, kind in enumerate(types))
    return Vocabulary("llama", "", tuple(tokens), tuple(types), (), scores, bos=1, eos=2, add_bos=True)


def _check_size(size: int, least: int) -> None:
    if size < least:
        raise ValueError(f"a vocabulary of {size} tokens has no room for the {least} that it needs")


def _filled(tokens: list[str], types: list[int], size: int) -> tuple[list[str], list[int]]:
    """Fill up to ``size`` with unused tokens."""
    rest = size - len(tokens)
    return [*tokens, *(f"<unused{index}>" for index in range(rest))], [*types, *[UNUSED] * rest]
