"""The model's tokenizer, built from its header: text to ids as llama.cpp gives them, and ids to bytes.

``gpt2`` vocabularies go through :mod:`~myelin.model.tokenizers.byte_pair`, ``llama`` ones through
:mod:`~myelin.model.tokenizers.sentence_piece`; a ``tokenizer.json`` takes the place of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from myelin.errors import ModelError
from myelin.model.facts import ModelFacts
from myelin.model.tokenizers.special import SpecialTokens, spans
from myelin.model.tokenizers.vocabulary import Vocabulary, read_vocabulary


class Encoder(Protocol):
    """Encodes text that has no special tokens in it, and knows the bytes of ordinary tokens."""

    def encode(self, text: str, after_special: bool) -> list[int]:
        """The ids of ``text``, which begins the prompt or follows a special token where ``after_special``."""

    def spell(self, token: int) -> list[int]:
        """The text of a control token as ordinary tokens, for where it was written by somebody who may not use it."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token which is no control token stands for."""


class Tokenizer:
    """Text to token ids and back. Immutable, and safe to use from several threads.

    Attributes:
        vocab_size: Tokens of the vocabulary; the model's embedding may have more rows.
        bos_id, eos_id: The tokens that begin and end a text; None where the model has none.
        add_bos, add_eos: Whether ``encode`` puts them there when asked for special tokens.
        end_ids: Every token that ends a generation.
    """

    def __init__(self, vocabulary: Vocabulary, encoder: Encoder) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._specials = SpecialTokens(vocabulary.specials)
        self.vocab_size = len(vocabulary.pieces)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.add_bos = vocabulary.add_bos
        self.add_eos = vocabulary.add_eos
        self.end_ids = vocabulary.end_ids

    @property
    def specials(self) -> SpecialTokens:
        """Finds this vocabulary's special tokens in text."""
        return self._specials

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        barriers: Sequence[int] = (),
    ) -> list[int]:
        """The ids of a text.

        Args:
            text: Any text; what isn't valid Unicode in it (a lone surrogate) becomes U+FFFD.
            add_special: Begin with BOS and end with EOS where the model wants that.
            parse_special: Recognise control tokens in the text. Without, only user-defined tokens are.
            barriers: Ascending positions within ``text``, which must then be valid Unicode. No control token is
                recognised across one, and none comes about by merging in a piece of text that has one.
        """
        text = well_formed(text)
        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        after_special = True
        for fragment in self._specials.split(text, parse_hidden=parse_special, barriers=barriers):
            if isinstance(fragment, int):
                ids.append(fragment)
                after_special = True
                continue
            start, end = fragment
            plain = self._encoder.encode(text[start:end], after_special)
            if barriers and spans(barriers, start, end):
                plain = self._without_hidden(plain)
            ids += plain
            after_special = False
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of some tokens: their bytes joined, then read as UTF-8 with U+FFFD for what isn't.

        Args:
            ids: Tokens; those outside the vocabulary have no text.
            skip_special: Leave control tokens out; otherwise they appear as they are written.
        """
        if skip_special:
            joined = b"".join(map(self.token_bytes, ids))
        else:
            joined = b"".join(self._vocabulary.pieces[i] if self._is_silent(i) else self.token_bytes(i) for i in ids)
        return joined.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may be a part of a character; none for control tokens and ids outside the
        vocabulary."""
        if not 0 <= token < self.vocab_size or self._vocabulary.is_silent(token):
            return b""
        return self._encoder.token_bytes(token)

    def token_text(self, token: int) -> str:
        """How a token is written, special or not; empty for an id outside the vocabulary."""
        return self.decode([token], skip_special=False)

    def _is_silent(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and self._vocabulary.is_silent(token)

    def _without_hidden(self, ids: list[int]) -> list[int]:
        hidden = self._vocabulary.is_hidden
        return [plain for token in ids for plain in (self._encoder.spell(token) if hidden(token) else (token,))]


def well_formed(text: str) -> str:
    """``text`` with surrogate pairs joined, and U+FFFD for surrogates without a partner."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def build_tokenizer(facts: ModelFacts, tokenizer_json: Path | None = None) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        facts: The header.
        tokenizer_json: A file of the ``tokenizers`` library to split text with instead; which ids are special, and what
            bytes tokens stand for, still comes from the header where that has a vocabulary.

    Raises:
        ModelError: The header has no vocabulary, one of a kind that isn't served, or a damaged one; or the file can't
            be read, is another model's, or has more tokens than the model.
    """
    if tokenizer_json is not None:
        from myelin.model.tokenizers.json_file import json_encoder

        return Tokenizer(*json_encoder(facts, tokenizer_json))
    return Tokenizer(*header_encoder(facts))


def header_encoder(facts: ModelFacts) -> tuple[Vocabulary, Encoder]:
    """The vocabulary and the encoder that a header describes; errors as :func:`build_tokenizer`."""
    metadata = facts.metadata
    model = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre")
    if model == "gpt2":
        from myelin.model.tokenizers.byte_pair import BytePairEncoder, split_rule

        rule = split_rule(pre)
        vocabulary = read_vocabulary(metadata, add_bos_by_default=rule.add_bos)
        return vocabulary, BytePairEncoder(vocabulary, metadata, rule)
    if model == "llama":
        from myelin.model.tokenizers.sentence_piece import SentencePieceEncoder

        vocabulary = read_vocabulary(metadata, add_bos_by_default=True)
        return vocabulary, SentencePieceEncoder(vocabulary, metadata)
    if model is None or model in ("none", "no_vocab"):
        raise ModelError(
            "the model's file holds no tokenizer (tokenizer.ggml.model)",
            "Give the model's tokenizer.json, or use a file that holds its tokenizer.",
            reason="tokenizer-missing",
        )
    raise ModelError(
        f"the model's vocabulary is of the kind {model!r}; only gpt2 and llama are served",
        "Give the model's tokenizer.json.",
        reason="tokenizer-unknown",
    )
