"""``gpt2`` vocabularies: byte-level pairs, merged by rank, with the ``tokenizers`` library.

The library and llama.cpp merge alike where every merge's parts and product are tokens. Where they aren't, we give the
library stand-ins for what is missing, and spell those out afterwards as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from myelin.errors import ModelError
from myelin.model.tokenizers.split_rules import SPLIT_RULES, SplitRule
from myelin.model.tokenizers.vocabulary import Kind, Vocabulary, raw_strings

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer


def split_rule(pre: object) -> SplitRule:
    """The rule for a header's ``tokenizer.ggml.pre``; a file without one is split by the rule ``default``.

    Raises:
        ModelError: The name is none that we know.
    """
    if pre is None or pre == "":
        return SPLIT_RULES["default"]
    rule = SPLIT_RULES.get(pre) if isinstance(pre, str) else None
    if rule is None:
        raise ModelError(
            f"the model splits text by the rule {pre!r} (tokenizer.ggml.pre), which is not known",
            "Give the model's tokenizer.json.",
            reason="tokenizer-unknown",
        )
    return rule


@cache
def byte_letters() -> tuple[str, ...]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it prints, else U+0100 and on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in shown}
    for index, byte in enumerate(byte for byte in range(256) if byte not in letters):
        letters[byte] = chr(0x100 + index)
    return tuple(letters[byte] for byte in range(256))


@cache
def _letter_bytes() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(byte_letters())}


def letters_bytes(vocabulary: Vocabulary, token: int) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for."""
    piece = vocabulary.pieces[token]
    kind = int(vocabulary.kinds[token])
    if kind & Kind.USER_DEFINED:
        return piece
    if not kind & (Kind.NORMAL | Kind.BYTE):
        return b""
    values = _letter_bytes()
    out = bytearray()
    for letter in piece.decode("utf-8", "replace"):
        value = values.get(letter)
        if value is None:  # a token that was added as it is, outside the byte-level letters
            out += letter.encode()
        else:
            out.append(value)
    return bytes(out)


def spell_letters(vocabulary: Vocabulary, token: int) -> list[int]:
    """A token's text in single letters of a byte-level vocabulary; bytes that it lacks are left out."""
    letters = byte_letters()
    spelt = (vocabulary.ids.get(letters[byte].encode()) for byte in vocabulary.pieces[token])
    return [plain for plain in spelt if plain is not None and not vocabulary.is_hidden(plain)]


class BytePairEncoder:
    """Encodes text without special tokens.

    Args:
        vocabulary: Its pieces, in byte-level letters.
        metadata: The header's keys: the merges.
        rule: How text is split into words.

    Raises:
        ModelError: The vocabulary has no merges, or they are no strings.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, object], rule: SplitRule) -> None:
        self._vocabulary = vocabulary
        merges = metadata.get("tokenizer.ggml.merges")
        if merges is None:
            raise ModelError(
                "the model's vocabulary has no merges (tokenizer.ggml.merges): text can't be cut into its tokens",
                "Give the model's tokenizer.json, or convert the model again.",
                reason="tokenizer-missing",
            )
        lines = [line.decode("utf-8", "replace") for line in raw_strings(merges, "merges")]
        pieces: dict[str, int] = {}
        for token, piece in enumerate(vocabulary.pieces):
            pieces.setdefault(piece.decode("utf-8", "replace"), token)
        self._stand_ins: dict[int, list[int]] = {}
        self._add_stand_ins(pieces, byte_letters())
        self._tokenizer = self._build(pieces, lines, rule)

    def encode(self, text: str, after_special: bool) -> list[int]:
        """The ids of ``text``; ``after_special`` makes no difference here."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._stand_ins and not self._stand_ins.keys().isdisjoint(ids):
            return [real for token in ids for real in self._stand_ins.get(token, (token,))]
        return ids

    def spell(self, token: int) -> list[int]:
        """A control token's text as ordinary letters; bytes that the vocabulary lacks are left out."""
        return spell_letters(self._vocabulary, token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token which is no control token stands for."""
        return letters_bytes(self._vocabulary, token)

    def _build(self, pieces: dict[str, int], lines: list[str], rule: SplitRule) -> LibraryTokenizer:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        # Of a merge that is there twice the first counts; the library would take the last.
        pairs = [tuple(line.split(" ", 1)) for line in dict.fromkeys(lines)]
        try:
            model = models.BPE(pieces, pairs, ignore_merges=rule.ignore_merges)  # type: ignore[arg-type] # checked by it
        except Exception:
            whole = [pair for line in dict.fromkeys(lines) if (pair := _pair(line)) is not None]
            self._add_stand_ins(pieces, (part for left, right in whole for part in (left, right, left + right)))
            model = models.BPE(pieces, whole, ignore_merges=rule.ignore_merges)
        tokenizer = Tokenizer(model)
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.library_patterns()]
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
        return tokenizer

    def _add_stand_ins(self, pieces: dict[str, int], needed: Iterable[str]) -> None:
        """Give ids beyond the vocabulary to pieces that it lacks.

        llama.cpp looks such a piece up byte by byte, *after* its bytes were replaced by letters: only ASCII is found.
        """
        for piece in needed:
            if piece not in pieces:
                stand_in = len(self._vocabulary.pieces) + len(self._stand_ins)
                spelt = (self._vocabulary.ids.get(bytes((byte,))) for byte in piece.encode())
                self._stand_ins[stand_in] = [token for token in spelt if token is not None]
                pieces[piece] = stand_in


def _pair(line: str) -> tuple[str, str] | None:
    """The two parts of a merge; the first may begin with a space. None where there aren't two."""
    space = line.find(" ", 1)
    if space < 0 or space == len(line) - 1:
        return None
    return line[:space], line[space + 1 :]
