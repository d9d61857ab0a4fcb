"""``llama`` vocabularies: SentencePiece's scores, merged best piece first, bytes where no piece fits.

The algorithm is llama.cpp's ``llm_tokenizer_spm``: every pair of neighbours whose joined text is a token is a
candidate; the candidate of the best score is merged, the leftmost of equals, until there is none. A heap holds the
candidates, and outdated ones are skipped as they come up, so *n* characters take O(n log n).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import cast

import numpy as np

from myelin.errors import ModelError
from myelin.model.tokenizers.vocabulary import HIDDEN, Kind, Vocabulary

SPACE = "▁".encode()
"""How a piece writes a space (U+2581)."""

_GONE = -2


def piece_bytes(vocabulary: Vocabulary, token: int) -> bytes:
    """The bytes that a token of a SentencePiece vocabulary stands for."""
    piece = vocabulary.pieces[token]
    kind = int(vocabulary.kinds[token])
    if kind & Kind.USER_DEFINED:
        return piece
    if kind & Kind.NORMAL:
        return piece.replace(SPACE, b" ")
    if kind & Kind.BYTE:
        value = _byte_value(piece)
        return piece if value is None else bytes((value,))
    return b""


def spell_piece(vocabulary: Vocabulary, byte_tokens: Sequence[int | None], token: int) -> list[int]:
    """A token's text in single characters of a SentencePiece vocabulary, or in bytes where a character is no token."""
    ids: list[int] = []
    for character in vocabulary.pieces[token].decode("utf-8", "replace"):
        data = character.encode()
        plain = vocabulary.ids.get(data)
        if plain is not None and not vocabulary.is_hidden(plain):
            ids.append(plain)
        else:
            ids.extend(spelt for byte in data if (spelt := byte_tokens[byte]) is not None)
    return ids


class SentencePieceEncoder:
    """Encodes text without special tokens.

    Args:
        vocabulary: Its pieces, with U+2581 for spaces.
        metadata: The header's keys: scores and ``add_space_prefix``.

    Raises:
        ModelError: The scores are not numbers, or too few.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, object]) -> None:
        self._vocabulary = vocabulary
        self._scores = _scores(metadata, len(vocabulary.pieces))
        prefix = metadata.get("tokenizer.ggml.add_space_prefix")
        self._add_space_prefix = prefix if isinstance(prefix, bool) else True
        self._byte_ids = byte_ids(vocabulary)

    def encode(self, text: str, after_special: bool) -> list[int]:
        """The ids of ``text``; ``after_special`` where it begins the prompt or follows a special token."""
        data = text.encode()
        if self._add_space_prefix and after_special:
            data = b" " + data
        return self._merge(data.replace(b" ", SPACE))

    def spell(self, token: int) -> list[int]:
        """A control token's text as ordinary characters."""
        return spell_piece(self._vocabulary, self._byte_ids, token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token which is no control token stands for."""
        return piece_bytes(self._vocabulary, token)

    def _spell_bytes(self, data: bytes) -> list[int]:
        return [token for byte in data if (token := self._byte_ids[byte]) is not None]

    def _merge(self, data: bytes) -> list[int]:
        lookup = self._vocabulary.ids.get
        scores = self._scores
        # Symbol i is data[starts[i]:ends[i]], at first one character; a merge grows the left one and removes the right.
        first_bytes = (np.frombuffer(data, dtype=np.uint8) & 0xC0) != 0x80
        starts = np.flatnonzero(first_bytes).tolist()
        count = len(starts)
        ends = starts[1:]
        ends.append(len(data))
        following = list(range(1, count + 1))
        following[-1] = -1
        previous = list(range(-1, count - 1))

        candidates: list[tuple[float, int, int, int]] = []
        for left in range(count - 1):
            end = ends[left + 1]
            token = lookup(data[starts[left] : end])
            if token is not None:
                candidates.append((-scores[token], left, left + 1, end))
        heapify(candidates)

        while candidates:
            _, left, right, end = heappop(candidates)
            if following[left] != right or ends[right] != end:
                continue  # one of the two was merged or has grown since
            after = following[right]
            ends[left] = end
            following[left] = after
            following[right] = _GONE
            before = previous[left]
            if before >= 0:
                token = lookup(data[starts[before] : end])
                if token is not None:
                    heappush(candidates, (-scores[token], before, left, end))
            if after >= 0:
                previous[after] = left
                token = lookup(data[starts[left] : ends[after]])
                if token is not None:
                    heappush(candidates, (-scores[token], left, after, ends[after]))

        ids: list[int] = []
        symbol = 0
        while symbol >= 0:
            piece = data[starts[symbol] : ends[symbol]]
            token = lookup(piece)
            if token is not None:
                ids.append(token)
            else:
                ids.extend(self._spell_bytes(piece))
            symbol = following[symbol]
        return ids


def _scores(metadata: Mapping[str, object], count: int) -> Sequence[float]:
    """The scores, viewed as float32: indexing is cheaper than a NumPy array's, and 262,144 floats need not be made."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        return cast("Sequence[float]", np.zeros(count, dtype=np.float32).data)
    numbers = np.asarray(scores)
    if numbers.ndim != 1 or numbers.dtype.kind not in "fiu" or len(numbers) < count:
        raise ModelError(
            f"the model's tokenizer.ggml.scores are not {count} numbers",
            "The file is damaged: fetch it again.",
            reason="tokenizer-malformed",
        )
    return cast("Sequence[float]", np.ascontiguousarray(numbers, dtype=np.float32).data)


def _byte_value(piece: bytes) -> int | None:
    """The byte that a piece such as ``<0x0A>`` names."""
    if len(piece) == 6 and piece.startswith(b"<0x") and piece.endswith(b">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def byte_ids(vocabulary: Vocabulary) -> list[int | None]:
    """The token for each byte; the unknown token where the vocabulary has none."""
    ids: list[int | None] = []
    for byte in range(256):
        token = vocabulary.ids.get(b"<0x%02X>" % byte)
        if token is None:
            token = vocabulary.ids.get(bytes((byte,)))
        if token is None or (vocabulary.kinds[token] & HIDDEN and vocabulary.unknown_id is not None):
            token = vocabulary.unknown_id
        ids.append(token)
    return ids
