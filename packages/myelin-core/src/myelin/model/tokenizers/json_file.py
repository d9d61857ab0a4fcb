"""A ``tokenizer.json`` in place of the header's own rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from myelin.errors import ModelError
from myelin.model.facts import ModelFacts
from myelin.model.tokenizers.byte_pair import letters_bytes, spell_letters
from myelin.model.tokenizers.sentence_piece import byte_ids, piece_bytes, spell_piece
from myelin.model.tokenizers.split_rules import SPLIT_RULES
from myelin.model.tokenizers.vocabulary import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

_CONTROL, _USER_DEFINED, _NORMAL, _BYTE = 3, 4, 1, 6
_SAMPLES = 64


class JsonEncoder:
    """Encodes text without special tokens with the ``tokenizers`` library.

    Args:
        tokenizer: As it was read; changed to neither pad, truncate nor recognise special tokens by itself.
        vocabulary: The tokens; its ``model`` says whether pieces are byte-level letters (``gpt2``) or SentencePiece's.
    """

    def __init__(self, tokenizer: LibraryTokenizer, vocabulary: Vocabulary) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._byte_level = vocabulary.model == "gpt2"
        self._byte_tokens = () if self._byte_level else tuple(byte_ids(vocabulary))

    def encode(self, text: str, after_special: bool) -> list[int]:
        """The ids of ``text``; whether a space comes before it is for the file to say."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def spell(self, token: int) -> list[int]:
        """A control token's text as ordinary characters."""
        if self._byte_level:
            return spell_letters(self._vocabulary, token)
        return spell_piece(self._vocabulary, self._byte_tokens, token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token which is no control token stands for."""
        return letters_bytes(self._vocabulary, token) if self._byte_level else piece_bytes(self._vocabulary, token)


def json_encoder(facts: ModelFacts, path: Path) -> tuple[Vocabulary, JsonEncoder]:
    """The vocabulary of a header, completed from a ``tokenizer.json``, and an encoder that uses that file.

    Raises:
        ModelError: The file can't be read, is another model's, or has more tokens than the model.
    """
    from tokenizers import Tokenizer

    try:
        text = path.read_text("utf-8")
        tokenizer = Tokenizer.from_str(text)
    except FileNotFoundError:
        raise ModelError(
            f"there is no file {path}", "Check the path of the tokenizer.", reason="tokenizer-missing"
        ) from None
    except Exception as error:  # the library raises plain Exception for everything that it can't read
        raise ModelError(
            f"{path} is no tokenizer: {error}", "Give the model's tokenizer.json.", reason="tokenizer-malformed"
        ) from None

    used = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    metadata = facts.metadata
    embedding = facts.tensors.get("token_embd.weight")
    tokens = metadata.get("tokenizer.ggml.tokens")
    rows = embedding.shape[0] if embedding is not None else len(tokens) if isinstance(tokens, Sequence) else used
    if used > rows:
        raise ModelError(
            f"{path.name} has {used} tokens, but the model knows only {rows}",
            "Give the tokenizer.json of this very model.",
            reason="tokenizer-mismatch",
        )
    if tokens is None or metadata.get("tokenizer.ggml.model") not in ("gpt2", "llama"):
        metadata = {**metadata, **_described(tokenizer, text, used)}
    vocabulary = read_vocabulary(metadata, add_bos_by_default=_adds_bos(metadata, tokenizer))
    _check_same(vocabulary, tokenizer, used, path)
    return vocabulary, JsonEncoder(tokenizer, vocabulary)


def _described(tokenizer: LibraryTokenizer, text: str, count: int) -> dict[str, object]:
    """What a header would say of this tokenizer."""
    pieces = [tokenizer.id_to_token(token) or "" for token in range(count)]
    byte_level = '"ByteLevel"' in json.dumps({key: json.loads(text).get(key) for key in ("pre_tokenizer", "decoder")})
    types = np.full(count, _NORMAL, dtype=np.int32)
    for token, piece in enumerate(pieces):
        if not byte_level and len(piece) == 6 and piece.startswith("<0x"):
            types[token] = _BYTE
    for token, added in tokenizer.get_added_tokens_decoder().items():
        types[token] = _CONTROL if added.special else _USER_DEFINED
    return {
        "tokenizer.ggml.model": "gpt2" if byte_level else "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
    }


def _adds_bos(metadata: Mapping[str, object], tokenizer: LibraryTokenizer) -> bool:
    """Whether a prompt begins with BOS where the header doesn't say: by the header's rule, or what the file does."""
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    pre = metadata.get("tokenizer.ggml.pre")
    rule = SPLIT_RULES.get(pre) if isinstance(pre, str) else None
    if rule is not None:
        return rule.add_bos
    return tokenizer.encode("", add_special_tokens=True).ids[:1] == [metadata.get("tokenizer.ggml.bos_token_id")]


def _check_same(vocabulary: Vocabulary, tokenizer: LibraryTokenizer, count: int, path: Path) -> None:
    """Refuse another model's file: most of a sample of ids must have the same text in both. (Not all: converters write
    added tokens in their own way.)"""
    total = min(count, len(vocabulary.pieces))
    sample = range(0, total, max(1, total // _SAMPLES))
    same = sum(vocabulary.pieces[i].decode("utf-8", "replace") == tokenizer.id_to_token(i) for i in sample)
    if same * 2 < len(sample):
        raise ModelError(
            f"{path.name} numbers its tokens differently from the model",
            "Give the tokenizer.json of this very model.",
            reason="tokenizer-mismatch",
        )
